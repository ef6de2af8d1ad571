"""Micro-batches: exact splits, unsupervised neighbours, memory that follows the budgets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from reference_drafter import reference_hidden
from test_drafter import exported, make
from tiny_targets import VOCAB, one_thread, tiny_model  # noqa: F401

from dflash_ext.batch import PackedBatch
from dflash_ext.blocks import build_blocks, draw_anchors
from dflash_ext.config import (
    BatchOptions,
    DataOptions,
    EvalOptions,
    LossOptions,
    OptimOptions,
    TrainConfig,
)
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.drafter import Drafter
from dflash_ext.errors import FeatureError, UserError
from dflash_ext.initialise import drafter_config
from dflash_ext.loss import vocabulary_loss
from dflash_ext.memory import largest_batch, largest_ds, predict_peak
from dflash_ext.metrics import slot_sums, summarise
from dflash_ext.ops.kept import image_bytes
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.pipeline import Book, InProcess
from dflash_ext.plan import Schedule
from dflash_ext.samples import Samples
from dflash_ext.target import Target
from dflash_ext.topology import Handover
from dflash_ext.trainer import Trainer, Validation

MASK = VOCAB - 3


class OneProcess(Trainer):
    """A trainer beside its target, as in a run of one process."""

    def __init__(self, target: Target, drafter: Drafter, config: TrainConfig) -> None:
        super().__init__(target.vocabulary(), drafter, config)
        self.target = target

    def features(self, batch: PackedBatch):
        features = self.target.features(batch)
        config = self.drafter.config
        features.verify(batch, config.target_layer_ids, config.target_hidden_size)
        return features


def trainer_of(block_size=4, batch=None, **loss) -> OneProcess:
    config = TrainConfig(
        data=DataOptions(max_prompt_tokens=16, max_answer_tokens=32),
        loss=LossOptions(chunk_rows=7, **loss),
        batch=batch
        or BatchOptions(token_budget=64, max_documents=4, anchors_per_sequence=6, anchor_budget=24),
    )
    options = dataclasses.replace(config.drafter, block_size=block_size)
    target = Target(tiny_model("llama", head_dim=64), tap_ids=(0, 2))
    torch.manual_seed(1)
    return OneProcess(target, Drafter(drafter_config(options, target, MASK)), config)


def documents(masks: list[list[int]], seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(0, VOCAB - 8, (len(m),), generator=generator), torch.tensor(m).bool())
        for m in masks
    ]


def packed(docs, ids) -> PackedBatch:
    return PackedBatch.from_documents([docs[i] for i in ids], ids)


def backward(trainer: OneProcess, batch: PackedBatch):
    """Slot sums of one micro-batch; gradients accumulate."""
    anchors = draw_anchors(batch, anchors_per_sequence=6, seed=0, epoch=0)
    return trainer.micro_step(trainer.features(batch), batch, trainer.blocks(batch, anchors))


def gradients(trainer: OneProcess, *batches: PackedBatch):
    trainer.drafter.zero_grad()
    sums = sum(backward(trainer, b) for b in batches)
    return [p.grad.clone() for p in trainer.drafter.parameters()], sums


def slot_ids(blocks) -> torch.Tensor:
    """int64 [N*B]: the token of every slot."""
    ids = torch.full((blocks.num_blocks, blocks.block_size), MASK)
    ids[:, 0] = blocks.input_ids[:-1]
    return ids.flatten()


def assert_same(a, b, rtol=1e-5):
    for x, y in zip(a, b):
        assert (x - y).norm() <= rtol * y.norm() + 1e-9


@pytest.mark.parametrize("kind", ["ce", "dpace"])
def test_gradient_is_independent_of_the_split(kind):
    """Requirement 11: numerators and weights add up, whatever the micro-batches."""
    trainer = trainer_of(kind=kind)
    docs = documents([[0, 0] + [1] * n for n in (12, 3, 7, 9, 2)])
    whole, sums = gradients(trainer, packed(docs, [0, 1, 2, 3, 4]))
    for split in ([[0], [1], [2], [3], [4]], [[4, 0], [1, 2, 3]], [[3, 1], [2, 0, 4]]):
        parts, part_sums = gradients(trainer, *[packed(docs, ids) for ids in split])
        assert_same(parts, whole)
        torch.testing.assert_close(part_sums, sums, rtol=1e-5, atol=1e-4)


def test_micro_step_equals_an_independent_computation():
    """Loss and gradient of the whole chain against the reference drafter and full logits, fp64."""
    trainer = trainer_of()
    docs = documents([[0, 0] + [1] * 8, [0] + [1] * 5])
    batch = packed(docs, [0, 1])
    anchors = draw_anchors(batch, anchors_per_sequence=6, seed=0, epoch=0)
    blocks = trainer.blocks(batch, anchors)
    ours, sums = gradients(trainer, batch)

    model, drafter = trainer.target.model, trainer.drafter
    state = {n: p.detach().double().requires_grad_() for n, p in drafter.named_parameters()}
    taps = []
    for ids, _ in docs:  # each document alone, unpadded
        states = model(ids[None], output_hidden_states=True).hidden_states
        taps.append(torch.cat([states[1][0], states[3][0]], -1))  # outputs of layers 0 and 2
    doc_of = [d for d, (ids, _) in enumerate(docs) for _ in ids]
    pos_of = [p for ids, _ in docs for p in range(len(ids))]
    hidden = reference_hidden(
        state,
        exported(drafter.config),
        torch.cat(taps).detach().double(),
        doc_of,
        pos_of,
        model.get_input_embeddings().weight[slot_ids(blocks)].detach().double(),
        [doc_of[a] for a in anchors.tolist()],
        [pos_of[a] for a in anchors.tolist()],
    )
    log_p = (hidden @ model.get_output_embeddings().weight.double().T).log_softmax(-1)
    numerator = 0
    for n, a in enumerate(anchors.tolist()):
        for k in range(1, 4):
            row, end = a + k, len(docs[0][0]) if doc_of[a] == 0 else len(doc_of)
            if row >= end:
                break
            weight = np.exp(-(k - 1) / (4 / 2.3))
            numerator = numerator - weight * log_p[n * 4 + k, batch.input_ids[row]]
    numerator.backward()
    assert float(sums[0]) == pytest.approx(float(numerator.detach()), rel=1e-5)
    assert_same([g.double() for g in ours], [p.grad for p in state.values()], rtol=1e-4)


def test_unsupervised_document_and_padding_change_nothing():
    """A (5 tokens, nothing supervised), B (8 tokens, mask 3..7), padding 3: B equals B alone."""
    trainer = trainer_of()
    docs = documents([[0] * 5, [0] * 3 + [1] * 5, [0] * 3])
    alone, sums = gradients(trainer, packed(docs, [1]))
    together, sums_together = gradients(trainer, packed(docs, [0, 1, 2]))
    assert all(g.isfinite().all() for g in together)
    assert_same(together, alone)
    torch.testing.assert_close(sums_together, sums, rtol=1e-5, atol=1e-5)


def test_three_supervised_tokens_with_block_16():
    """No two neighbours are supervised, so there is no anchor: the step is skipped."""
    trainer = trainer_of(block_size=16)
    docs = documents([[0, 1, 0, 1, 0, 1], [0, 0] + [1] * 20])
    optimizer = DrafterOptimizer(trainer.drafter, OptimOptions(name="adamw"), 10)
    before = [p.detach().clone() for p in trainer.drafter.parameters()]
    result, _ = optimizer.step(backward(trainer, packed(docs, [0])))
    assert (result.applied, result.reason) == (False, "zero weight")
    assert optimizer.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.drafter.parameters()))

    good, _ = gradients(trainer, packed(docs, [1]))
    assert_same(gradients(trainer, packed(docs, [0, 1]))[0], good)
    assert_same(gradients(trainer, packed(docs, [0]), packed(docs, [1]))[0], good)


def test_a_non_finite_loss_is_named_and_skipped():
    trainer = trainer_of()
    optimizer = DrafterOptimizer(trainer.drafter, OptimOptions(name="adamw", max_nonfinite=2), 10)
    batch = packed(documents([[1] * 9]), [0])
    with torch.no_grad():
        trainer.drafter.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    before = [p.detach().clone() for p in trainer.drafter.parameters()]
    result, _ = optimizer.step(backward(trainer, batch))
    assert result.reason.startswith("non-finite gradient of ")
    for a, b in zip(before, trainer.drafter.parameters()):
        assert torch.equal(a.nan_to_num(7), b.detach().nan_to_num(7))
    sums = backward(trainer, batch)
    with pytest.raises(UserError, match=r"gradient of .* was not finite in 2 steps in a row"):
        optimizer.step(sums)


def store_of(path, masks) -> TokenStore:
    with StoreWriter(path / "store") as writer:
        for ids, mask in documents(masks):
            writer.append(ids.tolist(), mask.tolist())
    return TokenStore.open(path / "store")


def book_of(trainer: Trainer, store: TokenStore, held_out=()) -> Book:
    samples = Samples(store, np.arange(len(store)))
    budgets = {"token_budget": 9, "max_documents": 1, "anchor_budget": 24}
    schedule = Schedule(store.lengths, np.minimum(store.candidates, 6), seed=0, **budgets)
    held = Samples(store, np.array(held_out, dtype=np.int64))
    return Book(samples, schedule, Validation(trainer.config, held, 4))


def test_wrong_features_are_never_trained_on(tmp_path, monkeypatch):
    """Requirement 8 where target and drafter share a process."""
    trainer = trainer_of()
    book = book_of(trainer, store_of(tmp_path, [[1] * 9, [1] * 9]))
    source = InProcess(trainer.target, trainer, book)
    first, second = (Handover("train", i, 0, 0) for i in range(2))
    good, foreign = (trainer.target.features(book.batch(h)) for h in (first, second))
    batch, features = source.take(first)
    assert torch.equal(features.features, good.features)
    assert batch.sample_ids == book.batch(first).sample_ids
    for bad in (
        dataclasses.replace(good, features=torch.zeros_like(good.features)),
        dataclasses.replace(good, features=good.features[:-1]),
        dataclasses.replace(good, features=good.features * float("inf")),
        dataclasses.replace(good, tap_ids=(0, 1)),
        foreign,
    ):
        monkeypatch.setattr(trainer.target, "features", lambda _, bad=bad: bad)
        name = rf"batch 0 of target 0: features of samples \[{batch.sample_ids[0]}\]"
        with pytest.raises(FeatureError, match=name):
            source.take(first)


@pytest.mark.parametrize("chunk", [1, 5, 7])
def test_anchors_in_turns_add_up_to_all_at_once(chunk):
    docs = documents([[0, 0] + [1] * 12, [1] * 9, [0] * 5, [1, 0] * 4, [1] * 20])
    whole, turns = trainer_of(), trainer_of()
    options = dataclasses.replace(turns.config.batch, anchor_chunk=chunk)
    turns.config = dataclasses.replace(turns.config, batch=options)
    assert turns.config.batch.blocks_at_once == chunk
    batch = packed(docs, range(5))
    expected, sums = gradients(whole, batch)
    found, sums_of_turns = gradients(turns, batch)
    assert_same(found, expected)
    torch.testing.assert_close(sums_of_turns, sums, rtol=1e-5, atol=1e-5)


def test_foreign_token_ids_are_an_error():
    trainer = trainer_of()
    batch = PackedBatch.from_documents([(torch.tensor([1, VOCAB]), torch.ones(2))], [17])
    with pytest.raises(UserError, match=rf"samples \[17\] hold token id {VOCAB}"):
        trainer.blocks(batch, torch.tensor([0]))


def test_validation_equals_its_parts_and_does_not_depend_on_batching(tmp_path):
    trainer = trainer_of()
    masks = [[0, 0] + [1] * n for n in (12, 3, 7, 9, 2, 15)]
    store = store_of(tmp_path, masks)

    def run(config=trainer.config, chosen=(1, 2, 3, 5), row_bytes=4):
        samples = Samples(store, np.array(chosen, dtype=np.int64))
        validation, taken = Validation(config, samples, row_bytes), []

        def take(index):
            taken.append(index)
            batch = validation.batch(index)
            return batch, trainer.features(batch)

        first = validation.run(trainer, range(len(validation)), take)
        assert first == validation.run(trainer, range(len(validation)), take)  # the same anchors
        rounds = 1 if validation.keep else 2
        assert taken == [*range(len(validation))] * rounds
        return first

    metrics = run()
    assert metrics == run(row_bytes=10**9)  # features too large to keep
    assert 1 <= metrics["accept_len"] <= metrics["tree_accept_len@16"] <= 4
    with torch.no_grad():
        sums = 0
        for i in (1, 2, 3, 5):
            batch = store.batch([i])
            blocks = trainer.blocks(
                batch, draw_anchors(batch, anchors_per_sequence=6, seed=0, epoch=0)
            )
            inputs = trainer.inputs(trainer.features(batch), batch, blocks)
            output = vocabulary_loss(
                trainer.hidden(inputs, supervised=True),
                trainer.head,
                blocks.labels.flatten()[blocks.rows],
                blocks.weights.flatten()[blocks.rows],
            )
            sums = sums + slot_sums(output, blocks)
    expected = summarise(sums.tolist(), 4)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name
    assert run(chosen=()) == {}
    few = dataclasses.replace(trainer.config, eval=EvalOptions(max_validation_blocks=4))
    assert run(few)["blocks"] == 4


@pytest.mark.parametrize(
    ("options", "max_length"),
    [
        (BatchOptions(token_budget=100, max_documents=4, anchor_budget=40), 64),
        (BatchOptions(token_budget=100, max_documents=4, anchor_budget=40), 10),
        (BatchOptions(token_budget=9, max_documents=8, anchor_budget=16), 64),
        (BatchOptions(token_budget=64, max_documents=1, anchor_budget=8), 64),
        (BatchOptions(token_budget=100, max_documents=4, anchor_budget=60, anchor_chunk=30), 64),
        (BatchOptions(token_budget=100, max_documents=4, anchor_budget=40, anchor_chunk=31), 64),
        (BatchOptions(token_budget=64, max_documents=1, anchor_budget=60, anchor_chunk=20), 64),
    ],
)
def test_largest_batch_is_legal_and_full(options, max_length):
    """Two turns where the budgets allow more than one, and nothing is larger than the first."""
    batch, anchors = largest_batch(options, max_length=max_length, block_size=8, vocab_size=50)
    lengths = batch.lengths()
    assert batch.num_tokens <= options.token_budget
    assert batch.num_documents <= options.max_documents
    assert int(lengths.max()) <= max_length
    assert len(anchors) <= options.anchor_budget
    assert int(batch.input_ids.max()) < 50
    possible = int(sum(min(options.anchors_per_sequence, n - 1) for n in lengths.tolist()))
    turn = options.blocks_at_once
    assert len(anchors) <= min(options.anchor_budget, 2 * turn)
    assert bool((anchors.diff() > 0).all())
    blocks = build_blocks(batch, anchors, block_size=8, mask_token_id=0, gamma=None)
    sizes = [part.num_blocks for part in blocks.chunks(turn)]
    assert sizes[0] == max(sizes) == min(turn, possible)
    assert (len(sizes) > 1) == (min(options.anchor_budget, possible) > turn)
    if options.token_budget == 100 and max_length == 64:
        assert batch.num_tokens == 100
        ends = batch.doc_starts[1:][torch.searchsorted(batch.doc_starts[1:], anchors, right=True)]
        assert bool((anchors + 8 <= ends).sum() >= len(anchors) - 8)


@pytest.mark.parametrize(("layers", "window"), [("full_attention", None), ("sliding_attention", 9)])
def test_no_turn_has_more_scores_than_the_rehearsal(layers, window):
    kinds = {"layer_types": (layers,) * 2, "num_layers": 2, "sliding_window": window}
    drafter = make(head_dim=64, **kinds)
    options = BatchOptions(token_budget=3000, max_documents=64, anchor_budget=90, anchor_chunk=33)
    most = largest_ds(drafter.config, options, 700)
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(50):
        lengths = rng.integers(1, 700, size=rng.integers(1, 12))
        lengths = lengths[: max(1, int((lengths.cumsum() <= 3000).sum()))]
        batch = PackedBatch.random(tuple(lengths.tolist()), 50, 0)
        anchors = draw_anchors(batch, anchors_per_sequence=60, seed=1, epoch=0)[:90]
        if not len(anchors):
            continue
        options_of = dict(block_size=drafter.config.block_size, mask_token_id=0, gamma=None)
        for turn in build_blocks(batch, anchors, **options_of).chunks(33):
            rows, blocks = turn.narrowed(drafter.config.context_window)
            num_ctx = len(torch.arange(batch.num_tokens)[rows])
            made = drafter.layouts(blocks.ctx_start, blocks.ctx_end, num_ctx, blocks.visible_rows)
            for layout in made.values():
                heads, groups = drafter.config.num_heads, drafter.config.num_kv_heads
                counts = layout.images(groups, heads // groups)
                seen.append(image_bytes(counts.total))
    assert most / 6 < max(seen) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "N"), [(400, 10), (50, 100)])
def test_predicted_activations_are_what_autograd_keeps(dtype, T, N):
    layers = {"layer_types": ("full_attention",) * 3, "num_layers": 3, "sliding_window": None}
    drafter = make(hidden_size=128, target_hidden_size=128, intermediate_size=256, **layers)
    B, own = (
        drafter.config.block_size,
        {p.untyped_storage().data_ptr() for p in drafter.parameters()},
    )
    features = torch.randn(T, drafter.config.feature_width, dtype=dtype)
    embeds = torch.randn(N + 1, 128, dtype=dtype)
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    layouts = drafter.layouts(torch.zeros(N).int(), torch.arange(N).clamp(max=T).int(), T)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        context = drafter.encode_context(features)
        hidden = drafter(embeds, context, torch.arange(N * B), torch.arange(T), layouts)
    assert hidden.shape == (N * B, 128)
    count = sum(p.numel() for p in drafter.parameters())
    parts = predict_peak(
        drafter.config,
        BatchOptions(token_budget=T, anchor_budget=N),
        handed_width=drafter.config.feature_width,
        logits_or_ds=0,
        drafter_parameters=count,
        target_parameters=0,
        bytes_per_value=features.element_size(),
        moments=1,
    )
    predicted = parts["drafter activations"] + parts["features"] - features.nbytes
    assert sum(kept.values()) == pytest.approx(predicted, rel=0.15)
