"""Metrics against row-by-row counting, and the tree against an enumeration of every prefix."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ext.batch import PackedBatch
from dflash_ext.blocks import build_blocks
from dflash_ext.loss import vocabulary_loss, vocabulary_topk
from dflash_ext.metrics import (
    RECALL_AT,
    TREE_BUDGETS,
    slot_sums,
    summarise,
    tree_accept_lengths,
    tree_sums,
)

B, H, V = 4, 16, 40


def scenario(seed: int, contiguous: bool = True):
    """Random blocks whose labels the hidden rows predict about half of the time."""
    torch.manual_seed(seed)
    ids, mask = torch.randint(V, (60,)), torch.rand(60) < 0.8
    batch = PackedBatch.from_documents([(ids[:40], mask[:40]), (ids[40:], mask[40:])], [0, 1])
    blocks = build_blocks(
        batch,
        torch.arange(0, 60, 2),
        block_size=B,
        mask_token_id=0,
        gamma=2.0,
        contiguous=contiguous,
    )
    head = torch.randn(V, H)
    labels = blocks.labels.flatten()[blocks.rows]
    hidden = head[labels] + 1.0 * torch.randn(len(labels), H)
    output = vocabulary_loss(
        hidden,
        head,
        labels,
        blocks.weights.flatten()[blocks.rows],
        rows_per_block=blocks.rows_per_block,
    )
    return blocks, hidden, head, output


@pytest.mark.parametrize("contiguous", [True, False])
def test_metrics_equal_counting_by_hand(contiguous):
    blocks, hidden, head, output = scenario(0, contiguous)
    got = summarise(slot_sums(output, blocks).tolist(), B)
    log_p = (hidden @ head.T).log_softmax(-1)
    row = 0
    accepted, full, complete, used, slots = 0, 0, 0, 0, {k: [] for k in range(1, B)}
    for labels in blocks.labels.tolist():
        ranks = []
        for k in range(1, B):
            if labels[k] < 0:
                ranks.append(None)
                continue
            order = log_p[row].argsort(descending=True).tolist()
            ranks.append(order.index(labels[k]))
            slots[k].append(ranks[-1])
            row += 1
        if all(r is None for r in ranks):
            continue
        used += 1
        accepted += 1 + len(list(itertools.takewhile(lambda r: r == 0, ranks)))
        complete += None not in ranks
        full += ranks == [0] * (B - 1)
    assert row == blocks.num_rows
    assert 0 < full < complete < used == got["blocks"] < blocks.num_blocks
    assert got["accept_len"] == pytest.approx(accepted / used)
    assert got["full_block_rate"] == pytest.approx(full / complete)
    for k, ranks in slots.items():
        assert got[f"accuracy/slot_{k}"] == pytest.approx(ranks.count(0) / len(ranks))
        for r in RECALL_AT:
            share = sum(x < r for x in ranks) / len(ranks)
            assert got[f"recall@{r}/slot_{k}"] == pytest.approx(share)
    assert got["loss"] == pytest.approx(float(output.numerator / output.weight))


def test_sums_of_micro_batches_are_the_sums_of_the_whole():
    parts = [scenario(seed) for seed in (1, 2)]
    total = sum(slot_sums(output, blocks) for blocks, _, _, output in parts)
    merged = summarise(total.tolist(), B)
    each = [summarise(slot_sums(output, blocks).tolist(), B) for blocks, _, _, output in parts]
    weights = [m["weight"] for m in each]
    expected = sum(m["loss"] * w for m, w in zip(each, weights)) / sum(weights)
    assert merged["loss"] == pytest.approx(expected)
    expected = sum(m["accept_len"] * m["blocks"] for m in each) / merged["blocks"]
    assert merged["accept_len"] == pytest.approx(expected)


def test_nothing_supervised_has_no_ratios():
    assert summarise([0.0] * (6 + 6 * B), B) == {"weight": 0.0, "blocks": 0.0}


def brute_force_tree(log_probs, label_ranks, budget):
    """The `budget` heaviest prefixes among all, then the walk down the labels."""
    prefixes = []
    for depth in range(1, len(log_probs) + 1):
        for path in itertools.product(*[range(len(level)) for level in log_probs[:depth]]):
            prefixes.append((math.fsum(log_probs[d][r] for d, r in enumerate(path)), path))
    kept = {path for _, path in sorted(prefixes, reverse=True)[:budget]}
    matched = 0
    while matched < len(label_ranks) and tuple(label_ranks[: matched + 1]) in kept:
        matched += 1
    return matched + 1


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 4))
def test_tree_equals_enumeration(seed, slots):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(slots, 5, generator=generator, dtype=torch.float64)
    log_probs = logits.log_softmax(-1).sort(-1, descending=True).values.tolist()
    ranks = torch.randint(0, 3, (slots,), generator=generator).tolist()
    budgets = (1, 3, 8, 40)
    got = tree_accept_lengths(log_probs, ranks, budgets)
    assert got == [brute_force_tree(log_probs, ranks, budget) for budget in budgets]


def test_tree_sums_over_blocks():
    blocks, hidden, head, output = scenario(3)
    dense = torch.randn(blocks.num_blocks * B, H)
    dense[blocks.rows] = hidden
    rows = dense.view(-1, B, H)[:, 1:].reshape(-1, H)
    log_probs, ids = vocabulary_topk(rows, head, V)
    shape = (blocks.num_blocks, B - 1, V)
    totals = tree_sums(log_probs.view(shape), ids.view(shape), blocks)
    expected = dict.fromkeys(TREE_BUDGETS, 0.0)
    for block, count in enumerate(blocks.rows_per_block):
        ranks = []
        for k in range(1, count + 1):
            order = ids.view(shape)[block, k - 1].tolist()
            ranks.append(order.index(int(blocks.labels[block, k])))
        if count:
            lengths = tree_accept_lengths(log_probs.view(shape)[block].tolist(), ranks)
            for budget, length in zip(TREE_BUDGETS, lengths):
                expected[budget] += length
    assert totals == expected
    accept_len = summarise(slot_sums(output, blocks).tolist(), B)["accept_len"]
    used = sum(1 for count in blocks.rows_per_block if count)
    assert accept_len <= totals[16] / used <= totals[64] / used <= totals[256] / used <= B
