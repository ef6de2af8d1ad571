"""Losses of rows against the target's own distribution, with their gradient over the logits.

Shapes: R rows of one chunk, V vocabulary; p_t and p_d are the softmaxes of the target and the
drafter. On CUDA a kernel makes the bf16 gradient in the logits' memory and leaves the target's as
they are; else plain torch works in place on both, with at most one temporary of a chunk's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ext.ops.vocabulary import by_kernel, check_logits, launch, over


class Chunk(NamedTuple):
    """What both losses take; the logits are gone afterwards, the target's may be."""

    logits: Tensor
    """fp32 [R, V], on CUDA of `logits_buffer`: the drafter's."""
    lse: Tensor
    """fp32 [R]."""
    teacher: Tensor
    """fp32 [R, V], rows as far apart as those of `logits`: the target's."""
    teacher_lse: Tensor
    """fp32 [R]."""
    weights: Tensor
    """fp32 [R]."""


def kl_divergence_(chunk: Chunk, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """KL(p_t || p_d) = sum_v p_t log(p_t / p_d): fp32 [R], and weights * (p_d - p_t) in `dtype`."""
    return _run("vocabulary_kl", _kl, chunk, dtype)


def negative_log_acceptance_(chunk: Chunk, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """-log sum_v min(p_t, p_d): fp32 [R], and weights times its gradient in `dtype`, [R, V].

    The sum is the rate at which speculative sampling accepts a token drawn from p_d. This is the
    likelihood form of the LK losses (Samarin et al., arXiv 2602.23881), the one without a
    parameter; at a p_t of one token it is cross-entropy. With a the sum, and s the mass of p_d
    where p_d < p_t, da/dz_j = p_d[j] * ((p_d[j] < p_t[j]) - s), so the gradient is
    p_d[j] * (s - (p_d[j] < p_t[j])) / a. Where the two are equal (a kink) neither side is pushed.
    """
    return _run("vocabulary_lk", _lk, chunk, dtype)


def _run(
    kernel: str, plain: Callable[[Chunk], Tensor], chunk: Chunk, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    logits, teacher = chunk.logits, chunk.teacher
    for x in (logits, teacher):
        check_logits(x, floats=(chunk.lse, chunk.teacher_lse, chunk.weights))
    if logits.dtype != torch.float32 or teacher.dtype != torch.float32:
        raise ValueError(f"logits in {logits.dtype} and {teacher.dtype}: both must be fp32")
    if teacher.shape != logits.shape or teacher.stride() != logits.stride():
        raise ValueError(
            f"the target's logits are {tuple(teacher.shape)} with strides {teacher.stride()}, "
            f"the drafter's {tuple(logits.shape)} with {logits.stride()}: both must be the same"
        )
    if by_kernel(logits.device) and dtype == torch.bfloat16:
        loss, grad = torch.empty_like(chunk.lse), over(logits, dtype)
        launch(kernel, {**chunk._asdict(), "grad": grad, "loss": loss})
        return loss, grad
    loss = plain(chunk)
    return loss, logits.mul_(chunk.weights[:, None]).to(dtype)


def _kl(chunk: Chunk) -> Tensor:
    log_d = chunk.logits.sub_(chunk.lse[:, None])
    log_t = chunk.teacher.sub_(chunk.teacher_lse[:, None])
    p_t = log_t.exp()
    divergence = log_t.sub_(log_d).mul_(p_t).sum(1)
    log_d.exp_().sub_(p_t)
    return divergence


def _lk(chunk: Chunk) -> Tensor:
    p_d = chunk.logits.sub_(chunk.lse[:, None]).exp_()
    p_t = chunk.teacher.sub_(chunk.teacher_lse[:, None]).exp_()
    below = p_d < p_t
    # Distributions without overlap in fp32 would divide 0 by 0; the log is then cut at 87.
    accepted = torch.minimum(p_d, p_t, out=p_t).sum(1).clamp_(min=torch.finfo(torch.float32).tiny)
    lacking = torch.mul(p_d, below, out=p_t)
    share = lacking.sum(1) / accepted
    p_d.mul_(share[:, None]).sub_(lacking.div_(accepted[:, None]))
    return accepted.log_().neg_()
