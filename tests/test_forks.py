"""The build's server of forks: what a step prints and returns is what its command does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "python" / "dflash_kernels"

# A build in small: commands run by the scenario, and how many forks `prepare` was called for.
SETUP = """
import json, os, signal, subprocess, sys
sys.path.insert(0, {path!r})
from dflash_kernels import forks
prepared = os.open({log!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
def prepare():
    os.write(prepared, b"x")
    def say(words):
        print(*words, os.getppid() == server); print("warning", file=sys.stderr)
    def refuse(words):
        raise SystemExit("compile gate: " + words[0])
    def fail(words):
        raise KeyError(words[0])
    def die(words):
        os.kill(os.getpid(), signal.SIGKILL)
    server = os.getpid()
    return dict(say=say, refuse=refuse, fail=fail, die=die)
def start(*arguments):
    command = [sys.executable, "-IS", forks.__file__, *arguments]
    return subprocess.Popen(command, pass_fds=[fd], env=os.environ | {{forks.VARIABLE: str(fd)}},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
with forks.server(prepare) as fd:
    started = [start(*arguments) for arguments in {commands!r}]
    done = [(*p.communicate(), p.returncode) for p in started]
print(json.dumps(done))
"""


Outcomes = Callable[..., tuple[list[list], int]]


@pytest.fixture
def outcomes(tmp_path: Path) -> Outcomes:
    def of(*commands: list[str]) -> tuple[list[list], int]:
        """(stdout, stderr, status) of commands that run at the same time, and the preparations."""
        log = tmp_path / "prepared"
        script = SETUP.format(path=str(PACKAGE.parent), log=str(log), commands=commands)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return json.loads(done.stdout), len(log.read_text())

    return of


def test_steps_run_in_forks_with_their_commands_streams(outcomes: Outcomes) -> None:
    many = [["say", str(i), "a b\n"] for i in range(8)]
    done, preparations = outcomes(*many)
    assert done == [[f"{i} a b\n True\n", "warning\n", 0] for i in range(8)]
    assert preparations == 1


def test_a_failing_step_fails_its_command_alone(outcomes: Outcomes) -> None:
    (gate, error, died, unknown, fine), _ = outcomes(
        ["refuse", "spills"], ["fail", "where"], ["die"], ["other"], ["say", "fine"]
    )
    assert gate == ["", "compile gate: spills\n", 1]
    assert error[1].startswith("Traceback")
    assert error[1].endswith("KeyError: 'where'\n")
    assert error[2] == 1
    assert died == ["", "error: the process of die was killed\n", 1]
    assert unknown[1].endswith("KeyError: 'other'\n")
    assert fine == ["fine True\n", "warning\n", 0]


def test_nothing_is_prepared_where_nothing_is_built(outcomes: Outcomes) -> None:
    assert outcomes() == ([], 0)


def test_a_command_outside_a_build_says_so() -> None:
    env = {k: v for k, v in os.environ.items() if k != "DFLASH_FORKS"}
    command = [sys.executable, "-IS", str(PACKAGE / "forks.py"), "compile"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: this is a step of setup.py's build, which starts its server\n"
