"""`python -m dflash_ext.bench attention`: the operator against what torch offers, in the same run.

On CUDA: shapes A-D of the project's anchors; beside each, the bf16 8192^3 matrix product and,
with --flex, torch's compiled flex_attention on the same mask. On the CPU: the quickstart's shape
against scaled_dot_product_attention with the dense mask.

Useful FLOPs count visible pairs only, 4*D a pair and query head forward, 2.5 times that backward.
Rounds of all contestants are interleaved and medians reported, because a GPU's clock depends on
what ran before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_ext.errors import UserError
from dflash_ext.ops.attention import Tensors, dflash_attention, visible_pairs
from dflash_ext.ops.layout import AttentionLayout, build_layout
from dflash_ext.record import save

FORWARD_FLOPS = 4
BACKWARD_FLOPS = 10
PRODUCT = 8192


@dataclass(frozen=True)
class Shape:
    name: str
    documents: tuple[int, ...]
    num_blocks: int
    B: int
    Hq: int
    Hkv: int
    D: int

    @property
    def T(self) -> int:
        return sum(self.documents)


def lognormal_documents(total: int, mean: float, seed: int = 0) -> tuple[int, ...]:
    """Realistic document lengths (sigma 0.7, 64 to 8192 tokens) that sum to `total`."""
    g = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        drawn = int(min(max(64.0, (torch.randn(1, generator=g) * 0.7).exp().item() * mean), 8192))
        lengths.append(min(drawn, left))
    return tuple(lengths)


CUDA_SHAPES = (
    Shape("A 4k, 1 document", (4096,), 512, 16, 32, 8, 128),
    Shape("B 8 x 2k", (2048,) * 8, 1024, 16, 32, 8, 128),
    Shape("C 48k packed", lognormal_documents(49152, 1500), 2048, 16, 32, 8, 128),
    Shape("D 32k, 1 document", (32768,), 512, 16, 32, 8, 128),
)
CPU_SHAPES = (
    Shape("quickstart, 8 x 200", (200,) * 8, 128, 8, 9, 3, 64),
    Shape("4 x 512", (512,) * 4, 256, 16, 9, 3, 64),
)


def make_problem(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """ctx_start, ctx_end [N]: anchors uniform over the packed batch, sorted."""
    g = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *shape.documents]).cumsum(0)
    anchors = torch.randperm(shape.T - 1, generator=g)[: shape.num_blocks].sort().values
    document = torch.searchsorted(starts, anchors, right=True) - 1
    return starts[document].to(device), anchors.to(device)


def useful_pairs(layout: AttentionLayout) -> int:
    """Visible (query, key) pairs per query head, without a window."""
    B = layout.block_size
    context = int((layout.ctx_end - layout.ctx_start).sum())
    return context * B + layout.num_blocks * B * B


def random_leaves(shape: Shape, device: str, dtype: torch.dtype) -> Tensors:
    rows = shape.num_blocks * shape.B
    sizes = [(rows, shape.Hq), *[(shape.T, shape.Hkv)] * 2, *[(rows, shape.Hkv)] * 2]
    return Tensors(
        *(
            torch.randn(r, h, shape.D, device=device, dtype=dtype, requires_grad=True)
            for r, h in sizes
        )
    )


def seconds(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Mean time of one call over `repeats` back-to-back calls."""
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def interleaved(
    runs: dict[str, Callable[[], Any]], device: str, rounds: int, repeats: int
) -> dict[str, float]:
    """Median seconds of each contestant over interleaved rounds, after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(rounds + 1):
        for name, run in runs.items():
            took = seconds(run, device, repeats)
            if round_index:
                times[name].append(took)
    return {name: statistics.median(t) for name, t in times.items()}


def gradient_run(out: Tensor, leaves: Sequence[Tensor]) -> Callable[[], Any]:
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def first_and_hundredth_call(shape: Shape) -> tuple[float, float]:
    """Seconds of the first and of the hundredth forward + backward of a shape never seen before."""
    unseen = Shape("unseen", (shape.T + 1237,), shape.num_blocks + 3, 8, 16, 4, 128)
    start, end = make_problem(unseen, "cuda")
    leaves = random_leaves(unseen, "cuda", torch.bfloat16)
    grad = torch.randn_like(leaves[0])

    def step() -> None:
        layout = build_layout(start, end, num_ctx=unseen.T, block_size=unseen.B)
        torch.autograd.grad(dflash_attention(*leaves, layout), leaves, grad)

    times = []
    for _ in range(100):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times[0], times[-1]


def flex_runs(layout: AttentionLayout, leaves: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """torch's compiled flex_attention on the same mask; imported nowhere else in the project."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, T = layout.block_size, layout.num_ctx
    start, end = layout.ctx_start.long(), layout.ctx_end.long()

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // B
        return ((kv >= start[block]) & (kv < end[block])) | ((kv >= T) & ((kv - T) // B == block))

    rows = leaves[0].shape[0]
    mask = create_block_mask(visible, None, None, rows, T + rows, device="cuda")
    flex = torch.compile(flex_attention, dynamic=False)
    q = leaves[0].detach().transpose(0, 1)[None].contiguous().requires_grad_()
    k, v = (
        torch.cat([ctx, own]).detach().transpose(0, 1)[None].contiguous().requires_grad_()
        for ctx, own in ((leaves[1], leaves[3]), (leaves[2], leaves[4]))
    )

    def forward() -> Tensor:
        return flex(q, k, v, block_mask=mask, enable_gqa=True)

    return {"flex fwd": forward, "flex bwd": gradient_run(forward(), (q, k, v))}


def bench_cuda(flex: bool, rounds: int) -> list[dict[str, Any]]:
    rows = []
    a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for shape in CUDA_SHAPES:
        start, end = make_problem(shape, "cuda")
        make_layout = partial(build_layout, start, end, num_ctx=shape.T, block_size=shape.B)
        layout = make_layout()
        leaves = random_leaves(shape, "cuda", torch.bfloat16)
        forward = partial(dflash_attention, *leaves, layout)
        runs: dict[str, Callable[[], Any]] = {
            "product": lambda: a @ b,
            "fwd": forward,
            "bwd": gradient_run(forward(), leaves),
            "layout": make_layout,
        }
        if flex:
            runs |= flex_runs(layout, leaves)
        t = interleaved(runs, "cuda", rounds, repeats=10)
        flops = useful_pairs(layout) * shape.Hq * shape.D
        product = 2 * PRODUCT**3 / t["product"] / 1e12
        row: dict[str, Any] = {
            "shape": shape.name,
            "product_tflops": product,
            "fwd_ms": t["fwd"] * 1e3,
            "bwd_ms": t["bwd"] * 1e3,
            "layout_ms": t["layout"] * 1e3,
            "fwd_tflops": FORWARD_FLOPS * flops / t["fwd"] / 1e12,
            "bwd_tflops": BACKWARD_FLOPS * flops / t["bwd"] / 1e12,
        }
        row["fwd_over_product"] = row["fwd_tflops"] / product
        row["bwd_over_product"] = row["bwd_tflops"] / product
        if flex:
            row["fwd_speedup_over_flex"] = t["flex fwd"] / t["fwd"]
            row["bwd_speedup_over_flex"] = t["flex bwd"] / t["bwd"]
        rows.append(row)
        print_row(row)
    first, hundredth = first_and_hundredth_call(CUDA_SHAPES[0])
    rows.append(
        {"shape": "unseen", "first_call_ms": first * 1e3, "hundredth_call_ms": hundredth * 1e3}
    )
    print_row(rows[-1])
    return rows


def bench_cpu(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for shape in CPU_SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            start, end = make_problem(shape, "cpu")
            layout = build_layout(start, end, num_ctx=shape.T, block_size=shape.B)
            leaves = random_leaves(shape, "cpu", dtype)
            mask = visible_pairs(layout)

            def dense(x: Tensors = leaves, mask: Tensor = mask) -> Tensor:
                k, v = (torch.cat([x[i], x[i + 2]]).transpose(0, 1)[None] for i in (1, 2))
                q = x[0].transpose(0, 1)[None]
                return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

            ours = partial(dflash_attention, *leaves, layout)
            runs: dict[str, Callable[[], Any]] = {
                "fwd": ours,
                "bwd": gradient_run(ours(), leaves),
                "sdpa fwd": dense,
                "sdpa bwd": gradient_run(dense(), leaves),
            }
            t = interleaved(runs, "cpu", rounds, repeats=1)
            flops = useful_pairs(layout) * shape.Hq * shape.D
            row: dict[str, Any] = {
                "shape": shape.name,
                "dtype": str(dtype).removeprefix("torch."),
                "fwd_ms": t["fwd"] * 1e3,
                "bwd_ms": t["bwd"] * 1e3,
                "fwd_gflops": FORWARD_FLOPS * flops / t["fwd"] / 1e9,
                "bwd_gflops": BACKWARD_FLOPS * flops / t["bwd"] / 1e9,
                "fwd_speedup_over_sdpa": t["sdpa fwd"] / t["fwd"],
                "bwd_speedup_over_sdpa": t["sdpa bwd"] / t["bwd"],
                "speedup_over_sdpa": (t["sdpa fwd"] + t["sdpa bwd"]) / (t["fwd"] + t["bwd"]),
            }
            rows.append(row)
            print_row(row)
    return rows


def print_row(row: dict[str, Any]) -> None:
    shown = (f"{k} {v:.3g}" if isinstance(v, float) else str(v) for k, v in row.items())
    print(" | ".join(shown), flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_ext.bench attention")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--flex", action="store_true", help="also time torch's compiled flex")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="where to keep the numbers")
    args = parser.parse_args(argv)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: expected at least 1")
    torch.manual_seed(0)
    rows = bench_cuda(args.flex, args.rounds) if device == "cuda" else bench_cpu(args.rounds)
    if args.json:
        save(args.json, {"benchmark": "attention", "device": device, "rows": rows})
