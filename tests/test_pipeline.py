"""Runs of several ranks on the CPU: exact, the same as one process, and whole at every end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import STEPS, make_world, records, run_config, start
from safetensors.torch import load_file
from tiny_targets import one_thread  # noqa: F401

from dflash_ext.checkpoint import checkpoints, read_progress
from dflash_ext.config import EvalOptions
from dflash_ext.train import train


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        root = make_world(tmp_path_factory.mktemp("world"))
        patch.setenv("DFLASH_CACHE", str(root / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield root


def state_of(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Every weight, moment, counter and sample count of a checkpoint."""
    last = folder / f"checkpoints/step-{step}"
    state = load_file(last / "drafter.safetensors")
    saved = torch.load(last / "optimizer.pt", weights_only=True)
    for i, inner in enumerate(saved["optimizer"]["optimizers"]):
        for p, moments in inner["state"].items():
            state |= {f"optimizer {i} {p} {name}": value for name, value in moments.items()}
    state["counters"] = torch.tensor(list(saved["optimizer"]["counters"].values()))
    return state | {"uses": saved["uses"], "random": saved["random"]["cpu"]}


def assert_same_run(a: Path, b: Path) -> None:
    first, second = state_of(a), state_of(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    for kind in ("train", "validation"):
        for x, y in zip(records(a, kind), records(b, kind), strict=True):
            for name in ("loss", "accept_len", "grad_norm", "blocks"):
                assert x.get(name) == y.get(name), (kind, x["step"], name)


def test_two_targets_and_a_drafter_are_one_process_to_the_bit(world, tmp_path, capfd):
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    options = EvalOptions(
        prompts=(str(world / "prompts.txt"),), prompts_per_set=1, max_new_tokens=4, every=5
    )
    same = {"batch": {"draws": 2}, "eval": options}  # validation falls between two draws
    assert train(run_config(world, alone, **same)) == 0
    capfd.readouterr()
    assert start(run_config(world, ranks, 2, 1, **same)) == 0
    assert_same_run(alone, ranks)
    shown = capfd.readouterr().out
    assert "2 targets and 1 drafters over gloo" in shown
    assert shown.count("rehearsed the largest batch") == 1
    for name in ("resolved.json", "results.json"):
        a, b = (json.loads((f / name).read_text()) for f in (alone, ranks))
        assert a.get("rows") == b.get("rows")
        assert a.get("drafter") == b.get("drafter")
    for record in records(ranks):
        assert record["limit"] in ("target", "drafter", "transfer")
        for share in ("wait_target", "wait_drafter", "wait_transfer"):
            assert 0 <= record[share] <= 1.01
        assert record["ktok_s"] > 0
    exported = [load_file(f / "export/model.safetensors") for f in (alone, ranks)]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


def test_five_to_three_uses_each_sample_once(world, tmp_path):
    """Eight processes, one epoch, with a last step in which drafters have unequal work."""
    folder = tmp_path / "run"
    config = run_config(world, folder, 5, 3, epochs=1, batch={"token_budget": 70})
    assert start(config) == 0
    last = checkpoints(folder / "checkpoints")[-1]
    progress = read_progress(last)
    assert progress.course.end % 3  # otherwise the last step is nothing special
    uses = torch.load(last / "optimizer.pt", weights_only=True)["uses"]
    assert uses.tolist() == [1] * 34
    assert progress.position == len(records(folder)) == -(-progress.course.end // 3)
    table = json.loads((folder / "ranks.json").read_text())
    assert [row["role"] for row in table][::7] == ["drafter 0", "target 4"]
    assert len({row["pid"] for row in table}) == 8
