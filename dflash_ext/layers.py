"""Parameters that are fp32 masters and compute in the dtype of the rows they are given.

Products are fused with what stands before and after them: a residual is added by the product
itself, and what is cheap to compute again (a norm, an activation) is not kept for the backward.
Gradients of masters are the fp32 sums of the products, never rounded to bf16.
Shapes: M rows, I columns in, O columns out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dflash_ext.ops.norm import rms_norm, rms_norm_backward, rms_norm_forward
from dflash_ext.ops.rows import readable
from dflash_ext.ops.swiglu import swiglu_backward, swiglu_forward


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension of x [M, H]; the arithmetic is fp32 whatever its dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """nn.Linear whose master is cast to the dtype of x [M, I]."""

    _cast: Tensor | None = None
    _keeps_cast = False

    def cast(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] in `dtype`, without a gradient."""
        weight = self.weight.detach()
        if weight.dtype == dtype:
            return weight
        cast = self._cast
        if cast is None or cast.dtype != dtype:
            cast = weight.to(dtype)
        self._cast = cast if self._keeps_cast else None
        return cast

    def masters(self) -> tuple[Tensor, Tensor | None]:
        """What gradients go to: weight and bias."""
        return self.weight, self.bias

    def product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[residual +] x weight^T [+ bias], without a gradient."""
        weight = self.cast(x.dtype)
        out = x @ weight.T if residual is None else torch.addmm(residual, x, weight.T)
        return out if self.bias is None else out.add_(self.bias.detach().to(out.dtype))

    def input_gradient(self, grad: Tensor) -> Tensor:
        """[M, I] of grad [M, O]; the weight has not changed since the forward."""
        return grad @ self.cast(grad.dtype)

    def gradients(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """fp32 gradients of the masters, of grad [M, O] and x [M, I]."""
        if grad.is_cuda and grad.dtype == torch.bfloat16:
            weight = torch.mm(grad.T, x, out_dtype=torch.float32)
        else:
            weight = (grad.T @ x).float()
        return weight, None if self.bias is None else grad.sum(0, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return linears(x, [self])[0]


@contextmanager
def fixed_weights(model: nn.Module) -> Iterator[None]:
    """Within: no weight of `model` changes, so each is cast once, however many forwards there are.

    The casts are dropped at the end.
    """
    layers = _linears_of(model)
    for layer in layers:
        layer._keeps_cast = True
    try:
        yield
    finally:
        for layer in layers:
            layer._keeps_cast, layer._cast = False, None


def let_casts_go(model: nn.Module) -> None:
    """Within `fixed_weights`: from now on each cast is dropped when it is used.

    For the last forward and its backward, which casts again: 1.5 ms for a billion parameters on an
    H200, while memory at its fullest, in the loss, is without their 2 GB.
    """
    for layer in _linears_of(model):
        layer._keeps_cast = False


def _linears_of(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Sequence[Linear], *_: Any) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.layers = layers
        return tuple(layer.product(x) for layer in layers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        grad_x = _input_gradient(grads, ctx.layers) if ctx.needs_input_grad[0] else None
        return (grad_x, None, *_master_gradients(ctx.layers, grads, x))


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: RMSNorm, layers: Sequence[Linear], norm_weight: Tensor, *_: Any
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, norm_weight)
        ctx.eps, ctx.layers = norm.eps, layers
        rows = rms_norm_forward(x, norm_weight, norm.eps)
        return (x, *(layer.product(rows) for layer in layers))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, passed: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        x, norm_weight = ctx.saved_tensors
        grad_rows, rows = _input_gradient(grads, ctx.layers), torch.empty_like(x)
        # One visit of x gives its gradient, that of the residual included, and the norm again.
        grad_x, grad_norm = rms_norm_backward(
            x,
            norm_weight,
            ctx.eps,
            grad_rows,
            grad_total=readable(passed),
            dx=grad_rows,
            normed=rows,
        )
        return (grad_x, None, None, grad_norm, *_master_gradients(ctx.layers, grads, rows))


class _LinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, layer: Linear, *_: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer.product(x, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return (ctx.layer.input_gradient(grad), grad, None, *ctx.layer.gradients(grad, x))


class _SwigluLinearAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, residual: Tensor, layer: Linear, *_: Any
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.layer = layer
        return layer.product(swiglu_forward(gate, up), residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        # The gradient of the activation, then the activation itself.
        work = ctx.layer.input_gradient(grad)
        grad_gate, grad_up = swiglu_backward(gate, up, work, act=work)
        return (grad_gate, grad_up, grad, None, *ctx.layer.gradients(grad, work))


def _input_gradient(grads: Sequence[Tensor], layers: Sequence[Linear]) -> Tensor:
    """sum of grad weight over the layers, [M, I]."""
    total = layers[0].input_gradient(grads[0])
    for grad, layer in zip(grads[1:], layers[1:]):
        torch.addmm(total, grad, layer.cast(grad.dtype), out=total)
    return total


def _master_gradients(
    layers: Sequence[Linear], grads: Sequence[Tensor], x: Tensor
) -> list[Tensor | None]:
    return [g for layer, grad in zip(layers, grads) for g in layer.gradients(grad, x)]


def _masters(layers: Sequence[Linear]) -> list[Tensor | None]:
    return [master for layer in layers for master in layer.masters()]


def linears(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    """x W^T (+ bias) of each layer, [M, O] each, of x [M, I]. Differentiable once, as all here."""
    return _Linears.apply(x, layers, *_masters(layers))


def norm_linears(x: Tensor, norm: RMSNorm, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    """x itself, then norm(x) W^T (+ bias) of each layer, of x [M, I].

    Take the residual from the x returned: its gradient then joins that of the norm in one pass.
    Keeps x alone.
    """
    return _NormLinears.apply(x, norm, layers, norm.weight, *_masters(layers))


def linear_add(x: Tensor, layer: Linear, residual: Tensor) -> Tensor:
    """residual [M, O] + x W^T (+ bias), of x [M, I]."""
    return _LinearAdd.apply(x, residual, layer, *layer.masters())


def swiglu_linear_add(gate: Tensor, up: Tensor, layer: Linear, residual: Tensor) -> Tensor:
    """residual [M, O] + (silu(gate) * up) W^T (+ bias), of gate and up [M, I]; keeps these two."""
    return _SwigluLinearAdd.apply(gate, up, residual, layer, *layer.masters())
