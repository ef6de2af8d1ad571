"""Operations against counted ones, shares and tallies, and the counts of used samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny_targets import one_thread, tiny_model  # noqa: F401
from torch.utils.flop_counter import FlopCounterMode

from dflash_ext.batch import PackedBatch
from dflash_ext.checkpoint import Progress
from dflash_ext.config import BatchOptions
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.pipeline import Waits
from dflash_ext.plan import Schedule
from dflash_ext.rates import Tally, TargetCost, drafter_operations, product_tflops, rates
from dflash_ext.samples import Samples
from dflash_ext.stopwatch import Stopwatch
from dflash_ext.target import Target
from dflash_ext.topology import Course, Topology
from dflash_ext.uses import Uses, planned_uses


def batch_of(*lengths: int) -> PackedBatch:
    documents = [(torch.ones(n, dtype=torch.int64), torch.ones(n).bool()) for n in lengths]
    return PackedBatch.from_documents(documents, range(len(lengths)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_target_operations_are_what_torch_counts(family):
    model = tiny_model(family, attn_implementation="eager")
    target = Target(model, tap_ids=(0, 2))
    batch = batch_of(40, 40)
    with FlopCounterMode(display=False) as counter:
        target.features(batch)
    counted = counter.get_total_flops()
    cost = TargetCost.of(target)
    # Eager attention multiplies the whole square; ours are the pairs on and below the diagonal.
    square = cost.per_pair * (40 * 40 - 40 * 41 / 2) * 2
    assert cost.batch(batch) + square == pytest.approx(counted, rel=0.01)


def test_drafter_operations_are_what_torch_counts(monkeypatch):
    from test_trainer import packed, trainer_of

    from dflash_ext.blocks import draw_anchors

    trainer = trainer_of()
    documents = [(torch.arange(20) % 50, torch.ones(20).bool()) for _ in range(2)]
    batch = packed(documents, [0, 1])
    blocks = trainer.blocks(batch, draw_anchors(batch, anchors_per_sequence=6, seed=0, epoch=0))
    features = trainer.features(batch)
    with FlopCounterMode(display=False) as counter:
        trainer.micro_step(features, batch, blocks)
    config = trainer.drafter.config
    visible = int((blocks.ctx_end - blocks.ctx_start).sum()) + 4 * blocks.num_blocks
    attention = 3.5 * 4 * config.num_heads * config.head_dim * 4 * visible * config.num_layers
    expected = drafter_operations(config, blocks) - attention  # torch cannot see into ours
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_tallies_add_up_and_rates_name_who_limits():
    one = Tally(1000, 50, 2.0, 4.0, 0.0, Waits(0.1, 0.05, 0.2, 2.0))
    assert len(one.values()) == Tally.size()
    both = Tally.of([a + b for a, b in zip(one.values(), one.values())])
    assert both == Tally(2000, 100, 4.0, 8.0, 0.0, Waits(0.2, 0.1, 0.4, 4.0))
    found = rates(both, 2.0, Topology(3, 2, shared=False), 10.0)
    assert found["ktok_s"] == pytest.approx(1.0)
    assert found["anchors_s"] == pytest.approx(50)
    assert found["wait_target"] == pytest.approx(0.1)
    assert found["wait_drafter"] == pytest.approx(0.05)
    assert found["wait_transfer"] == pytest.approx(0.025)
    assert found["limit"] == "drafter"  # the targets wait more
    assert found["mfu_target"] == pytest.approx(4 / (2 * 3 * 10))
    assert found["mfu_drafter"] == pytest.approx(8 / (2 * 2 * 10))
    for waits, limit in (
        (Waits(0.5, 0.1, 0.1, 2.0), "target"),
        (Waits(0.1, 0.5, 0.1, 2.0), "transfer"),
        (Waits(), "drafter"),
    ):
        tally = dataclasses.replace(one, waits=waits)
        assert rates(tally, 1.0, Topology(1, 1, shared=False), None)["limit"] == limit
    alone = rates(dataclasses.replace(one, waits=Waits(capture=0.7)), 1.0, Topology(), None)
    assert (alone["limit"], alone["share_target"]) == ("target", pytest.approx(0.7))
    assert "mfu_target" not in alone
    assert product_tflops(torch.device("cpu")) is None


def test_stopwatch_counts_spans_once(monkeypatch):
    from dflash_ext import stopwatch

    clock = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    watch.waited(watch.mark(), watch.mark())
    watch.waited(watch.mark(), watch.mark())
    assert watch.take() == pytest.approx(2.5)
    assert watch.take() == 0


def test_uses_are_compared_with_the_plan(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        for n in range(5, 25):
            writer.append([1] * n, [True] * n)
    store = TokenStore.open(tmp_path / "store")
    samples = Samples(store, np.arange(2, 20))  # two are held out
    budgets = {"token_budget": 60, "max_documents": 4, "anchor_budget": 100}
    lengths = store.lengths[samples.indices]
    schedule = Schedule(lengths, lengths, seed=0, **budgets)
    count = schedule.batches_in(0)
    course = Course(drafters=2, accumulate=1, draws=1)
    drafters = [Uses(samples, schedule) for _ in range(2)]
    for step in range((count + 2) // 2 + 1):
        for drafter, uses in enumerate(drafters):
            for micro in course.micros(step, drafter):
                uses.use(samples.indices[schedule.batch(micro.batch)])
    done = Progress((count + 2) // 2 + 1, 0.0, course)
    together = torch.from_numpy(sum(u._uses for u in drafters)[samples.indices])
    batches = course.begun(done.position)
    expected = np.zeros(18, dtype=int)
    for i in range(batches):
        expected[schedule.batch(i)] += 1
    assert planned_uses(schedule, batches).tolist() == expected.tolist() == together.tolist()
    assert set(together.tolist()) <= {1, 2}

    resumed = Uses(samples, schedule)
    resumed.restore(together, done)
    assert torch.equal(resumed.total(None, torch.device("cpu"), done), together)
    resumed.use([int(samples.indices[3])])
    with pytest.raises(RuntimeError, match=rf"sample {samples.indices[3]} was trained on"):
        resumed.total(None, torch.device("cpu"), done)
    with pytest.raises(RuntimeError, match="18 samples differ"):
        Uses(samples, schedule).restore(together + 1, done)


def test_blocks_at_once():
    assert BatchOptions(anchor_budget=128).blocks_at_once == 128
    assert BatchOptions(anchor_budget=128, anchor_chunk=50).blocks_at_once == 50
    assert BatchOptions(anchor_budget=128, anchor_chunk=500).blocks_at_once == 128
