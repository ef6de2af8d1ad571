"""SwiGLU forward and backward, element by element; formulas in dflash_ext/ops/swiglu.py.

A program does BLOCK columns of one row. Everything of a tile is read before any of it is written,
by the same threads, so outputs may lie exactly over inputs.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(width, BLOCK: tl.constexpr):
    """Row (int64), columns and which of them are real, of this program."""
    tiles = tl.cdiv(width, BLOCK)
    program = tl.program_id(0)
    row = program // tiles
    cols = (program - row * tiles) * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), cols, cols < width


@triton.jit
def swiglu_fwd_kernel(
    gate_ptr, up_ptr, out_ptr, gate_row, up_row, out_row, width, BLOCK: tl.constexpr
):
    row, cols, inside = _tile(width, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + cols, mask=inside, other=0.0).to(tl.float32)
    act = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_row + cols, act.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd_kernel(
    gate_ptr,
    up_ptr,
    dact_ptr,
    dgate_ptr,
    dup_ptr,
    act_ptr,
    gate_row,
    up_row,
    dact_row,
    dgate_row,
    dup_row,
    act_row,
    width,
    want_act,
    BLOCK: tl.constexpr,
):
    row, cols, inside = _tile(width, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + cols, mask=inside, other=0.0).to(tl.float32)
    dact = tl.load(dact_ptr + row * dact_row + cols, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    dgate = dact * up * (s + silu * (1.0 - s))
    dup = dact * silu
    element = dgate_ptr.dtype.element_ty
    tl.store(dgate_ptr + row * dgate_row + cols, dgate.to(element), mask=inside)
    tl.store(dup_ptr + row * dup_row + cols, dup.to(element), mask=inside)
    act = (silu * up).to(element)
    tl.store(act_ptr + row * act_row + cols, act, mask=inside & (want_act != 0))
