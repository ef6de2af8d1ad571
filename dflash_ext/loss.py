"""The objectives over the target's vocabulary, without the logits of a batch.

Logits exist for one chunk of rows at a time, in one buffer. The gradient with respect to the hidden
rows is computed in the same visit (two matrix products, nothing recomputed); the head is frozen and
gets none. Unsupervised rows are never passed in, so they cost nothing.
Shapes: R supervised rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dflash_ext.errors import UserError
from dflash_ext.ops.quantise import ALIGNMENT, Quantised, quantise_rows, scaled_product
from dflash_ext.ops.soft_labels import Chunk, kl_divergence_, negative_log_acceptance_
from dflash_ext.ops.vocabulary import (
    Statistics,
    by_kernel,
    logits_buffer,
    new_statistics,
    row_lse,
    vocabulary_gradient_,
    vocabulary_statistics,
)
from dflash_ext.placement import to_device

LossKind = Literal["ce", "dpace", "kl", "lk"]


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch. Sum numerators and weights over micro-batches, divide once at the end."""

    numerator: Tensor
    """fp32 scalar, differentiable: sum of weight * loss."""
    weight: Tensor
    """fp32 scalar: sum of the weights used."""
    cross_entropy: Tensor
    """fp32 [R], unweighted: of the labels, whatever the loss."""
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
    cell = to_device(torch.tensor(cells, dtype=torch.int64), device)
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


def quantised_head(head_weight: Tensor) -> Quantised:
    """head_weight [V, H] in FP8, a scale a row; rows of zeros behind V up to a multiple of 16."""
    missing = -len(head_weight) % ALIGNMENT
    return quantise_rows(torch.nn.functional.pad(head_weight, (0, 0, 0, missing)))


def fp8_logits(hidden: Tensor, head: Quantised, out: Tensor) -> Tensor:
    """`head_logits` by an FP8 product of bf16 hidden rows, quantised here, into `out` bf16."""
    rows, width = quantise_rows(hidden), len(head.scales)
    if out.stride(0) == width:  # what lies behind V in a row is written too, and read by nobody
        whole = out.as_strided((len(out), width), (width, 1))
        scaled_product(rows, head, out.dtype, out=whole)
        return out
    return out.copy_(scaled_product(rows, head, out.dtype)[:, : out.shape[1]])


def _given(_probability: Tensor, weights: Tensor, _sizes: Sequence[int], _alpha: float) -> Tensor:
    return weights


def _dpace(probability: Tensor, _weights: Tensor, sizes: Sequence[int], alpha: float) -> Tensor:
    return dpace_weights(probability, sizes, alpha)


class Objective(NamedTuple):
    """A loss: which weights its rows get, and what it compares the drafter's distribution with."""

    weigh: Callable[[Tensor, Tensor, Sequence[int], float], Tensor]
    """(label probabilities [rows], weights [rows], rows of each block, alpha) -> weights used."""
    against_target: Callable[[Chunk, torch.dtype], tuple[Tensor, Tensor]] | None = None
    """Loss of rows against the target's distribution, as in `ops/soft_labels.py`; none: the
    cross-entropy of the labels."""


LOSSES: dict[LossKind, Objective] = {
    "ce": Objective(_given),
    "dpace": Objective(_dpace),
    "kl": Objective(_given, kl_divergence_),
    "lk": Objective(_given, negative_log_acceptance_),
}


def needs_teacher(kind: LossKind) -> bool:
    """Does the loss need the target's last hidden state?"""
    return LOSSES[kind].against_target is not None


def check_loss(kind: str, alpha: float) -> None:
    """UserError for an unknown loss, or a D-PACE alpha outside 0..1."""
    if kind not in LOSSES:
        raise UserError(f"loss '{kind}' is unknown: use one of {list(LOSSES)}")
    if not 0 <= alpha <= 1:
        raise UserError(f"D-PACE alpha {alpha} must be from 0 to 1")


def head_products(kind: LossKind) -> int:
    """Matrix products with the head for each supervised row."""
    return 3 if needs_teacher(kind) else 2


class Teacher(NamedTuple):
    """The target's distribution for each supervised row, before its final norm and the head."""

    hidden: Tensor
    """[T, H] in the drafter's dtype: outputs of the target's last decoder layer, not normed."""
    rows: Tensor
    """int64 [R]: which of them predicts the row's token, that is, stands one token before it."""
    norm: Callable[[Tensor], Tensor]
    """The target's final norm."""

    def logits(self, rows: slice, head_weight: Tensor, out: Tensor) -> Tensor:
        """The target's logits for some of the supervised rows, in `out` fp32 [rows, V]."""
        normed = self.norm(self.hidden.index_select(0, self.rows[rows]))
        return head_logits(normed, head_weight, out)


def workspace_bytes(
    kind: LossKind, chunk_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Largest memory of a chunk's fp32 logits and of what is made of them, for hidden in dtype."""
    sides = 2 if needs_teacher(kind) else 1
    # The plain path has a temporary beside them, or the gradient in the dtype of hidden.
    temporary = 0 if by_kernel(device) and dtype == torch.bfloat16 else 1
    return chunk_rows * vocab_size * 4 * (sides + temporary)


class _Options(NamedTuple):
    rows_per_block: Sequence[int]
    kind: LossKind
    alpha: float
    chunk_rows: int
    logits_dtype: torch.dtype
    teacher: Teacher | None
    head_fp8: Quantised | None


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
        weigh, against_target = LOSSES[options.kind]
        stats = new_statistics(R, hidden.device)
        used, loss = torch.empty((2, R), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        chunks = list(chunk_bounds(options.rows_per_block, options.chunk_rows))
        most = max((end - start for start, end, _ in chunks), default=0)

        own, theirs = (
            logits_buffer(most if wanted else 0, V, options.logits_dtype, hidden.device)
            for wanted in (True, against_target)
        )
        for start, end, sizes in chunks:
            rows = slice(start, end)
            if options.head_fp8 is None:
                logits = head_logits(hidden[rows], head_weight, own[: end - start])
            else:
                logits = fp8_logits(hidden[rows], options.head_fp8, own[: end - start])
            label, part = labels[rows], Statistics(*(x[rows] for x in stats))
            vocabulary_statistics(logits, label, part)
            loss[rows] = part.lse - part.at_label
            probability = loss[rows].neg().exp()
            used[rows] = weigh(probability, weights[rows], sizes, options.alpha)
            if against_target is not None:
                assert options.teacher is not None
                teacher = options.teacher.logits(rows, head_weight, theirs[: end - start])
                chunk = Chunk(logits, part.lse, teacher, row_lse(teacher), used[rows])
                loss[rows], grad = against_target(chunk, hidden.dtype)
            elif grad_hidden is not None:
                grad = vocabulary_gradient_(logits, label, part, used[rows], hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, head_weight, out=grad_hidden[rows])
        ctx.save_for_backward(grad_hidden)
        cross_entropy = stats.lse - stats.at_label
        others = (used.sum(), cross_entropy, cross_entropy.neg().exp(), *stats[2:])
        ctx.mark_non_differentiable(*others)
        return (used * loss).sum(), *others

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
    teacher: Teacher | None = None,
    head_fp8: Quantised | None = None,
) -> LossOutput:
    """The weighted loss of the supervised rows, chunk by chunk; `LOSSES` names the kinds.

    hidden [R, H] and head_weight [V, H] in one dtype (fp32, or bf16 with fp32 softmax), labels
    int64 [R] in 0..V-1, weights fp32 [R].
    "ce": cross-entropy of the labels. "dpace": the same, but with its own weights, detached, from
    the label probabilities of each block, `rows_per_block` (host integers that sum to R) rows at a
    time. "kl": KL divergence of the drafter's from the target's distribution. "lk": minus the log
    of the rate at which the target accepts the drafter's samples. The last two need the `teacher`.
    Logits of more than `chunk_rows` rows never exist, unless one block has more; they are kept in
    `logits_dtype`, fp32 or, without a teacher, the dtype of hidden. With `head_fp8`, of
    `quantised_head`, they are an FP8 product of bf16 rows, kept in bf16, and their gradient goes
    through `head_weight` all the same. UserError for an unknown kind, alpha outside 0..1 or
    chunk_rows below 1.
    """
    check_loss(kind, alpha)
    if needs_teacher(kind) != (teacher is not None):
        has = "needs" if needs_teacher(kind) else "takes no"
        raise ValueError(f"loss '{kind}' {has} teacher")
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
    if logits_dtype not in (torch.float32, hidden.dtype if teacher is None else torch.float32):
        raise ValueError(f"logits in {logits_dtype}: expected fp32 or hidden's {hidden.dtype}")
    if head_fp8 is not None:
        if hidden.dtype != torch.bfloat16 or teacher is not None:
            raise ValueError(f"an FP8 head needs bf16 rows and no teacher, got {hidden.dtype}")
        logits_dtype = hidden.dtype
    options = _Options(
        tuple(rows_per_block), kind, alpha, chunk_rows, logits_dtype, teacher, head_fp8
    )
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
