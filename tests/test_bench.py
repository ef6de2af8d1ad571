"""Benchmarks: their arithmetic, their command line, and that the README shows what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_ext.bench.attention import Shape, lognormal_documents, make_problem, useful_pairs
from dflash_ext.bench.tables import BEGIN, END, with_numbers
from dflash_ext.errors import UserError
from dflash_ext.ops.attention import visible_pairs
from dflash_ext.ops.layout import build_layout

ROOT = Path(__file__).parents[1]


def test_useful_pairs_are_the_visible_ones() -> None:
    shape = Shape("s", (50, 7, 90), 11, 8, 2, 1, 64)
    start, end = make_problem(shape, "cpu")
    layout = build_layout(start, end, num_ctx=shape.T, block_size=shape.B)
    assert useful_pairs(layout) == int(visible_pairs(layout).sum())


def test_documents_fill_the_budget() -> None:
    lengths = lognormal_documents(49152, 1500)
    assert sum(lengths) == 49152
    assert max(lengths) <= 8192


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dflash_ext.bench", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_unknown_benchmark_is_one_line() -> None:
    done = run("attentoin")
    assert done.returncode == 2
    assert done.stderr.startswith("error: benchmark 'attentoin' is unknown: expected one of")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("option", [("--rounds", "0"), ("--device", "cuda")])
def test_bad_options_are_one_line(option: tuple[str, str]) -> None:
    import torch

    if option[1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run("attention", *option)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_readme_shows_the_kept_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert with_numbers(readme, ROOT / "benchmarks") == readme
    for file in (ROOT / "benchmarks").glob("*.json"):
        kept = json.loads(file.read_text())
        assert {"date", "commit", "torch", "cores"} <= kept["environment"].keys(), file.name


def test_readme_without_markers_is_an_error() -> None:
    with pytest.raises(UserError, match="has no section between"):
        with_numbers("# no markers", ROOT / "benchmarks")
    assert with_numbers(f"a{BEGIN}old{END}b", ROOT / "nowhere") == f"a{BEGIN}\n\n\n\n{END}b"
