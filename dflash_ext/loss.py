"""The objectives over the target's vocabulary, without the logits of a batch.

Logits exist for one chunk of rows at a time, in one buffer. The gradient with respect to the hidden
rows is computed in the same visit (two matrix products, nothing recomputed); the head is frozen and
gets none. Unsupervised rows are never passed in, so they cost nothing.
Shapes: R supervised rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dflash_ext.errors import UserError
from dflash_ext.ops.vocabulary import (
    Statistics,
    logits_buffer,
    new_statistics,
    vocabulary_gradient_,
    vocabulary_statistics,
)

LossKind = Literal["ce", "dpace"]


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch. Sum numerators and weights over micro-batches, divide once at the end."""

    numerator: Tensor
    """fp32 scalar, differentiable: sum of weight * cross-entropy."""
    weight: Tensor
    """fp32 scalar: sum of the weights used."""
    cross_entropy: Tensor
    """fp32 [R], unweighted."""
    probability: Tensor
    """fp32 [R]: the drafter's probability of the label."""
    prediction: Tensor
    """int64 [R]: the greedy token."""
    rank: Tensor
    """int64 [R]: number of tokens with a larger logit than the label."""


def chunk_bounds(
    rows_per_block: Sequence[int], chunk_rows: int
) -> Iterator[tuple[int, int, list[int]]]:
    """(first row, end row, rows of each block) of chunks of whole blocks, at most chunk_rows each.

    A block larger than chunk_rows is a chunk of its own (blocks hold at most 31 rows).
    """
    if chunk_rows < 1:
        raise UserError(f"chunk_rows {chunk_rows} must be at least 1")
    start = end = 0
    sizes: list[int] = []
    for rows in rows_per_block:
        if end > start and end + rows - start > chunk_rows:
            yield start, end, sizes
            start, sizes = end, []
        if rows:
            sizes.append(rows)
            end += rows
    if end > start:
        yield start, end, sizes


def dpace_weights(probability: Tensor, sizes: Sequence[int], alpha: float) -> Tensor:
    """D-PACE weights fp32 [R] of blocks holding `sizes` consecutive rows each.

    With q = (1 - alpha) * p(label) + alpha, w_j = sum over m >= j of the product of q_1 .. q_m:
    the expected number of accepted slots that a right slot j takes part in.
    """
    longest, device = max(sizes), probability.device
    cells = [block * longest + j for block, size in enumerate(sizes) for j in range(size)]
    cell = torch.tensor(cells, dtype=torch.int64)
    cell = cell.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else cell
    # Cells after a block's last row hold q = 0, so their products add nothing to the sums.
    q = torch.zeros(len(sizes) * longest, device=device)
    q[cell] = (1 - alpha) * probability + alpha
    reach = q.view(len(sizes), longest).cumprod(1)
    return reach.flip(1).cumsum(1).flip(1).flatten()[cell]


def head_logits(hidden: Tensor, head_weight: Tensor, out: Tensor) -> Tensor:
    """hidden [rows, H] times head_weight [V, H], into `out` fp32, or the dtype of both, [rows, V].

    On CUDA a bf16 product is accumulated and stored in fp32, if `out` is.
    """
    if out.dtype == hidden.dtype:
        return torch.mm(hidden, head_weight.T, out=out)
    if hidden.is_cuda:
        return torch.mm(hidden, head_weight.T, out_dtype=out.dtype, out=out)
    return out.copy_(hidden @ head_weight.T)  # the CPU's product has no other dtype than its input


class _Options(NamedTuple):
    rows_per_block: Sequence[int]
    kind: LossKind
    alpha: float
    chunk_rows: int
    logits_dtype: torch.dtype


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        options: _Options,
    ) -> tuple[Tensor, ...]:
        R, V = hidden.shape[0], head_weight.shape[0]
        stats = new_statistics(R, hidden.device)
        used = torch.empty_like(stats.lse)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        chunks = list(chunk_bounds(options.rows_per_block, options.chunk_rows))
        most = max((end - start for start, end, _ in chunks), default=0)
        buffer = logits_buffer(most, V, options.logits_dtype, hidden.device)
        for start, end, sizes in chunks:
            rows = slice(start, end)
            logits = head_logits(hidden[rows], head_weight, buffer[: end - start])
            part = Statistics(*(x[rows] for x in stats))
            vocabulary_statistics(logits, labels[rows], part)
            if options.kind == "dpace":
                probability = (part.at_label - part.lse).exp()
                used[rows] = dpace_weights(probability, sizes, options.alpha)
            else:
                used[rows] = weights[rows]
            if grad_hidden is not None:
                grad = vocabulary_gradient_(logits, labels[rows], part, used[rows], hidden.dtype)
                torch.mm(grad, head_weight, out=grad_hidden[rows])
        ctx.save_for_backward(grad_hidden)
        cross_entropy = stats.lse - stats.at_label
        others = (used.sum(), cross_entropy, cross_entropy.neg().exp(), *stats[2:])
        ctx.mark_non_differentiable(*others)
        return (used * cross_entropy).sum(), *others

    @staticmethod
    def backward(ctx: Any, grad_numerator: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what is saved here is a constant to autograd
            raise RuntimeError("vocabulary_loss has no second derivative: leave out create_graph")
        (grad_hidden,) = ctx.saved_tensors
        return (grad_hidden * grad_numerator.to(grad_hidden.dtype), *[None] * 4)


def vocabulary_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    rows_per_block: Sequence[int] | None = None,
    kind: LossKind = "ce",
    alpha: float = 0.5,
    chunk_rows: int = 1024,
    logits_dtype: torch.dtype = torch.float32,
) -> LossOutput:
    """Weighted cross-entropy of the supervised rows, chunk by chunk.

    hidden [R, H] and head_weight [V, H] in one dtype (fp32, or bf16 with fp32 softmax), labels
    int64 [R] in 0..V-1, weights fp32 [R]. `kind` "dpace" ignores the weights and derives its own,
    detached, from the label probabilities of each block, `rows_per_block` (host integers that sum
    to R) rows at a time. Logits of more than `chunk_rows` rows never exist, unless one block has
    more; they are kept in `logits_dtype`, fp32 or the dtype of hidden. UserError for an unknown
    kind, alpha outside 0..1 or chunk_rows below 1.
    """
    if kind not in ("ce", "dpace"):
        raise UserError(f"loss '{kind}' is unknown: use 'ce' or 'dpace'")
    if not 0 <= alpha <= 1:
        raise UserError(f"D-PACE alpha {alpha} must be from 0 to 1")
    R = hidden.shape[0]
    if rows_per_block is None:
        if kind == "dpace":
            raise ValueError("D-PACE weighs whole blocks: give rows_per_block")
        rows_per_block = [1] * R
    if sum(rows_per_block) != R or labels.shape != (R,) or weights.shape != (R,):
        raise ValueError(
            f"hidden has {R} rows, labels {tuple(labels.shape)}, weights {tuple(weights.shape)}, "
            f"rows_per_block sums to {sum(rows_per_block)}"
        )
    if logits_dtype not in (torch.float32, hidden.dtype):
        raise ValueError(f"logits in {logits_dtype}: expected fp32 or hidden's {hidden.dtype}")
    options = _Options(tuple(rows_per_block), kind, alpha, chunk_rows, logits_dtype)
    outputs = _VocabularyLoss.apply(
        hidden, head_weight, labels.contiguous(), weights.contiguous(), options
    )
    return LossOutput(*outputs)


@torch.no_grad()
def vocabulary_topk(
    hidden: Tensor, head_weight: Tensor, k: int, *, chunk_rows: int = 1024
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row: fp32 log-probs [R, k] falling, int64 ids [R, k]."""
    R, V = hidden.shape[0], head_weight.shape[0]
    log_probs = hidden.new_empty((R, k), dtype=torch.float32)
    ids = torch.empty((R, k), dtype=torch.int64, device=hidden.device)
    buffer = logits_buffer(min(R, chunk_rows), V, torch.float32, hidden.device)
    for start in range(0, R, chunk_rows):
        rows = slice(start, min(start + chunk_rows, R))
        logits = head_logits(hidden[rows], head_weight, buffer[: rows.stop - start])
        top, ids[rows] = logits.topk(k, dim=1)
        log_probs[rows] = top - logits.logsumexp(1, keepdim=True)
    return log_probs, ids
