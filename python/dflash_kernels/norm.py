"""RMSNorm of rows, forward and backward; formulas in dflash_ext/ops/norm.py.

A whole row, [BLOCK] columns of which `width` are real, lies in the registers of one program, so it
is read once. `add`, `add_total` and `want_normed` switch operands at run time: a masked-out copy
moves nothing, and one image serves the norm, the norm of a sum and both backwards.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_row,
    residual_row,
    out_row,
    total_row,
    width,
    add,
    eps,
    BLOCK: tl.constexpr,
):
    """One row a program: out = norm(x), or out = norm(total) of total = x + residual."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    adding = inside & (add != 0)
    x = tl.load(x_ptr + row * x_row + cols, mask=inside, other=0.0)
    r = tl.load(residual_ptr + row * residual_row + cols, mask=adding, other=0.0)
    total = (x.to(tl.float32) + r.to(tl.float32)).to(x_ptr.dtype.element_ty)
    tl.store(total_ptr + row * total_row + cols, total, mask=adding)
    n = total.to(tl.float32)
    n *= tl.rsqrt(tl.sum(n * n) * (1.0 / width) + eps)
    n *= tl.load(weight_ptr + cols, mask=inside, other=0.0)
    tl.store(out_ptr + row * out_row + cols, n.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_bwd_kernel(
    x_ptr,
    weight_ptr,
    grad_ptr,
    grad_total_ptr,
    dx_ptr,
    normed_ptr,
    partial_ptr,
    x_row,
    grad_row,
    grad_total_row,
    dx_row,
    normed_row,
    width,
    rows,
    add_total,
    want_normed,
    eps,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx of every n-th row a program; its rows' part of dweight into partial [n, width].

    A row's reduction is a barrier and few programs fit a multiprocessor, so the next rows are
    copied into shared memory meanwhile.
    """
    first = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    dweight = tl.zeros([BLOCK], tl.float32)
    inverse = 1.0 / width
    for i in tl.range(first, rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(i, tl.int64)
        x = tl.load(x_ptr + row * x_row + cols, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_ptr + row * grad_row + cols, mask=inside, other=0.0).to(tl.float32)
        adding = inside & (add_total != 0)
        t = tl.load(grad_total_ptr + row * grad_total_row + cols, mask=adding, other=0.0)
        gw = g * weight
        squares, products = tl.split(tl.sum(tl.join(x * x, gw * x), 0))
        r = tl.rsqrt(squares * inverse + eps)
        n = x * r
        dweight += g * n
        d = r * (gw - n * (r * products * inverse)) + t.to(tl.float32)
        tl.store(dx_ptr + row * dx_row + cols, d.to(dx_ptr.dtype.element_ty), mask=inside)
        if want_normed != 0:
            y = (n * weight).to(normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + row * normed_row + cols, y, mask=inside)
    tl.store(partial_ptr + first.to(tl.int64) * width + cols, dweight, mask=inside)
