"""Whole runs on a real GPU: bf16 training, lossless evaluation, exact continuation."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from test_train import STEPS, config_of, final_state, records, resumed, world  # noqa: F401

from dflash_ext.checkpoint import checkpoints
from dflash_ext.config import EvalOptions
from dflash_ext.train import train

pytestmark = pytest.mark.gpu


def on_gpu(world, folder, **changes):  # noqa: F811
    return config_of(world, folder, device="cuda", **changes)


def test_a_whole_run_on_the_gpu(world, tmp_path, monkeypatch):  # noqa: F811
    """Requirement 26 on the way: nothing may call torch.compile."""

    def refuse(*args, **kwargs):
        raise AssertionError("torch.compile was called")

    monkeypatch.setattr(torch, "compile", refuse)
    options = EvalOptions(
        prompts=(str(world / "prompts.txt"),), prompts_per_set=2, max_new_tokens=12, every=20
    )
    folder = tmp_path / "run"
    assert train(on_gpu(world, folder, eval=options, steps=60)) == 0
    losses = [r["loss"] for r in records(folder, "train")]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert json.loads((folder / "resolved.json").read_text())["dtype"] == "torch.bfloat16"
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert all(row["equals greedy"] == "2/2" for row in rows)


def test_stop_and_resume_equals_uninterrupted(world, tmp_path):  # noqa: F811
    """Requirement 20 on one GPU: the same weights, moments and counters bit for bit."""
    whole = on_gpu(world, tmp_path / "whole")
    assert train(whole) == 0
    halves = on_gpu(world, tmp_path / "halves")
    assert train(halves) == 0
    folder = tmp_path / "halves"
    for path in checkpoints(folder / "checkpoints")[-1:]:  # as if killed after the one before
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert checkpoints(folder / "checkpoints")[-1].name != f"step-{STEPS}"
    assert train(resumed(halves)) == 0
    first, second = final_state(tmp_path / "whole"), final_state(folder)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_fp32_drafter_weights_after_bf16_compute(world, tmp_path):  # noqa: F811
    """Requirement 10: masters stay fp32, and move by less than bf16 could show."""
    config = on_gpu(world, tmp_path / "run")
    slow = dataclasses.replace(config.optim, lr=1e-6, vector_lr=1e-6)
    assert train(dataclasses.replace(config, optim=slow)) == 0
    state = final_state(tmp_path / "run")
    norm = state["norm.weight"]
    assert norm.dtype == torch.float32
    assert (norm != norm.bfloat16().float()).any()
