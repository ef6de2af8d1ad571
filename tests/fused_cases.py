"""The row-wise operators as one table, so that every test runs over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_ext.ops import norm, rotary, swiglu

EPS = 1e-6
HEADS = 3

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Problem:
    leaves: dict[str, Tensor]
    """What is differentiated, by name."""
    ours: Callable[..., Outputs]
    naive: Callable[..., Outputs]
    """Of the leaves; naive takes them in any one dtype."""
    grads: Outputs
    """One per output."""

    def run(self, how: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Outputs and gradients by name, of "ours" or of "naive" in a dtype."""
        leaves = [
            (x if dtype is None else x.to(dtype)).detach().requires_grad_()
            for x in self.leaves.values()
        ]
        outs = getattr(self, how)(*leaves)
        grads = torch.autograd.grad(outs, leaves, [g.to(o.dtype) for g, o in zip(self.grads, outs)])
        named = {f"out{i}": o.detach() for i, o in enumerate(outs)}
        return named | {f"d{n}": g for n, g in zip(self.leaves, grads)}


def rows_of(
    rows: int, width: int, dtype: torch.dtype, device: str, fused: bool, seed: int
) -> Tensor:
    """Random rows; fused: a slice of a matrix of three such widths, the rest NaN."""
    made = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    made = made.to(device=device, dtype=dtype)
    if not fused:
        return made
    wide = torch.full((rows, 3 * width), float("nan"), device=device, dtype=dtype)
    wide[:, width : 2 * width] = made
    return wide[:, width : 2 * width]


def make(
    op: str,
    rows: int,
    width: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    fused: bool = False,
    seed: int = 0,
    heads: int = HEADS,
) -> Problem:
    """A problem of `op` (a key of OPS): width is H, I or, with `heads` heads, D."""
    return OPS[op](rows, width, dtype, device, fused, seed, heads)


def _weight(width: int, device: str) -> Tensor:
    return (1 + 0.5 * torch.randn(width, generator=torch.Generator().manual_seed(9))).to(device)


def _rms_norm(
    rows: int, H: int, dtype: torch.dtype, device: str, fused: bool, seed: int, _: int
) -> Problem:
    x, g = (rows_of(rows, H, dtype, device, fused, seed + i) for i in range(2))
    return Problem(
        {"x": x, "weight": _weight(H, device)},
        lambda *leaves: (norm.rms_norm(*leaves, EPS),),
        lambda *leaves: (norm.rms_norm_reference(*leaves, EPS),),
        (g,),
    )


def _add_rms_norm(
    rows: int, H: int, dtype: torch.dtype, device: str, fused: bool, seed: int, _: int
) -> Problem:
    x, y, g, h = (rows_of(rows, H, dtype, device, fused, seed + i) for i in range(4))
    return Problem(
        {"x": x, "residual": y, "weight": _weight(H, device)},
        lambda *leaves: norm.add_rms_norm(*leaves, EPS),
        lambda *leaves: norm.add_rms_norm_reference(*leaves, EPS),
        (g, h),
    )


def _swiglu(
    rows: int, width: int, dtype: torch.dtype, device: str, fused: bool, seed: int, _: int
) -> Problem:
    gate, up, g = (rows_of(rows, width, dtype, device, fused, seed + i) for i in range(3))
    return Problem(
        {"gate": 3 * gate, "up": up} if not fused else {"gate": gate, "up": up},
        lambda *leaves: (swiglu.swiglu(*leaves),),
        lambda *leaves: (swiglu.swiglu_reference(*leaves),),
        (g,),
    )


def _head_norm_rope(
    rows: int, D: int, dtype: torch.dtype, device: str, fused: bool, seed: int, heads: int
) -> Problem:
    x, g = (
        rows_of(rows, heads * D, dtype, device, fused, seed + i).view(rows, heads, D)
        for i in range(2)
    )
    positions = torch.randint(0, 131_072, (rows,), generator=torch.Generator().manual_seed(seed))
    tables = rotary.rope_tables(positions.to(device), D, 1e6)

    def naive(x: Tensor, weight: Tensor) -> Outputs:
        return (rotary.head_norm_rope_reference(x, weight, tables, EPS),)

    return Problem(
        {"x": x, "weight": _weight(D, device)},
        lambda x, weight: (rotary.head_norm_rope(x, weight, tables, EPS),),
        naive,
        (g,),
    )


OPS: dict[str, Callable[..., Problem]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "swiglu": _swiglu,
    "head_norm_rope": _head_norm_rope,
}


def assert_two_times_rule(problem: Problem, dtype: torch.dtype) -> None:
    """error(ours, fp64) <= 2 * error(naive torch in the same dtype, fp64) + tiny, and weights'
    gradients to fp32 accuracy, which naive bf16 does not have."""
    truth = problem.run("naive", torch.float64)
    naive = problem.run("naive", dtype)
    for name, x in problem.run("ours").items():
        y, size = truth[name], truth[name].norm()
        assert x.isfinite().all(), f"{name} has elements that were not written"
        assert x.shape == y.shape, name
        assert x.dtype == (torch.float32 if name == "dweight" else dtype), name
        error, allowed = (x.double() - y).norm(), (naive[name].double() - y).norm()
        assert error <= 2 * allowed + 1e-6 * size, f"{name}: {error:.3e}, torch {allowed:.3e}"
        if name == "dweight" and "residual" not in problem.leaves:  # the sum is rounded before
            assert error <= 3e-6 * size, f"{name}: relative error {error / size:.1e}"
