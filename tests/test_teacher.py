"""The target as a teacher: final norm, last layer in the hand-over, the right rows of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_soft_labels import NAIVE
from test_trainer import MASK, documents, packed
from tiny_targets import FAMILIES, one_thread, tiny_model  # noqa: F401

from dflash_ext.blocks import draw_anchors
from dflash_ext.config import BatchOptions, DataOptions, LossOptions, TrainConfig
from dflash_ext.drafter import Drafter
from dflash_ext.errors import FeatureError, UserError
from dflash_ext.initialise import drafter_config
from dflash_ext.loss import LOSSES
from dflash_ext.startup import report_memory
from dflash_ext.target import Target
from dflash_ext.teacher import final_norm
from dflash_ext.trainer import Trainer

SOFT = ["kl", "lk"]


def soft_trainer(kind: str = "kl", taps: tuple[int, ...] = (0, 2)) -> tuple[Target, Trainer]:
    config = TrainConfig(
        data=DataOptions(max_prompt_tokens=16, max_answer_tokens=32),
        loss=LossOptions(kind=kind, chunk_rows=7, gamma="none"),
        batch=BatchOptions(
            token_budget=64, max_documents=4, anchors_per_sequence=6, anchor_budget=24
        ),
    )
    target = Target(tiny_model("llama", head_dim=64), tap_ids=taps)
    target.hand_over_last_layer()
    options = dataclasses.replace(config.drafter, block_size=4)
    torch.manual_seed(1)
    drafter = Drafter(drafter_config(options, target, MASK))
    return target, Trainer(target.vocabulary(), drafter, config, final_norm(target))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_over_norm_of_the_last_layer_is_the_target(family):
    target = Target(tiny_model(family), tap_ids=(1,))
    norm = final_norm(target)
    target.hand_over_last_layer()
    batch = packed(documents([[1] * 9, [1] * 5]), [0, 1])
    last = target.features(batch).features[:, target.hidden_size :]
    for start, end in ((0, 9), (9, 14)):
        truth = target.model(batch.input_ids[None, start:end]).logits[0]
        ours = norm(last[start:end]) @ target.vocabulary().head.T
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-4)


def test_a_target_that_caps_its_logits_is_refused():
    target = Target(tiny_model("gemma3", final_logit_softcapping=5.0), tap_ids=(1,))
    with pytest.raises(UserError, match="losses kl and lk cannot use it: choose ce or dpace") as e:
        final_norm(target)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("taps", [(0, 2), (1, 3)])
def test_the_last_layer_is_one_tap_more(taps):
    """Before the final norm, also where it is a tap of the drafter's; the others are unchanged."""
    model = tiny_model("llama", head_dim=64)
    batch = packed(documents([[1] * 9, [1] * 5]), [0, 1])
    plain = Target(model, tap_ids=taps).features(batch)
    target = Target(model, tap_ids=taps)
    target.hand_over_last_layer()
    got = target.features(batch)
    assert got.tap_ids == target.handed_taps == (*taps, 3)
    assert target.tap_ids == taps
    H = target.hidden_size
    assert torch.equal(got.features[:, : 2 * H], plain.features)
    assert torch.equal(
        got.features[:, 2 * H :], Target(model, tap_ids=(3,)).features(batch).features
    )


@pytest.mark.parametrize("kind", SOFT)
@pytest.mark.parametrize("taps", [(0, 2), (1, 3)])
def test_slots_are_compared_with_the_row_that_predicts_their_token(kind, taps):
    """Against the target run on each slot's own prefix: no packing, no taps, no chunks."""
    target, trainer = soft_trainer(kind, taps)
    docs = documents([[0, 0, 1, 1, 1, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1, 1]])
    batch = packed(docs, [0, 1])
    features = target.features(batch)
    features.verify(batch, trainer.handed_taps, target.hidden_size)
    anchors = draw_anchors(batch, anchors_per_sequence=6, seed=0, epoch=0)
    blocks = trainer.blocks(batch, anchors)
    inputs = trainer.inputs(features, batch, blocks)
    hidden = trainer.hidden(inputs, supervised=True)
    output = trainer.loss(hidden, inputs)

    starts, expected, weights = batch.doc_starts.tolist(), [], blocks.weights.flatten()
    for row, flat in enumerate(blocks.rows.tolist()):
        anchor, slot = int(anchors[flat // 4]), flat % 4
        start = max(s for s in starts if s <= anchor)
        prefix = batch.input_ids[start : anchor + slot]  # all before the slot's token
        with torch.no_grad():
            teacher = target.model(prefix[None]).logits[0, -1:].double()
        logits = hidden[row : row + 1].detach().double() @ trainer.head.double().T
        expected.append(weights[flat] * NAIVE[kind](logits, teacher)[0])
    assert blocks.num_rows > 15
    assert output.numerator.item() == pytest.approx(sum(expected).item(), rel=1e-4)


@pytest.mark.parametrize("kind", SOFT)
def test_a_step_lowers_the_loss(kind):
    target, trainer = soft_trainer(kind)
    batch = packed(documents([[1] * 12]), [0])
    features, anchors = target.features(batch), torch.arange(0, 10)
    optimizer = torch.optim.Adam(trainer.drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        sums = trainer.micro_step(features, batch, trainer.blocks(batch, anchors))
        losses.append((sums[0] / sums[1]).item())
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]


def test_checks_cover_the_last_layer():
    target, trainer = soft_trainer()
    batch = packed(documents([[1] * 9]), [0])
    good, H = target.features(batch), target.hidden_size

    def refused(match: str, **changes: object) -> None:
        bad = dataclasses.replace(good, **changes)
        with pytest.raises(FeatureError, match=match):
            bad.verify(batch, trainer.handed_taps, H)

    good.verify(batch, trainer.handed_taps, H)
    for value, match in ((0.0, "all zero"), (float("nan"), "not finite")):
        changed = good.features.clone()
        changed[4, 2 * H :] = value
        refused(match, features=changed)
    refused("expected 3 taps", features=good.features[:, : 2 * H], tap_ids=(0, 2))
    refused(r"expected taps \[0, 2, 3\]", tap_ids=(0, 2, 1))


def test_memory_counts_the_last_layer_the_target_s_logits_and_dS(monkeypatch):
    said: dict[str, str] = {}

    class Monitor:
        def say(self, text: str) -> None:
            said.setdefault(kind, text)

    def part(text: str, name: str) -> int:
        return int(text.split(f"{name} ")[1].split(",")[0].split(")")[0])

    for kind in ("kl", "ce"):
        target, trainer = soft_trainer("kl")
        big = dataclasses.replace(trainer.config.batch, token_budget=100_000)
        loss = dataclasses.replace(trainer.config.loss, kind=kind, chunk_rows=40_000)
        config = dataclasses.replace(trainer.config, batch=big, loss=loss)
        norm = trainer.final_norm if kind == "kl" else None
        trainer = Trainer(target.vocabulary(), trainer.drafter, config, norm)
        report_memory(trainer, target, 3, Monitor())
    wider = 100_000 * 64 * 4 / 2**20
    features = part(said["kl"], "features") - part(said["ce"], "features")
    buffers = part(said["kl"], "feature buffers") - part(said["ce"], "feature buffers")
    assert features == pytest.approx(2 * wider, abs=1.1)
    assert buffers == pytest.approx(3 * wider, abs=1.1)
    logits = {k: part(said[k], "a chunk of logits or a layer's dS") for k in said}
    assert logits["kl"] == pytest.approx(1.5 * logits["ce"], abs=2)  # two sides, one temporary

    monkeypatch.setattr("dflash_ext.startup.largest_ds", lambda *sizes: 900 << 20)
    monkeypatch.setattr("dflash_ext.startup.ds_limit", lambda device: 700 << 20)
    kind = "kept"
    report_memory(trainer, target, 3, Monitor())
    assert part(said["kept"], "a chunk of logits or a layer's dS") == 700


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mse"}, "loss 'mse' is unknown: use one of"),
        ({"kind": "kl", "alpha": 0.3}, "alpha 0.3 is of no use to loss 'kl': leave it at 0.5"),
        ({"kind": "ce", "alpha": 0.3}, "alpha 0.3 is of no use to loss 'ce'"),
        ({"kind": "dpace", "gamma": "7"}, "gamma 7 is of no use to loss 'dpace': leave it at auto"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(UserError, match=message) as error:
        LossOptions(**options)
    assert "\n" not in str(error.value)


def test_every_loss_is_an_option():
    assert [LossOptions(kind=kind).kind for kind in LOSSES] == ["ce", "dpace", "kl", "lk"]
