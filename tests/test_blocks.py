"""Anchors, labels and weights against brute force and the worked examples of requirements.md."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.batch import PackedBatch
from dflash_ext.blocks import (
    anchor_candidates,
    build_blocks,
    draw_anchors,
    resolve_gamma,
    slot_weights,
)
from dflash_ext.errors import UserError

MASK_ID = 999


def packed(*masks: list[int], sample_ids=None) -> PackedBatch:
    """Documents with the given loss masks; the token at packed row r is r."""
    documents, row = [], 0
    for mask in masks:
        ids = torch.arange(row, row + len(mask))
        documents.append((ids, torch.tensor(mask, dtype=torch.bool)))
        row += len(mask)
    return PackedBatch.from_documents(documents, sample_ids or range(len(masks)))


def labels_of(blocks) -> list[list[int]]:
    return [[x for x in row if x >= 0] for row in blocks.labels.tolist()]


def test_example_labels_at_the_end_of_a_document():
    batch = packed([0] * 4 + [1] * 6, [1] * 4)  # length 10, mask 4..9; then another document
    blocks = build_blocks(
        batch, torch.tensor([6, 7, 9]), block_size=4, mask_token_id=MASK_ID, gamma=None
    )
    assert labels_of(blocks) == [[7, 8, 9], [8, 9], []]
    assert blocks.rows_per_block == (3, 2, 0)
    assert blocks.rows.tolist() == [1, 2, 3, 5, 6]
    assert blocks.input_ids.tolist() == [6, 7, 9, MASK_ID]


def test_example_packed_with_unsupervised_document_and_padding():
    a, b, padding = [0] * 5, [0, 0, 0] + [1] * 5, [0] * 3
    batch = packed(a, b, padding)
    assert anchor_candidates(batch).nonzero().flatten().tolist() == [8, 9, 10, 11]
    anchors = draw_anchors(batch, anchors_per_sequence=512, seed=0, epoch=0)
    blocks = build_blocks(batch, anchors, block_size=4, mask_token_id=MASK_ID, gamma=3.0)
    assert blocks.positions.view(-1, 4)[:, 0].tolist() == [3, 4, 5, 6]  # restart per document
    assert blocks.ctx_start.tolist() == [5] * 4
    assert blocks.ctx_end.tolist() == [8, 9, 10, 11]
    alone = PackedBatch.from_documents([(batch.input_ids[5:13], batch.loss_mask[5:13])], [1])
    anchors_alone = draw_anchors(alone, anchors_per_sequence=512, seed=0, epoch=0)
    blocks_alone = build_blocks(
        alone, anchors_alone, block_size=4, mask_token_id=MASK_ID, gamma=3.0
    )
    assert torch.equal(blocks.labels, blocks_alone.labels)
    assert torch.equal(blocks.weights, blocks_alone.weights)
    assert torch.equal(blocks.positions, blocks_alone.positions)


def test_three_supervised_tokens_with_block_16():
    batch = packed([0] * 5 + [1] * 3)
    anchors = draw_anchors(batch, anchors_per_sequence=8, seed=0, epoch=0)
    assert anchors.tolist() == [5, 6]  # 7 has no next token
    blocks = build_blocks(batch, anchors, block_size=16, mask_token_id=MASK_ID, gamma=7.0)
    assert labels_of(blocks) == [[6, 7], [7]]


def brute_force(batch, anchors, B, gamma, contiguous):
    bounds = batch.doc_starts.tolist()
    labels, weights = [], []
    for a in anchors.tolist():
        end = next(e for e in bounds[1:] if e > a)
        open_, row_l, row_w = True, [], []
        for k in range(B):
            ok = k > 0 and a + k < end and bool(batch.loss_mask[a + k])
            if k > 0 and not ok and contiguous:
                open_ = False
            ok = ok and open_
            row_l.append(int(batch.input_ids[a + k]) if ok else -1)
            row_w.append((1.0 if gamma is None else math.exp(-(k - 1) / gamma)) if ok else 0.0)
        labels.append(row_l)
        weights.append(row_w)
    return labels, weights


@settings(max_examples=60)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=4),
    B=st.sampled_from([4, 8, 16]),
    gamma=st.sampled_from([None, 2.5, 7.0]),
    contiguous=st.booleans(),
)
def test_blocks_equal_brute_force(masks, B, gamma, contiguous):
    batch = packed(*masks)
    anchors = torch.arange(batch.num_tokens)  # more than candidates: every row must be right
    blocks = build_blocks(
        batch, anchors, block_size=B, mask_token_id=MASK_ID, gamma=gamma, contiguous=contiguous
    )
    labels, weights = brute_force(batch, anchors, B, gamma, contiguous)
    assert blocks.labels.tolist() == labels
    torch.testing.assert_close(blocks.weights, torch.tensor(weights))
    assert blocks.rows.tolist() == [
        i for i, x in enumerate(x for row in labels for x in row) if x >= 0
    ]
    assert blocks.num_rows == len(blocks.rows)

    expected = [
        bool(batch.loss_mask[a]) and a + 1 < e and bool(batch.loss_mask[a + 1])
        for s, e in zip(batch.doc_starts.tolist(), batch.doc_starts.tolist()[1:])
        for a in range(s, e)
    ]
    assert anchor_candidates(batch).tolist() == expected


@settings(max_examples=80)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 2, 7, 100]),
    data=st.data(),
)
def test_narrowed_keeps_every_row_that_is_seen(sizes, window, data):
    batch = packed(*([1] * n for n in sizes))
    everywhere = st.integers(0, batch.num_tokens - 1)
    anchors = sorted(data.draw(st.sets(everywhere, min_size=1, max_size=6)))
    options = {"block_size": 4, "mask_token_id": MASK_ID, "gamma": None}
    blocks = build_blocks(batch, torch.tensor(anchors), **options)
    rows, narrowed = blocks.narrowed(window)
    kept = torch.arange(batch.num_tokens)[rows].tolist()
    starts, ends = narrowed.ctx_start.tolist(), narrowed.ctx_end.tolist()
    assert narrowed.visible_rows >= sum(ends) - sum(starts)
    assert starts == sorted(starts)
    assert ends == sorted(ends)
    assert narrowed.ctx_start.dtype == narrowed.ctx_end.dtype == torch.int32
    for anchor, first, start, end in zip(anchors, blocks.ctx_start.tolist(), starts, ends):
        low = first if window is None else max(first, anchor - window + 1)
        assert kept[start:end] == list(range(anchor - (end - start), anchor))
        assert end - start >= anchor - low  # all that slot 0 sees, the farthest back
        assert kept[start:end] == [] or kept[start] >= first
    seen = {
        row
        for d, (a, b) in enumerate(zip(batch.doc_starts.tolist(), batch.doc_starts.tolist()[1:]))
        if (own := [x for x in anchors if a <= x < b])
        for row in range(a if window is None else max(a, own[0] - window + 1), own[-1])
    }
    assert seen <= set(kept)
    assert len(kept) - len(seen) <= len(kept) / 40  # nobody sees the rest


def test_narrowed_leaves_out_whole_documents():
    batch = packed([0] * 500, [1] * 8, [0] * 500, [1] * 8, [1] * 300)
    options = {"block_size": 4, "mask_token_id": MASK_ID, "gamma": None}
    blocks = build_blocks(batch, torch.tensor([502, 504, 1009, 1010]), **options)
    rows, narrowed = blocks.narrowed()
    assert rows.tolist() == [500, 501, 502, 503, 1008, 1009]
    assert narrowed.ctx_start.tolist() == [0, 0, 4, 4]
    assert narrowed.ctx_end.tolist() == [2, 4, 5, 6]
    only = build_blocks(batch, torch.tensor([504, 507]), **options).narrowed()
    assert only[0] == slice(500, 507)  # no copy of the features
    assert only[1].ctx_end.tolist() == [4, 7]


def test_turns_end_with_documents():
    batch = packed([1] * 6, [1] * 3, [1] * 9, [1] * 2)
    blocks = build_blocks(batch, torch.arange(20), block_size=4, mask_token_id=MASK_ID, gamma=None)
    for size, expected in (
        (20, [(0, 20)]),
        (10, [(0, 9), (9, 18), (18, 20)]),
        (8, [(0, 6), (6, 9), (9, 17), (17, 20)]),  # document 2 is larger than a turn
        (4, [(0, 4), (4, 6), (6, 9), (9, 13), (13, 17), (17, 20)]),
    ):
        turns = list(blocks.chunks(size))
        found = [(int(t.anchors[0]), int(t.anchors[-1]) + 1) for t in turns]
        assert found == expected, size
        assert sum(t.visible_rows for t in turns) == blocks.visible_rows == (15 + 3 + 36 + 1)
        for turn, (first, end) in zip(turns, expected):
            assert turn.input_ids.tolist() == [*range(first, end), MASK_ID]


def test_contiguous_supervision_stops_at_the_first_gap():
    batch = packed([1, 1, 1, 0, 1, 1])
    kwargs = {"block_size": 8, "mask_token_id": MASK_ID, "gamma": None}
    assert labels_of(build_blocks(batch, torch.tensor([0]), **kwargs)) == [[1, 2]]
    peers = build_blocks(batch, torch.tensor([0]), contiguous=False, **kwargs)
    assert labels_of(peers) == [[1, 2, 4, 5]]


def test_draw_depends_on_seed_epoch_sample_and_draw_only():
    long, short = [1] * 200, [1] * 3

    def draw(batch, document, **keys):
        start, end = batch.doc_starts[document], batch.doc_starts[document + 1]
        keys = {"seed": 1, "epoch": 2, "draw": 0} | keys
        rows = draw_anchors(batch, anchors_per_sequence=16, **keys)
        return [r - int(start) for r in rows.tolist() if start <= r < end]

    alone = draw(packed(long, sample_ids=[7]), 0)
    assert len(set(alone)) == 16
    assert alone == sorted(alone)
    assert draw(packed(short, long, sample_ids=[3, 7]), 1) == alone
    assert draw(packed(long, long, sample_ids=[7, 3]), 0) == alone
    for change in ({"seed": 2}, {"epoch": 3}, {"draw": 1}):
        assert draw(packed(long, sample_ids=[7]), 0, **change) != alone
    assert draw(packed(long, sample_ids=[8]), 0) != alone
    assert draw(packed(short), 0) == [0, 1]


def test_draw_is_uniform():
    counts = torch.zeros(21)
    batch = packed([1] * 21)
    for epoch in range(400):
        counts[draw_anchors(batch, anchors_per_sequence=5, seed=0, epoch=epoch)] += 1
    assert counts[20] == 0
    assert (counts[:20] - 100).abs().max() < 45  # 5 sigma of a binomial(400, 1/4)


def test_gamma_defaults_and_errors():
    assert [resolve_gamma("auto", B) for B in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert resolve_gamma("auto", 4) == pytest.approx(4 / 2.3)
    assert resolve_gamma("auto", 32) == pytest.approx(32 / 2.3)
    assert resolve_gamma("none", 16) is None
    assert resolve_gamma("2.5", 16) == 2.5
    for wrong in ("0", "-1", "nan", "inf", "seven", 0.0, -3.0, math.nan, math.inf):
        with pytest.raises(UserError, match="gamma"):
            resolve_gamma(wrong, 16)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(UserError, match="gamma"):
            build_blocks(
                packed([1, 1]), torch.tensor([0]), block_size=4, mask_token_id=0, gamma=wrong
            )
    assert slot_weights(4, 2.0).tolist() == pytest.approx([0, 1, math.exp(-0.5), math.exp(-1)])


def test_unsorted_or_outside_anchors_are_refused():
    for anchors in ([2, 1], [1, 1], [-1], [6]):
        with pytest.raises(ValueError, match="anchors"):
            build_blocks(
                packed([1] * 6),
                torch.tensor(anchors),
                block_size=4,
                mask_token_id=MASK_ID,
                gamma=None,
            )
