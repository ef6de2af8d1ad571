"""Ranks on real GPUs: over NCCL where each has one, else over gloo, to the bit like one process."""

from __future__ import annotations

import pytest
import torch
from ranks import records, run_config, start
from test_pipeline import assert_same_run, world  # noqa: F401

from dflash_ext.train import train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("draws", [1, 2])
def test_one_target_and_one_drafter_are_one_process(world, tmp_path, draws):  # noqa: F811
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    same = {"device": "cuda", "batch": {"draws": draws}}
    assert train(run_config(world, alone, **same)) == 0
    assert start(run_config(world, ranks, 1, 1, **same)) == 0
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
