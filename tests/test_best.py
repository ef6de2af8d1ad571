"""The weights with the largest accepted length: which, whole, and the same after a restart."""

from __future__ import annotations

import json

import pytest
import torch
from test_drafter import make

from dflash_ext.best import Best, Record, load_best, read_record
from dflash_ext.checkpoint import Progress, checkpoints
from dflash_ext.config import EvalOptions, RunOptions, TrainConfig
from dflash_ext.errors import UserError
from dflash_ext.ranks import Ranks
from dflash_ext.run import claim_run


def test_only_a_better_step_replaces_the_best(tmp_path):
    ranks, drafter = Ranks(device=torch.device("cpu")), make()
    best = Best(ranks, tmp_path, "validation")
    assert best.record is None
    assert read_record(tmp_path) is None
    kept = {}
    for step, accept_len in ((5, 1.5), (10, 1.4), (15, 1.5), (20, 1.7), (25, 1.6)):
        for parameter in drafter.parameters():
            parameter.data += 1
        weights = dict(drafter.named_parameters())
        best.consider(Progress(step), accept_len, weights)
        kept[step] = {name: w.detach().clone() for name, w in weights.items()}
    best.wait()
    assert [path.name for path in checkpoints(tmp_path / "best")] == ["step-20"]
    assert read_record(tmp_path) == Record(20, 1.7, "validation")
    found = load_best(tmp_path, drafter.config)
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, kept[20][name])

    again = Best(ranks, tmp_path, "validation")
    again.consider(Progress(18), 1.7, dict(drafter.named_parameters()))  # repeated after a kill
    again.wait()
    assert again.record == Record(20, 1.7, "validation")
    # Of another measure: its numbers mean something else, so it begins anew.
    other = Best(ranks, tmp_path, "decoded")
    other.consider(Progress(19), 1.2, dict(drafter.named_parameters()))
    other.wait()
    assert read_record(tmp_path) == Record(19, 1.2, "decoded")


def test_a_run_that_begins_anew_has_no_best(tmp_path):
    config = TrainConfig(run=RunOptions(dir=tmp_path / "run"))
    with claim_run(config) as (folder, _):
        (folder / "best/step-3").mkdir(parents=True)
        (folder / "best/step-3/record.json").write_text(json.dumps({"step": 3}))
    with claim_run(config) as (folder, _):
        assert not (folder / "best").exists()


def test_options_that_cannot_be():
    with pytest.raises(UserError, match="decode_every 5 has nothing to decode"):
        EvalOptions(decode_every=5, prompts_per_set=0)
    with pytest.raises(UserError, match="decode_every 5 has nothing to decode"):
        EvalOptions(decode_every=5, prompts=())
