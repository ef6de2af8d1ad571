"""Between the two matrix products of the vocabulary loss: a row's statistics, and its gradient.

R rows of V logits in fp32 or bf16. Rows lie `row_stride` elements apart, a multiple of 16, so every
tile starts on 16 bytes whatever V is; nothing behind column V is read or written. Offsets of rows
are 64-bit: at V = 151,936 the 14,135th row starts behind 2^31.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below every logit, yet finite: -inf - -inf would be NaN.
LOWEST = tl.constexpr(-1e38)


@triton.jit
def _fold(x, tile, at_label, high, first, total, above):
    """Take a tile of logits [U, C] into the running values [C] of its columns.

    high: largest logit; first: the tile it came from, the lowest on ties; total: sum of
    2^(x * log2(e) - high * log2(e)), with the rounded second product; above: logits larger than
    the label's.
    """
    peak = tl.maximum(high, tl.max(x, 0))
    first = tl.where(peak > high, tile, first)
    scaled = peak * LOG2_E
    # Only where it changes: the difference is one fused multiply-add, which sees the rounding of
    # `scaled` (half an ulp), so that between equal peaks it is not 0. It would add up over the
    # tiles, and it is infinite in columns that have seen no logit.
    total = tl.where(peak > high, total * tl.exp2(high * LOG2_E - scaled), total)
    total += tl.sum(tl.exp2(x * LOG2_E - scaled[None, :]), 0)
    above += tl.sum(tl.where(x > at_label, 1.0, 0.0), 0)
    return peak, first, total, above


@triton.jit
def vocabulary_statistics_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    at_label_ptr,
    prediction_ptr,
    rank_ptr,
    row_stride,
    V,
    C: tl.constexpr,
    U: tl.constexpr,
    STAGES: tl.constexpr,
):
    """lse, the label's logit, argmax (lowest index on ties) and the label's rank, one pass.

    A program per row. A tile is U x C consecutive logits as a matrix whose columns never leave
    their thread, so a tile costs no exchange between threads; they meet once, at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    at_label = tl.load(logits + tl.load(labels_ptr + row)).to(tl.float32)
    inside = tl.arange(0, U)[:, None] * C + tl.arange(0, C)[None, :]
    high = tl.full([C], LOWEST, tl.float32)
    first = tl.zeros([C], tl.int32)
    total = tl.zeros([C], tl.float32)
    above = tl.zeros([C], tl.float32)  # a compare gives 1.0 at once, and counts stay exact
    full = V // (U * C)
    for tile in tl.range(0, full, num_stages=STAGES):
        x = tl.load(logits + tile * (U * C) + inside).to(tl.float32)
        high, first, total, above = _fold(x, tile, at_label, high, first, total, above)
    if full * (U * C) < V:  # a mask on every tile would split its loads into single elements
        column = full * (U * C) + inside
        x = tl.load(logits + column, mask=column < V, other=float("-inf")).to(tl.float32)
        high, first, total, above = _fold(x, full, at_label, high, first, total, above)
    peak = tl.max(high, 0)
    scaled = peak * LOG2_E
    whole = tl.sum(tl.where(high == peak, total, total * tl.exp2(high * LOG2_E - scaled)), 0)
    lse = (scaled + tl.log2(whole)) * LN_2
    # Where in its tile a column's largest logit was is looked up for the columns that hold it.
    column = first[None, :] * (U * C) + inside
    candidate = (high == peak)[None, :] & (column < V)
    again = tl.load(logits + column, mask=candidate, other=float("-inf")).to(tl.float32)
    found = tl.where(candidate & (again == peak), column, V - 1)  # V - 1 if all are NaN
    tl.store(lse_ptr + row, lse)
    tl.store(at_label_ptr + row, at_label)
    tl.store(prediction_ptr + row, tl.min(tl.min(found, 1), 0).to(tl.int64))
    tl.store(rank_ptr + row, tl.sum(above.to(tl.int32), 0).to(tl.int64))


@triton.jit
def vocabulary_gradient_kernel(
    logits_ptr,
    grad_ptr,
    labels_ptr,
    lse_ptr,
    at_label_ptr,
    weights_ptr,
    row_stride,
    V,
    TILE: tl.constexpr,
):
    """weight * (softmax - onehot) of a row, over its own logits. grad_ptr is logits_ptr.

    Gradients have 16 bits. Over bf16 logits tile t replaces tile t. Over fp32 logits it takes the
    bytes of logits [t/2 * TILE, (t+1)/2 * TILE): for t > 0 they end at or before t * TILE, for
    t = 0 inside tile 0. So a tile's writes touch only tiles up to its own, and the barrier between
    a tile's reads and its writes has every warp's reads of these done, also those of warps that
    run behind. Programs share no row.
    """
    WIDER: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth // 16
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_stride
    grad = grad_ptr + row * row_stride * WIDER
    label = tl.load(labels_ptr + row)
    lse = tl.load(lse_ptr + row) * LOG2_E
    at_label = tl.load(at_label_ptr + row) * LOG2_E
    weight = tl.load(weights_ptr + row)
    inside = tl.arange(0, TILE)
    full = V // TILE
    for tile in range(full):
        column = tile * TILE + inside
        x = tl.load(logits + column).to(tl.float32)
        tl.debug_barrier()
        value = weight * tl.exp2(x * LOG2_E - lse)
        tl.store(grad + column, value.to(grad_ptr.dtype.element_ty))
    if full * TILE < V:
        column = full * TILE + inside
        x = tl.load(logits + column, mask=column < V, other=0.0).to(tl.float32)
        tl.debug_barrier()
        value = weight * tl.exp2(x * LOG2_E - lse)
        tl.store(grad + column, value.to(grad_ptr.dtype.element_ty), mask=column < V)
    tl.debug_barrier()
    at = weight * (tl.exp2(at_label - lse) - 1.0)
    tl.store(grad + label, at.to(grad_ptr.dtype.element_ty))
