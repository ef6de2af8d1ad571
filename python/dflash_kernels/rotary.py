"""Per-head RMSNorm and half rotation, forward and backward; formulas in dflash_ext/ops/rotary.py.

A tile is ROWS rows of one head, in halves [ROWS, D/2]: 16 bytes of either half a thread. A work
item is such a tile for each of `group` heads in turn, so that the rows' cosines and sines, twice as
wide as the activations, are read once for all of them.
"""

import triton
import triton.language as tl


@triton.jit
def _item(
    item, rows, heads, group, cos_ptr, sin_ptr, table_row, D: tl.constexpr, ROWS: tl.constexpr
):
    """Rows (int64) of a work item, which of them are real, its heads [from, to), their tables."""
    groups = tl.cdiv(heads, group)
    tile = item // groups
    head = (item - tile * groups) * group
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    at = row[:, None] * table_row + tl.arange(0, D // 2)[None]
    cos = tl.load(cos_ptr + at, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + at, mask=inside, other=0.0)
    return row[:, None], inside, head, tl.minimum(head + group, heads), cos, sin


@triton.jit
def head_norm_rope_fwd_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_row,
    x_head,
    out_row,
    out_head,
    table_row,
    rows,
    heads,
    group,
    normed,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One work item a program. normed = 0: rotation alone; the weight is not read."""
    row, inside, head, end, cos, sin = _item(
        tl.program_id(0), rows, heads, group, cos_ptr, sin_ptr, table_row, D, ROWS
    )
    i = tl.arange(0, D // 2)
    has_weight = (i >= 0) & (normed != 0)
    w_low = tl.load(weight_ptr + i, mask=has_weight, other=1.0)[None]
    w_high = tl.load(weight_ptr + D // 2 + i, mask=has_weight, other=1.0)[None]
    x_at = x_ptr + row * x_row + i[None]
    out_at = out_ptr + row * out_row + i[None]
    for h in range(head, end):
        at = x_at + tl.cast(h, tl.int64) * x_head
        low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(low * low + high * high, 1) / D + eps)[:, None]
        r = tl.where(normed != 0, r, 1.0)
        low = low * r * w_low
        high = high * r * w_high
        at = out_at + tl.cast(h, tl.int64) * out_head
        element = out_ptr.dtype.element_ty
        tl.store(at, (low * cos - high * sin).to(element), mask=inside)
        tl.store(at + D // 2, (high * cos + low * sin).to(element), mask=inside)


@triton.jit
def head_norm_rope_bwd_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    grad_ptr,
    dx_ptr,
    partial_ptr,
    x_row,
    x_head,
    grad_row,
    grad_head,
    dx_row,
    dx_head,
    table_row,
    rows,
    heads,
    group,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every n-th work item a program; its part of dweight into partial [n, D]."""
    i = tl.arange(0, D // 2)
    w_low = tl.load(weight_ptr + i)[None]
    w_high = tl.load(weight_ptr + D // 2 + i)[None]
    dw_low = tl.zeros([ROWS, D // 2], tl.float32)
    dw_high = tl.zeros([ROWS, D // 2], tl.float32)
    items = tl.cdiv(rows, ROWS) * tl.cdiv(heads, group)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        row, inside, head, end, cos, sin = _item(
            item, rows, heads, group, cos_ptr, sin_ptr, table_row, D, ROWS
        )
        x_at = x_ptr + row * x_row + i[None]
        grad_at = grad_ptr + row * grad_row + i[None]
        dx_at = dx_ptr + row * dx_row + i[None]
        for h in tl.range(head, end, num_stages=STAGES):
            at = x_at + tl.cast(h, tl.int64) * x_head
            low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
            at = grad_at + tl.cast(h, tl.int64) * grad_head
            y_low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            y_high = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
            g_low = y_low * cos + y_high * sin
            g_high = y_high * cos - y_low * sin
            gw_low = g_low * w_low
            gw_high = g_high * w_high
            pairs = tl.join(low * low + high * high, gw_low * low + gw_high * high)
            squares, products = tl.split(tl.sum(pairs, 1))
            r = tl.rsqrt(squares / D + eps)[:, None]
            mean = r * products[:, None] / D
            low *= r
            high *= r
            dw_low += g_low * low
            dw_high += g_high * high
            at = dx_at + tl.cast(h, tl.int64) * dx_head
            element = dx_ptr.dtype.element_ty
            tl.store(at, (r * (gw_low - low * mean)).to(element), mask=inside)
            tl.store(at + D // 2, (r * (gw_high - high * mean)).to(element), mask=inside)
    partial_at = partial_ptr + tl.program_id(0).to(tl.int64) * D + i
    tl.store(partial_at, tl.sum(dw_low, 0))
    tl.store(partial_at + D // 2, tl.sum(dw_high, 0))
