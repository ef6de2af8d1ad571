"""Target and trainer tests under several torch and transformers, all with one extension file.

    python benchmarks/versions.py [--torch VERSION_OR_VENV ...]

Run by an interpreter that has the test requirements; its own torch is the first one tested. Each
transformers goes into a venv of its own under --folder that falls back on that interpreter's
packages, so pip resolves the tokenizers and huggingface_hub that this release asks for. Any other
torch goes in front of both. What a pair really imported is asked, not assumed; a pair that fails is
recorded as failing. The results become a table by `python -m dflash_ext.bench tables`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dflash_ext import record  # noqa: E402
from dflash_ext.errors import UserError, run_cli  # noqa: E402

TRANSFORMERS = ("5.6.0", "5.8.1", "5.17.0", "newest")
TESTS = (
    *("transformers_api", "target", "target_load", "teacher", "shield", "reader", "drafting"),
    *("acceleration", "causal", "mixture", "fp8", "target_loading", "split_target", "startup"),
    *("identity", "generate", "drafter", "trainer", "loss", "initialise", "muon", "optim"),
    *("checkpoint", "train", "train_errors", "export", "export_check", "evaluate", "synthesis"),
    *("prepare", "chat", "templates", "append_only", "regenerate_in_process", "attention_cpu"),
    "fused_ops",
    # Ranks: the launcher, the collectives, sharded drafters.
    "pipeline.py::test_sharded_drafters_are_replicated_ones",
    "pipeline.py::test_the_last_layer_travels_for_losses_that_read_the_target",
    "pipeline.py::test_gradients_and_metrics_do_not_depend_on_the_split",
)
# Long, and what they repeat does not depend on a library's release.
LEFT_OUT = ("thousands_of_tokens", "sampled_text_is_the_same", "kill_9_and_resume")
PROBE = """
import hashlib, json, huggingface_hub, tokenizers, torch, transformers
from dflash_ext import _C
modules = {"torch": torch, "transformers": transformers, "tokenizers": tokenizers}
modules["huggingface_hub"] = huggingface_hub
found = {name: module.__version__ for name, module in modules.items()}
with open(_C.__file__, "rb") as file:
    found["md5"] = hashlib.md5(file.read()).hexdigest()
print(json.dumps(found))
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def command(arguments: list[str], **keywords: Any) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(arguments, capture_output=True, text=True, **keywords)
    if done.returncode:
        raise UserError(f"{' '.join(arguments)} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def site(python: Path) -> Path:
    """Folder of an interpreter's installed packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(command([str(python), "-c", code]).strip())


def venv(folder: Path, requirement: str, fallback: Path | None) -> Path:
    """Interpreter of a venv with `requirement`, made unless `folder` is there already."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        say(f"installing {requirement} into {folder}")
        command([sys.executable, "-m", "venv", "--clear", str(folder)])
        if fallback is not None:
            (site(python) / "fallback.pth").write_text(f"{fallback}\n")
        command([str(python), "-m", "pip", "install", "-q", requirement])
        (folder / "complete").touch()
    return python


def newest_transformers() -> str:
    listed = command([sys.executable, "-m", "pip", "index", "versions", "transformers"])
    found = re.search(r"\(([\d.]+)\)", listed)
    if found is None:
        raise UserError(f"pip names no newest transformers: {listed[:200]!r}")
    return found.group(1)


def torch_path(wanted: str, folder: Path) -> Path:
    """Packages of a torch: of a venv that has it, or of one made for a version."""
    given = Path(wanted) / "bin" / "python"
    return site(
        given if given.exists() else venv(folder / f"torch-{wanted}", f"torch=={wanted}", None)
    )


def environment(packages: list[Path]) -> dict[str, str]:
    paths = os.pathsep.join(map(str, [ROOT, *packages]))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def outcome(report: Path) -> dict[str, Any]:
    """Counts and failing tests of a JUnit report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failing, reasons = [], set()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag: child for child in case}
        if "failure" in kinds or "error" in kinds:
            counts["failed"] += 1
            failing.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            counts["skipped"] += 1
            reasons.add(kinds["skipped"].get("message") or "")
        else:
            counts["passed"] += 1
    return {**counts, "failing": failing, "why skipped": sorted(reasons)}


def test_pair(python: Path, packages: list[Path]) -> dict[str, Any]:
    """Run the tests under one pair of torch and transformers."""
    env = environment(packages)
    versions = json.loads(command([str(python), "-c", PROBE], env=env, cwd=ROOT))
    names = [t if "::" in t else f"{t}.py" for t in TESTS]
    with tempfile.TemporaryDirectory() as scratch:
        report, begin = Path(scratch) / "report.xml", time.monotonic()
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        options += ["-k", " and ".join(f"not {name}" for name in LEFT_OUT)]
        options += [f"tests/test_{name}" for name in names]
        done = subprocess.run(
            [str(python), "-m", "pytest", *options], cwd=ROOT, env=env, stdout=subprocess.PIPE
        )
        seconds = time.monotonic() - begin
        if not report.exists():  # not a single test ran
            raise UserError(f"pytest said: {done.stdout.decode()[-2000:]}")
        return {**versions, **outcome(report), "seconds": round(seconds)}


def numbers(version: str) -> list[int]:
    """To sort by: 2.14.1+cu130 -> 2, 14, 1."""
    return [int(part) for part in version.split("+")[0].split(".") if part.isdecimal()]


def describe(result: dict[str, Any]) -> str:
    counts = ", ".join(f"{result[name]} {name}" for name in ("passed", "failed", "skipped"))
    return (
        f"torch {result['torch']}, transformers {result['transformers']}: {counts} in "
        f"{result['seconds']} s" + "".join(f"\n  {name}" for name in result["failing"])
    )


def keep(out: Path, what: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """What is done, sorted; after every pair, so that an interruption loses one."""
    if len(builds := {r["md5"] for r in results}) != 1:
        raise UserError(f"not one extension: {sorted(builds)}")
    pairs = sorted(results, key=lambda r: [numbers(r[name]) for name in ("torch", "transformers")])
    record.save(out, {**what, "pairs": pairs})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--torch",
        nargs="*",
        default=["2.8.0", "2.14.1"],
        help="others than this interpreter's: versions to install, or venvs that have them; "
        "each with the oldest and the newest transformers",
    )
    parser.add_argument("--transformers", nargs="+", default=list(TRANSFORMERS))
    parser.add_argument("--folder", type=Path, help="for the venvs, kept; default: a temporary one")
    parser.add_argument("--jobs", type=int, default=1, help="pairs tested at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "versions_cpu.json")
    args = parser.parse_args()
    # The environment of now: the tree may move on meanwhile.
    what = {"environment": record.environment(), "tests": [*TESTS], "left out": [*LEFT_OUT]}
    wanted = [newest_transformers() if v == "newest" else v for v in args.transformers]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        base = Path(sysconfig.get_path("purelib"))
        pythons = {v: venv(folder / v, f"transformers=={v}", base) for v in wanted}
        # Other torches first: what is likelier to fail is known sooner.
        pairs: list[tuple[str, list[Path]]] = []
        for torch in args.torch:
            packages = [torch_path(torch, folder)]
            pairs += [(v, packages) for v in dict.fromkeys((wanted[0], wanted[-1]))]
        pairs += [(v, []) for v in wanted]
        results: list[dict[str, Any]] = []

        def test(pair: tuple[str, list[Path]]) -> dict[str, Any]:
            version, packages = pair
            # Before another torch's packages, lest a transformers beside it be taken.
            own = [site(pythons[version]), *packages] if packages else []
            result = test_pair(pythons[version], own)
            if (imported := result["transformers"]) != version:
                raise UserError(f"asked for transformers {version}, {imported} was imported")
            return result

        with ThreadPoolExecutor(args.jobs) as pool:
            tested = pool.map(test, pairs)
            for result in tested:
                say(describe(result))
                results.append(result)
                keep(args.out, what, results)
    if any(r["failed"] for r in results):
        raise UserError("some tests failed; they are in the result")


if __name__ == "__main__":
    run_cli(main)
