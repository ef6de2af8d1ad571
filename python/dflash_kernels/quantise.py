"""Rows to FP8 (E4M3) with one scale a row, SwiGLU before it where asked for.

Formulas in dflash_ext/ops/quantise.py. A program does one row, twice over: its largest value first,
then its numbers. The second visit finds the row in L1 or L2, so memory is read once.
"""

import triton
import triton.language as tl

# Largest finite E4M3 number.
TOP = tl.constexpr(448.0)


@triton.jit
def _values(x_at, up_at, cols, width, gated):
    inside = cols < width
    x = tl.load(x_at + cols, mask=inside, other=0.0).to(tl.float32)
    if gated:
        x *= tl.sigmoid(x) * tl.load(up_at + cols, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def quantise_rows_kernel(
    x_ptr,
    up_ptr,
    out_ptr,
    scale_ptr,
    x_row,
    up_row,
    out_row,
    width,
    gated,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x_at = x_ptr + row * x_row
    up_at = up_ptr + row * up_row
    cols = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        top = tl.maximum(top, tl.abs(_values(x_at, up_at, first + cols, width, gated)))
    largest = tl.max(top, 0)
    scale = tl.where(largest > 0.0, largest / TOP, 1.0)  # a row of zeros stays one
    tl.store(scale_ptr + row, scale)
    for first in range(0, width, BLOCK):
        x = _values(x_at, up_at, first + cols, width, gated) / scale
        at = out_ptr + row * out_row + first + cols
        tl.store(at, x.to(out_ptr.dtype.element_ty), mask=first + cols < width)
