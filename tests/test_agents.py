"""Several machines: torchrun's agents, here two on the loopback device, with one rank each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from busy_machine import PATIENCE_SECONDS, free_port
from compared import assert_same_run
from ranks import command_line, resumed, run_config, run_rank
from strike import Strike, struck
from test_pipeline import world  # noqa: F401
from tiny_targets import one_thread  # noqa: F401
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dflash_ext import launch
from dflash_ext.config import TrainConfig
from dflash_ext.train import train


def torchrun(config: TrainConfig) -> list[subprocess.CompletedProcess]:
    """Two agents on the loopback device, one rank each, by the command line; how they ended."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    launcher += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", str(free_port())]
    program = ["-m", "dflash_ext.train", "cpu", *command_line(config)]
    agents = [
        subprocess.Popen(
            [*launcher, "--node-rank", str(node), *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    ended = []
    for agent in agents:
        out, err = agent.communicate(timeout=PATIENCE_SECONDS)
        ended.append(subprocess.CompletedProcess(agent.args, agent.returncode, out, err))
    return ended


def two_agents(config: TrainConfig, logs: Path, strike: Strike) -> tuple[list[object], str]:
    """The same agents, in threads of this process, so that ranks are forked from the warm server.

    What each launch returned or raised, and what the ranks wrote to stderr.
    """
    port, environment = free_port(), {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    entry = partial(struck, strike, run_rank)

    def agent(node: int) -> object:
        settings = LaunchConfig(
            min_nodes=2,
            max_nodes=2,
            nproc_per_node=1,
            run_id="none",  # as torchrun names it
            rdzv_backend="static",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_configs={"rank": node, "timeout": PATIENCE_SECONDS},
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=str(logs / str(node)), redirects=Std.ALL),
            local_addr="127.0.0.1",
        )
        try:
            return elastic_launch(settings, launch._child)(config, environment, entry)
        except ChildFailedError as error:
            return error

    (logs / "0").mkdir(parents=True)
    (logs / "1").mkdir()
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(agent, range(2)))
    return ended, "".join(file.read_text() for file in sorted(logs.rglob("stderr.log")))


def test_two_agents_lose_a_target_and_go_on(world, tmp_path):  # noqa: F811
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    assert train(run_config(world, alone)) == 0
    config = run_config(world, ranks, 1, 1)
    began = time.monotonic()
    ended, said = two_agents(config, tmp_path / "logs", Strike("step 5:", victim=1))
    assert time.monotonic() - began < PATIENCE_SECONDS
    assert [type(end) for end in ended] == [ChildFailedError, ChildFailedError]
    last = r"error: rank 1 \(target 0, pid \d+\), last seen .*batch \d+.*: died without a word"
    assert len(re.findall(last, said)) == 1, said
    ended = torchrun(resumed(config))
    assert [agent.returncode for agent in ended] == [0, 0], ended[0].stderr
    assert_same_run(alone, ranks)
