"""RMSNorm of rows, alone or of the sum of two that is kept as well (the residual stream).

Shapes: [rows, H]. With r = (mean(x^2) + eps)^-1/2 and n = x r, the norm is y = n w; a gradient g of
y gives dx = r (g w - n mean(g w n)) and dw = sum over rows of g n (Zhang and Sennrich, 2019, by
the chain rule). Nothing but x is saved: r costs one sum in a visit that reads x anyway.

`rms_norm` and `add_rms_norm` are differentiable; the functions below them are the same passes
without autograd, for a caller that decides itself what to keep, where to write and what to compute
again. Naive references at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_ext import _C
from dflash_ext.ops import rows

# Widest row of each compiled kernel -> programs of its backward that a multiprocessor holds.
BLOCKS = {4096: 2, 8192: 1}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (mean(x^2) + eps)^-1/2 weight, [rows, H] in the dtype of x.

    x [rows, H], fp32 or bf16, row stride free; weight fp32 [H]; arithmetic in fp32, rounded once.
    Differentiable once, in x and weight (gradient fp32, summed in a fixed order).
    On CUDA bf16: H a multiple of 8, at most 8192. ValueError names what is supported.
    """
    return _RmsNorm.apply(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) of total = x + residual, both [rows, H] in the dtype of x.

    The sum is rounded to the dtype before it is normed, as if it had been stored and read again.
    Otherwise as `rms_norm`; differentiable once, in x, residual and weight.
    """
    return _AddRmsNorm.apply(x, residual, weight, eps)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`rms_norm` without autograd, into `out` [rows, H] if given (it may be x)."""
    _check(x, weight, eps)
    if not rows.has_kernels(x):
        return rows.written("out", out, _normed(x, weight, eps), x)
    out = rows.given_or_new("out", out, x)
    _launch_forward(x, None, weight, eps, out, out)
    return out


def add_rms_norm_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` without autograd, into `out` and `total` if given (each may be an input)."""
    _check(x, weight, eps)
    rows.check_rows("residual", residual, tuple(x.shape), x)
    if not rows.has_kernels(x):
        total = rows.written("total", total, x + residual, x)
        return rows.written("out", out, _normed(total, weight, eps), x), total
    out, total = rows.given_or_new("out", out, x), rows.given_or_new("total", total, x)
    _launch_forward(x, residual, weight, eps, out, total)
    return out, total


def rms_norm_backward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    grad: Tensor,
    *,
    grad_total: Tensor | None = None,
    dx: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx [rows, H], dweight fp32 [H]) of a gradient `grad` [rows, H] of the norm of x.

    For `add_rms_norm` x is the kept sum, `grad_total` [rows, H] the gradient that the sum receives
    from elsewhere (added in fp32 before the one rounding), and dx the gradient of both summands.
    dx is written into `dx` if given, which may be x, grad or grad_total. The norm itself is
    written into `normed` if given: a layer that did not keep it has it back in the same visit.
    dweight is bit-reproducible.
    """
    _check(x, weight, eps)
    rows.check_rows("grad", grad, tuple(x.shape), x)
    if grad_total is not None:
        rows.check_rows("grad_total", grad_total, tuple(x.shape), x)
    dx = rows.given_or_new("dx", dx, x)
    if normed is not None:
        rows.check_rows("normed", normed, tuple(x.shape), x)
    backward = _launch_backward if rows.has_kernels(x) else _backward_torch
    return dx, backward(x, weight, eps, grad, grad_total, dx, normed)


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    rows.check_device_and_dtype("x", x)
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}, expected [rows, H]")
    rows.check_rows("x", x, tuple(x.shape), x)
    rows.check_weight(weight, x.shape[1], x)
    rows.check_eps(eps)
    if rows.has_kernels(x) and x.shape[1] > max(BLOCKS):
        raise ValueError(f"H {x.shape[1]} is not supported on CUDA in bf16: at most {max(BLOCKS)}")


def _block(x: Tensor) -> int:
    return min(block for block in BLOCKS if block >= x.shape[1])


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor
) -> None:
    """Without a residual, nothing is written into `total`."""
    kernel = getattr(_C, f"rms_norm_fwd_{_block(x)}")
    kernel(
        **rows.place(x),
        **rows.operands(x=x, residual=x if residual is None else residual, out=out, total=total),
        weight_ptr=weight.data_ptr(),
        width=x.shape[1],
        rows=x.shape[0],
        add=int(residual is not None),
        eps=eps,
    )


def _launch_backward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    grad: Tensor,
    grad_total: Tensor | None,
    dx: Tensor,
    normed: Tensor | None,
) -> Tensor:
    """Returns dweight: the sum over one row of `partial` a program, which torch adds in order."""
    count, H = x.shape
    programs = min(count, rows.resident_programs(x, BLOCKS[_block(x)]))
    partial = weight.new_empty(programs, H)
    kernel = getattr(_C, f"rms_norm_bwd_{_block(x)}")
    kernel(
        **rows.place(x),
        **rows.operands(
            x=x,
            grad=grad,
            grad_total=grad if grad_total is None else grad_total,
            dx=dx,
            normed=dx if normed is None else normed,
        ),
        weight_ptr=weight.data_ptr(),
        partial_ptr=partial.data_ptr(),
        width=H,
        rows=count,
        programs=programs,
        add_total=int(grad_total is not None),
        want_normed=int(normed is not None),
        eps=eps,
    )
    return partial.sum(0)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, eps)


def _backward_torch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    grad: Tensor,
    grad_total: Tensor | None,
    dx: Tensor,
    normed: Tensor | None,
) -> Tensor:
    g, n = grad.float(), x.float()
    r = torch.rsqrt(n.square().mean(-1, keepdim=True) + eps)
    n = n * r
    gn = g * n
    dweight = gn.sum(0)
    d = (g * weight).sub_(n * (gn @ weight)[:, None].div_(x.shape[1])).mul_(r)
    if grad_total is not None:
        d += grad_total
    dx.copy_(d)
    if normed is not None:
        normed.copy_(n.mul_(weight))
    return dweight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm_forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *rms_norm_backward(x, weight, ctx.eps, rows.readable(grads[0])), None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, total = add_rms_norm_forward(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        grad, grad_total = (None if g is None else rows.readable(g) for g in grads)
        if grad is None:  # the norm was not used
            return grad_total, grad_total, None, None
        d, dweight = rms_norm_backward(total, weight, ctx.eps, grad, grad_total=grad_total)
        return d, d, dweight, None


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Naive, differentiable, in the dtypes of its inputs. For tests."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Naive, differentiable, in the dtypes of its inputs. For tests."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total
