"""What a step reports (semantics.md, "Metrics"): sums on the device, read once, exact over splits.

Shapes: N blocks, B slots per block, R supervised rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_ext.blocks import Blocks
from dflash_ext.loss import LossOutput
from dflash_ext.tree import heaviest_prefixes

RECALL_AT = (2, 4, 8, 16)
TREE_BUDGETS = (16, 64, 256)


def sums_size(block_size: int) -> int:
    """Entries of a `slot_sums` vector."""
    return 6 + (2 + len(RECALL_AT)) * block_size


def slot_sums(output: LossOutput, blocks: Blocks) -> Tensor:
    """One micro-batch as a vector of sums, fp32 [6 + 6B]; vectors of micro-batches add up.

    Layout: loss numerator, weight, blocks, accepted, full blocks and their count, then per slot
    the supervised rows, those whose greedy token is the label, and those whose label is among
    the k likeliest for k of RECALL_AT. Stays on the device of the outputs.
    """
    N, B = blocks.labels.shape
    device = output.rank.device
    per_row = torch.stack(
        [
            torch.ones_like(output.rank),
            output.prediction == blocks.labels.flatten()[blocks.rows],
            *[output.rank < k for k in RECALL_AT],
        ]
    ).float()
    grid = torch.zeros(len(per_row), N * B, device=device)
    grid[:, blocks.rows] = per_row
    grid = grid.view(-1, N, B)
    supervised, correct = grid[0, :, 1:], grid[1, :, 1:]
    prefix = correct.cumprod(1).sum(1)  # ends at the first wrong or unsupervised slot
    used = supervised.amax(1) if N else supervised.sum(1)  # a block without labels counts nowhere
    complete = (supervised.sum(1) == B - 1).float()
    scalars = torch.stack(
        [
            output.numerator.detach(),
            output.weight,
            used.sum(),
            ((prefix + 1) * used).sum(),
            (prefix == B - 1).float().sum(),
            complete.sum(),
        ]
    )
    return torch.cat([scalars, grid.sum(1).flatten()])


def summarise(sums: Sequence[float], block_size: int) -> dict[str, float]:
    """Named metrics of summed `slot_sums` (host floats); a ratio without a denominator is absent.

    loss: sum w*loss / sum w. accept_len: mean over blocks of the greedy matching prefix over
    supervised slots, plus 1. full_block_rate: share of the fully supervised blocks matched to
    their last slot. accuracy/slot_k and recall@r/slot_k: over the supervised rows of slot k.
    """
    numerator, weight, blocks, accepted, full, complete = sums[:6]
    B = block_size
    per_slot = [sums[6 + i * B : 6 + (i + 1) * B] for i in range(2 + len(RECALL_AT))]
    metrics = {"weight": weight, "blocks": blocks}
    if weight:
        metrics["loss"] = numerator / weight
    if blocks:
        metrics["accept_len"] = accepted / blocks
    if complete:
        metrics["full_block_rate"] = full / complete
    for k in range(1, B):
        if count := per_slot[0][k]:
            metrics[f"accuracy/slot_{k}"] = per_slot[1][k] / count
            for r, hits in zip(RECALL_AT, per_slot[2:]):
                metrics[f"recall@{r}/slot_{k}"] = hits[k] / count
    return metrics


def tree_accept_lengths(
    log_probs: Sequence[Sequence[float]],
    label_ranks: Sequence[int],
    budgets: Sequence[int] = TREE_BUDGETS,
) -> list[int]:
    """Accepted length (matched tree nodes + 1) of one block under DDTree at each node budget.

    log_probs: per slot 1.., the log-probabilities of its likeliest tokens, falling, at least
    `max(budgets)` of them (or the whole vocabulary). label_ranks: per slot, the index of its label
    in that list; beyond the list means not found or not supervised.
    """
    reach, matched = [0] * len(budgets), [True]
    for count, node in enumerate(heaviest_prefixes(log_probs, max(budgets))):
        slot = node.depth - 1
        hit = matched[node.parent] and slot < len(label_ranks) and node.rank == label_ranks[slot]
        matched.append(hit)
        if hit:
            for i, budget in enumerate(budgets):
                if count < budget:
                    reach[i] = node.depth
    return [depth + 1 for depth in reach]


def tree_sums(log_probs: Tensor, ids: Tensor, blocks: Blocks) -> dict[int, float]:
    """Sum over blocks of the tree-accepted length at each budget.

    log_probs fp32 [N, B-1, k], ids int64 [N, B-1, k]: likeliest tokens of slots 1..B-1 of every
    block of `blocks` (on the CPU). Blocks without a label are left out, as in `slot_sums`.
    """
    found = ids == blocks.labels[:, 1:, None]
    ranks = torch.where(found.any(-1), found.int().argmax(-1), ids.shape[-1])
    totals = dict.fromkeys(TREE_BUDGETS, 0.0)
    for count, block_probs, block_ranks in zip(
        blocks.rows_per_block, log_probs.tolist(), ranks.tolist()
    ):
        if count:
            lengths = tree_accept_lengths(block_probs, block_ranks)
            for budget, length in zip(TREE_BUDGETS, lengths):
                totals[budget] += length
    return totals
