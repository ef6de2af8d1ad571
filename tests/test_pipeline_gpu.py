"""Ranks on real GPUs: over NCCL where each has one, else over gloo, to the bit like one process.

Here a rank starts afresh, so a run takes some ten seconds before its first step.
"""

from __future__ import annotations

import signal
import time

import pytest
import torch
from busy_machine import PATIENCE_SECONDS
from compared import assert_same_run
from ranks import begin, loading, records, resumed, run_config, start, two_drafters
from strike import Strike, rank_table
from test_pipeline import world  # noqa: F401

from dflash_ext.train import train
from dflash_ext.watch import INTERRUPTED

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")


@pytest.mark.parametrize("draws", [1, 2])
def test_one_target_and_one_drafter_are_one_process(world, tmp_path, draws):  # noqa: F811
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    same = {"device": "cuda", "batch": {"draws": draws}}
    assert train(run_config(world, alone, **same)) == 0
    assert start(run_config(world, ranks, 1, 1, **same)) == 0
    table = rank_table(ranks)
    assert {row["data"] for row in table} == {"NCCL" if torch.cuda.device_count() > 1 else "gloo"}
    assert_same_run(alone, ranks)
    for record in records(ranks):
        assert record["reserved_gib"] > 0
        assert 0 <= record["mfu_drafter"] < 1


def test_more_ranks_than_gpus(world, tmp_path):  # noqa: F811
    count = torch.cuda.device_count()
    folder = tmp_path / "run"
    config = run_config(world, folder, count, 2, device="cuda", epochs=1)
    assert start(config) == 0
    assert len({r["step"] for r in records(folder)}) == len(records(folder)) > 0


def test_stopped_killed_and_continued(world, tmp_path, capfd):  # noqa: F811
    """Whatever its kernels wait for: a rank ends soon after its peer, and nothing is lost."""
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    same = {"device": "cuda", "steps": 80, "run": {"checkpoint_every": 10}}
    assert train(run_config(world, alone, **same)) == 0
    config = resumed(run_config(world, ranks, 1, 1, **same))
    for rank, step, number, code in (
        (None, 5, signal.SIGINT, INTERRUPTED),
        (1, 30, signal.SIGKILL, 1),
        (0, 60, signal.SIGKILL, 1),
    ):
        began, strike = time.monotonic(), Strike(f"step {step}:", number, victim=rank)
        assert begin(config, strike=strike) == code, capfd.readouterr().err
        assert time.monotonic() - began < PATIENCE_SECONDS
    assert "(target 0, pid" in capfd.readouterr().err
    assert start(config) == 0
    assert_same_run(alone, ranks, 80)


@needs_two
def test_a_hand_over_waits_for_no_kernel_that_is_loaded(world, tmp_path):  # noqa: F811
    """It did: the sender's kernel spun, loading waited for it, and the driver let nothing pass."""
    topology = {"stall_seconds": 60.0}
    config = run_config(world, tmp_path / "run", 1, 1, device="cuda", topology=topology)
    assert start(config, loading) == 0


@needs_two
@pytest.mark.parametrize("shard", [False, True])
def test_two_drafters_over_nccl_sum_what_one_has(world, tmp_path, shard):  # noqa: F811
    """Gradients of two batches, one on each GPU, against both on one; replicated or sharded."""
    topology = {"shard": shard}
    config = run_config(world, tmp_path / "run", 1, 1, device="cuda", topology=topology)
    assert start(config, two_drafters) == 0
