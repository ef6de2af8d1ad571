"""Losses of a row against the target's distribution, with the gradient over the drafter's logits.

R rows of V fp32 logits on either side, at the same row_stride (a multiple of 16). Gradients of 16
bits replace the drafter's logits as in vocabulary.py, whose argument for it holds here too: a
barrier stands between a tile's reads and its writes. p_d and p_t: softmax of drafter and target.
"""

import triton
import triton.language as tl

from dflash_kernels.vocabulary import LOG2_E


@triton.jit
def _log_p(logits, tile, inside, lse, V, TILE: tl.constexpr, FULL: tl.constexpr):
    """A tile's log-probabilities [TILE] in base 2; what is behind V has probability 0."""
    column = tile * TILE + inside
    if FULL:
        return tl.load(logits + column) * LOG2_E - lse
    return tl.load(logits + column, mask=column < V, other=-1e30) * LOG2_E - lse


@triton.jit
def _store(grad, tile, inside, value, V, TILE: tl.constexpr, FULL: tl.constexpr):
    column = tile * TILE + inside
    if FULL:
        tl.store(grad + column, value.to(grad.dtype.element_ty))
    else:
        tl.store(grad + column, value.to(grad.dtype.element_ty), mask=column < V)


@triton.jit
def _kl_tile(
    logits, teacher, grad, tile, inside, lse, teacher_lse, weight, V, TILE: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Store a tile's gradient; returns its terms of the divergence in base 2, [TILE]."""
    log_d = _log_p(logits, tile, inside, lse, V, TILE, FULL)
    log_t = _log_p(teacher, tile, inside, teacher_lse, V, TILE, FULL)
    tl.debug_barrier()
    p_t = tl.exp2(log_t)
    _store(grad, tile, inside, weight * (tl.exp2(log_d) - p_t), V, TILE, FULL)
    return tl.where(p_t > 0, p_t * (log_t - log_d), 0.0)


@triton.jit
def vocabulary_kl_kernel(
    logits_ptr,
    teacher_ptr,
    grad_ptr,
    lse_ptr,
    teacher_lse_ptr,
    weights_ptr,
    loss_ptr,
    row_stride,
    V,
    TILE: tl.constexpr,
):
    """KL(p_t || p_d) of a row, and weight * (p_d - p_t) over its logits, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    logits, teacher = logits_ptr + row * row_stride, teacher_ptr + row * row_stride
    grad = grad_ptr + row * row_stride * 2
    lse, teacher_lse = tl.load(lse_ptr + row) * LOG2_E, tl.load(teacher_lse_ptr + row) * LOG2_E
    weight, inside = tl.load(weights_ptr + row), tl.arange(0, TILE)
    terms = tl.zeros([TILE], tl.float32)
    full = V // TILE
    for tile in range(full):
        terms += _kl_tile(
            logits, teacher, grad, tile, inside, lse, teacher_lse, weight, V, TILE, True
        )
    if full * TILE < V:
        terms += _kl_tile(
            logits, teacher, grad, full, inside, lse, teacher_lse, weight, V, TILE, False
        )
    tl.store(loss_ptr + row, tl.sum(terms, 0) / LOG2_E)


@triton.jit
def _probabilities(
    logits, teacher, tile, inside, lse, teacher_lse, V, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    p_d = tl.exp2(_log_p(logits, tile, inside, lse, V, TILE, FULL))
    return p_d, tl.exp2(_log_p(teacher, tile, inside, teacher_lse, V, TILE, FULL))


@triton.jit
def vocabulary_lk_kernel(
    logits_ptr,
    teacher_ptr,
    grad_ptr,
    lse_ptr,
    teacher_lse_ptr,
    weights_ptr,
    loss_ptr,
    row_stride,
    V,
    TILE: tl.constexpr,
):
    """-log sum min(p_t, p_d) of a row, then weight times its gradient over the logits.

    The first pass sums what the second needs: the overlap, and p_d where it lacks.
    """
    row = tl.program_id(0).to(tl.int64)
    logits, teacher = logits_ptr + row * row_stride, teacher_ptr + row * row_stride
    grad = grad_ptr + row * row_stride * 2
    lse, teacher_lse = tl.load(lse_ptr + row) * LOG2_E, tl.load(teacher_lse_ptr + row) * LOG2_E
    weight, inside = tl.load(weights_ptr + row), tl.arange(0, TILE)
    overlap, lacking = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    full = V // TILE
    for tile in range(full):
        p_d, p_t = _probabilities(logits, teacher, tile, inside, lse, teacher_lse, V, TILE, True)
        overlap += tl.minimum(p_d, p_t)
        lacking += tl.where(p_d < p_t, p_d, 0.0)
    if full * TILE < V:
        p_d, p_t = _probabilities(logits, teacher, full, inside, lse, teacher_lse, V, TILE, False)
        overlap += tl.minimum(p_d, p_t)
        lacking += tl.where(p_d < p_t, p_d, 0.0)
    accepted = tl.maximum(tl.sum(overlap, 0), 1.1754944e-38)  # as in ops/soft_labels.py
    scale, share = weight / accepted, tl.sum(lacking, 0)
    tl.store(loss_ptr + row, -tl.log2(accepted) / LOG2_E)
    for tile in range(full):
        p_d, p_t = _probabilities(logits, teacher, tile, inside, lse, teacher_lse, V, TILE, True)
        tl.debug_barrier()
        value = p_d * scale * tl.where(p_d < p_t, share - 1.0, share)
        _store(grad, tile, inside, value, V, TILE, True)
    if full * TILE < V:
        p_d, p_t = _probabilities(logits, teacher, full, inside, lse, teacher_lse, V, TILE, False)
        tl.debug_barrier()
        value = p_d * scale * tl.where(p_d < p_t, share - 1.0, share)
        _store(grad, full, inside, value, V, TILE, False)
