"""SwiGLU: act = silu(gate) * up, element by element (Shazeer, 2020, without its projections).

Shapes: [rows, I]. With s = 1 / (1 + exp(-gate)): act = gate s up, dup = dact gate s and
dgate = dact up s (1 + gate (1 - s)).

`swiglu` is differentiable; `swiglu_forward` and `swiglu_backward` are its passes without autograd.
The naive reference is at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_ext import _C
from dflash_ext.ops import rows


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [rows, I] in the dtype of gate.

    gate, up [rows, I], fp32 or bf16, row strides free (they may be halves of one [rows, 2 I]);
    arithmetic in fp32, rounded once. Differentiable once. On CUDA bf16: I a multiple of 8.
    ValueError names what is supported.
    """
    return _Swiglu.apply(gate, up)


def swiglu_forward(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`swiglu` without autograd, into `out` [rows, I] if given (it may be gate or up)."""
    _check(gate, up)
    if not rows.has_kernels(gate):
        act = torch.nn.functional.silu(gate.float()).mul_(up)
        return rows.written("out", out, act, gate)
    out = rows.given_or_new("out", out, gate)
    _C.swiglu_fwd(
        **rows.place(gate),
        **rows.operands(gate=gate, up=up, out=out),
        width=gate.shape[1],
        rows=gate.shape[0],
    )
    return out


def swiglu_backward(
    gate: Tensor,
    up: Tensor,
    dact: Tensor,
    *,
    dgate: Tensor | None = None,
    dup: Tensor | None = None,
    act: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dgate, dup), each [rows, I], of a gradient `dact` [rows, I] of `swiglu(gate, up)`.

    They are written into `dgate` and `dup` if given, and the activation itself, which the weight
    gradient of the down projection needs, into `act` if given: one visit for all. Each of the
    three may be exactly one of gate, up and dact (the layer may overwrite what nothing else reads);
    otherwise no memory may overlap.
    """
    _check(gate, up)
    rows.check_rows("dact", dact, tuple(gate.shape), gate)
    dgate = rows.given_or_new("dgate", dgate, gate)
    dup = rows.given_or_new("dup", dup, gate)
    if act is not None:
        rows.check_rows("act", act, tuple(gate.shape), gate)
    if not rows.has_kernels(gate):
        _backward_torch(gate, up, dact, dgate, dup, act)
        return dgate, dup
    into = dgate if act is None else act  # written only where it is wanted
    _C.swiglu_bwd(
        **rows.place(gate),
        **rows.operands(gate=gate, up=up, dact=dact, dgate=dgate, dup=dup, act=into),
        width=gate.shape[1],
        rows=gate.shape[0],
        want_act=int(act is not None),
    )
    return dgate, dup


def _check(gate: Tensor, up: Tensor) -> None:
    rows.check_device_and_dtype("gate", gate)
    if gate.dim() != 2:
        raise ValueError(f"gate is {tuple(gate.shape)}, expected [rows, I]")
    rows.check_rows("gate", gate, tuple(gate.shape), gate)
    rows.check_rows("up", up, tuple(gate.shape), gate)


def _backward_torch(
    gate: Tensor, up: Tensor, dact: Tensor, dgate: Tensor, dup: Tensor, act: Tensor | None
) -> None:
    g, u, d = gate.float(), up.float(), dact.float()
    s = g.sigmoid()
    silu = g * s
    made_gate = d * u * (s + silu * (1 - s))
    made_up = d * silu
    if act is not None:  # everything is computed before anything is overwritten
        made_act = silu * u
        act.copy_(made_act)
    dgate.copy_(made_gate)
    dup.copy_(made_up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return swiglu_backward(gate, up, rows.readable(grads[0]))


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Naive, differentiable, in the dtype of its inputs. For tests."""
    return gate / (1 + torch.exp(-gate)) * up
