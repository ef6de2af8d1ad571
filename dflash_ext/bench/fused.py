"""`python -m dflash_ext.bench fused`: the row-wise operators in units of the device's copy rate.

Each pass reads its operands and writes its results once, so its floor is those bytes over the rate
of a large copy, measured in the same interleaved rounds; beside it the plain torch composition that
computes the same. What differs by more than bf16 explains is an error, not a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_ext.bench.anchors import WrongResult
from dflash_ext.bench.command import keep, parsed, parser_of
from dflash_ext.bench.tables import fused_table
from dflash_ext.bench.timing import Run, interleaved, rounded
from dflash_ext.ops import norm, rotary, swiglu

EPS, THETA = 1e-6, 1e6
BURST = 0.03  # seconds at a stretch
LARGEST_DIFFERENCE = 0.02  # of a result's norm; both are within 0.01 of the truth in bf16
Results = Sequence[Tensor]


@dataclass(frozen=True)
class Sizes:
    rows: int
    hidden: tuple[int, ...]
    intermediate: tuple[int, ...]
    heads: tuple[int, ...]
    head_dim: int
    copied: int
    """Bytes of the copy that the passes are compared with."""


CUDA = Sizes(32_768, (4096, 5120), (12_288, 17_408), (32, 8), 128, 2**30)
CPU = Sizes(512, (1024,), (3072,), (8,), 128, 2**24)


@dataclass(frozen=True)
class Pass:
    """One operator in one direction, with all that it reads and writes in `bytes`."""

    op: str
    what: str
    shape: str
    bytes: int
    ours: Callable[[], Results]
    plain: Callable[[], Results]


def gradients(outs: Results, leaves: Results, grads: Results) -> Callable[[], Results]:
    """The backward of a composition that has run, again and again."""
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def norm_passes(rows: int, H: int, device: str, dtype: torch.dtype) -> Iterator[Pass]:
    x, residual, grad, passed, out, total = (
        torch.randn(rows, H, device=device, dtype=dtype) for _ in range(6)
    )
    weight = torch.rand(H, device=device, requires_grad=True)
    master, shape, size = weight.detach(), f"{rows} × {H}", x.nbytes
    leaf = x.clone().requires_grad_()

    def plain(x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (H,), weight, EPS).to(dtype)

    def plain_add(x: Tensor) -> Results:
        total = x + residual
        return plain(total), total

    def backward(**into: Tensor) -> Callable[[], Results]:
        return lambda: norm.rms_norm_backward(x, master, EPS, grad, dx=out, **into)

    def ours_add() -> Results:
        return norm.add_rms_norm_forward(x, residual, master, EPS, out=out, total=total)

    yield Pass(
        "rms_norm",
        "forward",
        shape,
        2 * size,
        lambda: [norm.rms_norm_forward(x, master, EPS, out=out)],
        lambda: [plain(x)],
    )
    yield Pass("add_rms_norm", "forward", shape, 4 * size, ours_add, lambda: plain_add(x))
    alone = gradients([plain(leaf)], (leaf, weight), [grad])
    yield Pass("rms_norm", "backward", shape, 3 * size, backward(), alone)
    # The gradient of a sum that is normed and passed on: the sum itself is the leaf.
    both = gradients([plain(leaf), leaf * 1], (leaf, weight), [grad, passed])
    yield Pass("add_rms_norm", "backward", shape, 4 * size, backward(grad_total=passed), both)
    yield Pass(
        "add_rms_norm",
        "backward, norm again",
        shape,
        5 * size,
        lambda: (*backward(grad_total=passed, normed=total)(), total),
        lambda: (*both(), plain(x)),
    )


def swiglu_passes(rows: int, width: int, device: str, dtype: torch.dtype) -> Iterator[Pass]:
    wide, dwide = (torch.randn(rows, 2 * width, device=device, dtype=dtype) for _ in range(2))
    dact, act = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    leaves = [x.requires_grad_() for x in wide.clone().chunk(2, dim=1)]
    (gate, up), (dgate, dup) = wide.chunk(2, dim=1), dwide.chunk(2, dim=1)
    shape, size = f"{rows} × {width}", act.nbytes

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def ours() -> Results:
        swiglu.swiglu_backward(gate, up, dact, dgate=dgate, dup=dup, act=act)
        return dgate, dup, act

    yield Pass(
        "swiglu",
        "forward",
        shape,
        3 * size,
        lambda: [swiglu.swiglu_forward(gate, up, out=act)],
        lambda: [plain(gate, up)],
    )
    backward = gradients([plain(*leaves)], leaves, [dact])
    yield Pass(
        "swiglu",
        "backward, activation again",
        shape,
        6 * size,
        ours,
        lambda: (*backward(), plain(gate, up)),
    )


def rotary_passes(
    rows: int, heads: int, head_dim: int, device: str, dtype: torch.dtype
) -> Iterator[Pass]:
    x, grad, out = (
        torch.randn(rows, heads, head_dim, device=device, dtype=dtype) for _ in range(3)
    )
    weight = torch.rand(head_dim, device=device, requires_grad=True)
    master, leaf = weight.detach(), x.clone().requires_grad_()
    tables = rotary.rope_tables(torch.arange(rows, device=device), head_dim, THETA)
    cos, sin = (table[:, None] for table in tables)
    shape, size = f"{rows} × {heads} × {head_dim}", x.nbytes
    table_bytes = tables.cos.nbytes + tables.sin.nbytes

    def plain(x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (head_dim,), weight, EPS).to(dtype)
        low, high = normed.float().chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(dtype)

    yield Pass(
        "head_norm_rope",
        "forward",
        shape,
        2 * size + table_bytes,
        lambda: [rotary.head_norm_rope_forward(x, master, tables, EPS, out=out)],
        lambda: [plain(x)],
    )
    yield Pass(
        "head_norm_rope",
        "backward",
        shape,
        3 * size + table_bytes,
        lambda: rotary.head_norm_rope_backward(x, master, tables, EPS, grad, dx=out),
        gradients([plain(leaf)], (leaf, weight), [grad]),
    )


def passes(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Pass]:
    for H in sizes.hidden:
        yield from norm_passes(sizes.rows, H, device, dtype)
    for width in sizes.intermediate:
        yield from swiglu_passes(sizes.rows, width, device, dtype)
    for heads in sizes.heads:
        yield from rotary_passes(sizes.rows, heads, sizes.head_dim, device, dtype)


def copy_run(size: int, device: str) -> Run:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def check(found: Pass) -> None:
    """Ours and the composition's results agree, or nothing measured is worth reporting."""
    for ours, plain in zip(found.ours(), found.plain(), strict=True):
        a, b = ours.detach().float(), plain.detach().float()
        difference = float((a - b).norm() / b.norm())
        if not difference <= LARGEST_DIFFERENCE:
            raise WrongResult(
                f"{found.op} {found.what} and its composition differ by {difference:.3f}"
            )


def measure(found: Pass, copy: Run, copied: int, device: str, rounds: int) -> dict[str, Any]:
    check(found)
    runs: dict[str, Run] = {"copy": copy, "ours": found.ours, "plain": found.plain}
    seconds = interleaved(runs, device, rounds, BURST if device == "cuda" else 0.0)
    rate, copy_rate = found.bytes / seconds["ours"], 2 * copied / seconds["copy"]
    return {
        "op": found.op,
        "what": found.what,
        "shape": found.shape,
        "mb": rounded(found.bytes / 1e6),
        "ms": rounded(seconds["ours"] * 1e3),
        "gb_per_s": rounded(rate / 1e9),
        "copy_gb_per_s": rounded(copy_rate / 1e9),
        "over_copy": rounded(rate / copy_rate),
        "plain_ms": rounded(seconds["plain"] * 1e3),
        "over_plain": rounded(seconds["plain"] / seconds["ours"]),
    }


def main(argv: Sequence[str]) -> None:
    args = parsed(parser_of("fused", __doc__), argv, rounds=7, cpu_rounds=7)
    device = args.device
    torch.manual_seed(0)
    sizes, dtype = (CUDA, torch.bfloat16) if device == "cuda" else (CPU, torch.float32)
    copy, rows = copy_run(sizes.copied, device), []
    for found in passes(sizes, device, dtype):
        rows.append(measure(found, copy, sizes.copied, device, args.rounds))
        keep(args.json, {"benchmark": "fused", "device": device, "rows": rows})
    print(fused_table(rows))
