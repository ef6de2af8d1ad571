"""What a rank settles before its first step."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
import torch
from ranks import run_config
from tiny_targets import one_thread, tiny_model  # noqa: F401

from dflash_ext.checkpoint import Progress
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.errors import UserError
from dflash_ext.monitor import Monitor
from dflash_ext.plan import Schedule
from dflash_ext.ranks import Ranks
from dflash_ext.samples import prepare_files
from dflash_ext.startup import whereabouts
from dflash_ext.target import Target
from dflash_ext.target_loading import WHOLE, Needs
from dflash_ext.topology import Course, Topology

LENGTHS = np.full(50, 10)
SCHEDULE = Schedule(LENGTHS, LENGTHS, seed=0, token_budget=30, max_documents=3, anchor_budget=100)


def settled(tmp_path, topology, progress=None, **changes):
    config = run_config(tmp_path, tmp_path, **changes)
    stream, checkpoint = io.StringIO(), None
    if progress is not None:
        checkpoint = tmp_path / f"step-{progress.position}"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "progress.json").write_text(json.dumps(dataclasses.asdict(progress)))
    found = whereabouts(config, Ranks(topology), SCHEDULE, checkpoint, Monitor(None, stream=stream))
    return found[1], found[2], stream.getvalue()


def test_steps_follow_from_epochs(tmp_path):
    assert SCHEDULE.batches_of(3) == 3 * 17
    progress, steps, _ = settled(tmp_path, Topology(5, 3), steps=7)
    assert (progress.course, steps) == (Course(3, 1, 1), 7)
    progress, steps, _ = settled(tmp_path, Topology(5, 3), epochs=3, batch={"accumulate": 2})
    assert (progress.course, steps) == (Course(3, 2, 1, 51), 9)  # 51 batches, 6 each step


def test_a_run_goes_on_with_other_numbers(tmp_path):
    done = Progress(4, 2.0, Course(3, 2, 1, 51))
    same = settled(tmp_path, Topology(2, 3), done, epochs=3, batch={"accumulate": 2})
    assert same[0] == done
    assert same[2] == ""
    progress, steps, said = settled(tmp_path, Topology(1, 2), done, epochs=3)
    assert progress == Progress(4, 2.0, Course(2, 1, 1, 51, 4, 24))
    assert steps == 4 + 14  # 27 batches are left, 2 each step
    assert "has 2 micro-batches (2 drafters x 1) from here on, it had 6" in said


def test_a_random_target_is_the_same_everywhere(tmp_path):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    one, two, other = (
        Target.load(tmp_path, dtype="bf16", tap_ids=(0, 2), random_weights=True, needs=needs)
        for needs in (WHOLE, WHOLE, Needs("nothing", last_layers=1))
    )
    assert one.dtype == torch.bfloat16
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    own, all_of_it = dict(other.model.named_parameters()), dict(one.model.named_parameters())
    assert 0 < len(own) < len(all_of_it)
    for name, weight in own.items():
        assert torch.equal(weight, all_of_it[name])
    spread = one.model.model.layers[1].mlp.up_proj.weight.float().std()
    assert 0.01 < spread < 0.04  # initializer_range is 0.02
    assert (one.model.model.norm.weight == 1).all()
    with pytest.raises(UserError, match=r"has no readable config\.json"):
        Target.load(tmp_path / "nowhere", random_weights=True)


def test_a_finished_store_is_data(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        for n in (5, 9, 12, 7):
            writer.append(list(range(n)), [True] * n)
    config = run_config(tmp_path, tmp_path)
    data = dataclasses.replace(config.data, train=str(tmp_path / "store"), held_out=1)
    monitor = Monitor(None)
    train, held_out = prepare_files(dataclasses.replace(config, data=data), "no target", monitor)
    assert sorted([*train.indices, *held_out.indices]) == [0, 1, 2, 3]
    assert train.store.identity == TokenStore.open(tmp_path / "store").identity
