"""`bench step` on the CPU, and the composition it compares with as a second truth of the step."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tiny_targets import one_thread  # noqa: F401

from dflash_ext.bench import step, step_problem
from dflash_ext.bench.step import Baseline
from dflash_ext.bench.step_problem import SMALL, random_batch, random_trainer
from dflash_ext.drafter import FULL, SLIDING
from dflash_ext.errors import UserError
from dflash_ext.layers import Linear
from dflash_ext.target import Vocabulary
from dflash_ext.trainer import Trainer

TINY = dataclasses.replace(
    SMALL,
    hidden_size=64,
    target_hidden_size=64,
    intermediate_size=96,
    vocab_size=128,
    mask_token_id=127,
    num_heads=2,
    num_kv_heads=1,
    sliding_window=20,
    target_layer_ids=(1, 3),
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(step_problem.DRAFTERS, "small", TINY)
    case = step_problem.Case("2 x 40, 5 anchors", "small", (40, 40), 5)
    monkeypatch.setattr(step, "cases", lambda drafter: (case,))


@pytest.mark.parametrize("kinds", [(FULL,) * 2, (SLIDING, FULL), (SLIDING,)])
def test_the_step_s_gradients_are_the_composition_s(kinds):
    """Turns of blocks, unseen context, one mask row, supervised rows: none of it changes a sum."""
    config = dataclasses.replace(TINY, layer_types=kinds, num_layers=len(kinds))
    trainer = random_trainer(config, "cpu", blocks_at_once=3)
    features, batch, blocks = random_batch(trainer, (30, 44, 25), 9)
    for name, parameter in trainer.drafter.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    sums = trainer.micro_step(features, batch, blocks)
    other = Baseline(trainer, trainer.inputs(features, batch, blocks), compiled=False)
    loss = other.loss()
    loss.backward()
    assert float(sums[0]) == pytest.approx(float(loss.detach()), rel=1e-5)
    theirs = dict(other.model.named_parameters())
    for name, parameter in trainer.drafter.named_parameters():
        truth = theirs[name].grad
        assert (parameter.grad - truth).norm() <= 1e-5 * truth.norm() + 1e-8, name


def test_bench_step_measures_and_saves(tiny, tmp_path):
    out = tmp_path / "step.json"
    step.main(["--device", "cpu", "--rounds", "2", "--walk", "10", "--json", str(out)])
    result = json.loads(out.read_text())
    (row,), (walk,) = result["rows"], result["walks"]
    parts = row["forward_ms"] + row["loss_ms"] + row["backward_ms"]
    assert 0 < parts <= 1.01 * row["step_ms"]  # which holds them, and pauses of a busy machine
    assert row["over_baseline"] == pytest.approx(row["baseline_ms"] / row["step_ms"], rel=0.01)
    assert row["loss_difference"] < 1e-5
    assert row["mfu"] == pytest.approx(
        row["useful_tflop"] / row["step_ms"] * 1e3 / row["product_tflops"], rel=0.01
    )
    assert walk["steps"] == 10
    assert walk["worst_first_over_seen"] > 0


def test_a_composition_that_computes_something_else_ends_the_benchmark(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Baseline, "loss", lambda self: torch.tensor(1.0, requires_grad=True))
    with pytest.raises(RuntimeError, match="the composition's is 1"):
        step.main(["--device", "cpu", "--rounds", "1", "--json", str(tmp_path / "x.json")])


def test_wrong_options_are_one_line_errors():
    with pytest.raises(UserError, match="--rounds"):
        step.main(["--device", "cpu", "--rounds", "0"])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cpu"):
            step.main(["--device", "cuda"])


@pytest.mark.parametrize(("documents", "anchors"), [((90, 30, 60), 60), ((40,), 39), ((3, 2), 50)])
def test_anchors_are_spread_by_length_and_never_twice(documents, anchors):
    trainer = random_trainer(TINY, "cpu", blocks_at_once=4)
    _, batch, blocks = random_batch(trainer, documents, anchors)
    possible = sum(n - 1 for n in documents)
    assert blocks.num_blocks == min(anchors, possible)
    assert bool((blocks.anchors.diff() > 0).all())
    document = torch.searchsorted(batch.doc_starts[1:], blocks.anchors, right=True)
    counts = torch.bincount(document, minlength=len(documents))
    for count, n in zip(counts.tolist(), documents):
        assert abs(count - blocks.num_blocks * (n - 1) / possible) <= 1


def test_casts_are_kept_for_every_turn_but_the_last(monkeypatch):
    """At the loss, where memory is at its fullest."""
    trainer, alive = random_trainer(TINY, "cpu", blocks_at_once=4), []
    trainer.embedding, trainer.head = trainer.embedding.bfloat16(), trainer.head.bfloat16()
    problem = random_batch(trainer, (60, 50), 11)
    layers = [m for m in trainer.drafter.modules() if isinstance(m, Linear)]
    loss = trainer.loss

    def watched(*args):
        alive.append(sum(layer._cast is not None for layer in layers))
        return loss(*args)

    monkeypatch.setattr(trainer, "loss", watched)
    trainer.micro_step(*problem)
    turns = len(list(problem[2].chunks(4)))
    assert turns > 2
    assert alive == [len(layers)] * (turns - 1) + [0]


def test_an_fp8_head_trains(monkeypatch):
    trainer = random_trainer(TINY, "cpu", blocks_at_once=4)
    options = dataclasses.replace(trainer.config.loss, fp8_head=True)
    config = dataclasses.replace(trainer.config, loss=options)
    vocabulary = Vocabulary(trainer.embedding.bfloat16(), trainer.head.bfloat16())
    with pytest.raises(UserError, match="needs a drafter that computes in bf16"):
        Trainer(Vocabulary(trainer.embedding, trainer.head), trainer.drafter, config)
    losses = []
    for given in (trainer.config, config):
        other = Trainer(vocabulary, trainer.drafter, given)
        losses.append(float(other.micro_step(*random_batch(other, (60, 50), 11))[0]))
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
