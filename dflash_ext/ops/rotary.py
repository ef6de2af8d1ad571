"""Per-head RMSNorm and half (neox) rotation of queries and keys, in one visit.

Shapes: [rows, heads, D]. Every head of a row is normed over D (as norm.py, weight [D] shared by
the heads) and rotated: with z = (z_low, z_high) its halves and the row's cos, sin [D/2],
y_low = z_low cos - z_high sin, y_high = z_high cos + z_low sin. The gradient is rotated back.

The angles come from tables, computed once per batch and shared by all layers and both passes: an
angle of 131,071 needs an exact range reduction, too much to repeat for every head of every layer.

`head_norm_rope` is differentiable; `head_norm_rope_forward` and `head_norm_rope_backward` are its
passes without autograd. The naive reference is at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_ext import _C
from dflash_ext.ops import rows
from dflash_ext.ops.attention import HEAD_DIMS

# Heads that one program does in turn with one copy of the tables, and programs of the backward that
# a multiprocessor holds.
MAX_GROUP = 8
PROGRAMS = 4


class RopeTables(NamedTuple):
    cos: Tensor
    """fp32 [rows, D/2], row stride free."""
    sin: Tensor


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> RopeTables:
    """cos and sin of position / theta^(2i/D), i < D/2, of integer positions [rows], in fp32.

    The fp32 angle is as far from the exact one as the inference engines' (whose bits differ): cos
    and sin are off by up to 0.01 at position 131,071, and in proportion before.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions.float()[:, None] / theta**exponent
    return RopeTables(angle.cos(), angle.sin())


def head_norm_rope(x: Tensor, weight: Tensor, tables: RopeTables, eps: float) -> Tensor:
    """Every head of x [rows, heads, D] normed and rotated; contiguous, in the dtype of x.

    x fp32 or bf16, row and head strides free (a slice of a fused projection, or one row expanded);
    weight fp32 [D]; tables of the rows; D one of 64, 128, 256. Arithmetic in fp32, rounded once.
    Differentiable once, in x and weight (gradient fp32, summed in a fixed order). ValueError
    names what is supported.
    """
    return _HeadNormRope.apply(x, weight, *tables, eps)


def head_norm_rope_forward(
    x: Tensor, weight: Tensor, tables: RopeTables, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """`head_norm_rope` without autograd, into `out` [rows, heads, D] if given (it may be x)."""
    _check(x, weight, tables, eps)
    if not rows.has_kernels(x):
        z = torch.nn.functional.rms_norm(x.float(), weight.shape, weight, eps)
        return rows.written("out", out, _rotated(z, tables.cos, tables.sin), x)
    return _launch_forward(x, weight, tables, eps, out)


def head_rope_forward(x: Tensor, tables: RopeTables, *, out: Tensor | None = None) -> Tensor:
    """Every head of x [rows, heads, D] rotated, not normed: `head_norm_rope_forward` otherwise."""
    _check_rotation(x, tables)
    if not rows.has_kernels(x):
        return rows.written("out", out, _rotated(x.float(), tables.cos, tables.sin), x)
    return _launch_forward(x, None, tables, 1.0, out)


def head_norm_rope_backward(
    x: Tensor,
    weight: Tensor,
    tables: RopeTables,
    eps: float,
    grad: Tensor,
    *,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx [rows, heads, D], dweight fp32 [D]) of a gradient `grad` [rows, heads, D].

    dx is written into `dx` if given (a slice of the fused projection's gradient; it may be x or
    grad). The norm is computed again from x. dweight is bit-reproducible.
    """
    _check(x, weight, tables, eps)
    rows.check_rows("grad", grad, tuple(x.shape), x)
    dx = rows.given_or_new("dx", dx, x)
    backward = _launch_backward if rows.has_kernels(x) else _backward_torch
    return dx, backward(x, weight, tables, eps, grad, dx)


def _check(x: Tensor, weight: Tensor, tables: RopeTables, eps: float) -> None:
    _check_rotation(x, tables)
    rows.check_weight(weight, x.shape[2], x)
    rows.check_eps(eps)


def _check_rotation(x: Tensor, tables: RopeTables) -> None:
    rows.check_device_and_dtype("x", x)
    if x.dim() != 3 or not x.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}, expected [rows, heads, D]")
    count, _, D = x.shape
    if D not in HEAD_DIMS:
        raise ValueError(f"head_dim {D} is not supported: use one of {HEAD_DIMS}")
    rows.check_rows("x", x, tuple(x.shape), x)
    for name, table in zip(("cos", "sin"), tables):
        rows.check_rows(name, table, (count, D // 2), x, torch.float32)
        if rows.has_kernels(x):
            rows.check_alignment(name, table)
    if tables.cos.stride() != tables.sin.stride():
        raise ValueError(
            f"cos and sin have strides {tables.cos.stride()} and {tables.sin.stride()}: they must "
            "be equal"
        )


def _shared(x: Tensor, weight: Tensor, tables: RopeTables, eps: float) -> dict[str, Any]:
    """The launch arguments of both kernels: no more than MAX_GROUP heads a program, evenly."""
    count, heads, D = x.shape
    groups = -(-heads // MAX_GROUP)
    return rows.place(x, D) | {
        "weight_ptr": weight.data_ptr(),
        "cos_ptr": tables.cos.data_ptr(),
        "sin_ptr": tables.sin.data_ptr(),
        "table_row": rows.outer_strides(tables.cos)[0],
        "rows": count,
        "heads": heads,
        "group": -(-heads // groups),
        "eps": eps,
    }


def _launch_forward(
    x: Tensor, weight: Tensor | None, tables: RopeTables, eps: float, out: Tensor | None
) -> Tensor:
    """Without a weight: rotation alone."""
    out, normed = rows.given_or_new("out", out, x), weight is not None
    shared = _shared(x, tables.cos if weight is None else weight, tables, eps)
    _C.head_norm_rope_fwd(**shared, **rows.operands(x=x, out=out), normed=int(normed))
    return out


def _launch_backward(
    x: Tensor, weight: Tensor, tables: RopeTables, eps: float, grad: Tensor, dx: Tensor
) -> Tensor:
    """Returns dweight: the sum over one row of `partial` a program, which torch adds in order."""
    programs = min(x.shape[0], rows.resident_programs(x, PROGRAMS))
    partial = weight.new_empty(programs, x.shape[2])
    _C.head_norm_rope_bwd(
        **_shared(x, weight, tables, eps),
        **rows.operands(x=x, grad=grad, dx=dx),
        partial_ptr=partial.data_ptr(),
        programs=programs,
    )
    return partial.sum(0)


def _rotated(z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = z.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _backward_torch(
    x: Tensor, weight: Tensor, tables: RopeTables, eps: float, grad: Tensor, dx: Tensor
) -> Tensor:
    g = _rotated(grad.float(), tables.cos, -tables.sin)
    n = x.float()
    r = torch.rsqrt(n.square().mean(-1, keepdim=True) + eps)
    n = n * r
    gn = g * n
    dweight = gn.sum((0, 1))
    dx.copy_((g * weight).sub_(n * (gn @ weight)[..., None].div_(x.shape[2])).mul_(r))
    return dweight


class _HeadNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, weight, cos, sin, eps = args
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return head_norm_rope_forward(x, weight, RopeTables(cos, sin), eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        tables, grad = RopeTables(cos, sin), rows.readable(grads[0])
        dx, dweight = head_norm_rope_backward(x, weight, tables, ctx.eps, grad)
        return dx, dweight, None, None, None


def head_norm_rope_reference(x: Tensor, weight: Tensor, tables: RopeTables, eps: float) -> Tensor:
    """Naive, differentiable, in the dtypes of its inputs. For tests."""
    z = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
    low, high = z[..., : x.shape[2] // 2], z[..., x.shape[2] // 2 :]
    cos, sin = (t.to(x.dtype)[:, None] for t in tables)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
