"""One attention problem: random tensors, their layout, and how much of it is useful work.

Useful FLOPs count visible pairs only: 4*D a pair and query head forward, 10*D backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dflash_ext.bench.recorder import recorded
from dflash_ext.bench.shapes import Shape
from dflash_ext.bench.timing import Run
from dflash_ext.blocks import visible_rows
from dflash_ext.ops import attention_cuda
from dflash_ext.ops.attention import dflash_attention
from dflash_ext.ops.attention_call import Tensors, forced_path
from dflash_ext.ops.kept import bytes_for, room_for_ds
from dflash_ext.ops.layout import AttentionLayout, build_layout

FORWARD_FLOPS = 4
BACKWARD_FLOPS = 10


@dataclass(frozen=True)
class Problem:
    shape: Shape
    leaves: Tensors
    ctx_start: Tensor
    ctx_end: Tensor
    visible_rows: int

    def build_layout(self) -> AttentionLayout:
        return build_layout(
            self.ctx_start,
            self.ctx_end,
            num_ctx=self.shape.T,
            block_size=self.shape.B,
            window=self.shape.window,
            causal=self.shape.causal,
            visible_rows=self.visible_rows,
        )


def intervals(shape: Shape) -> tuple[Tensor, Tensor]:
    """ctx_start, ctx_end, int32 [N] as training passes them: anchors uniform over the batch."""
    g = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *shape.documents]).cumsum(0)
    anchors = torch.randperm(shape.T - 1, generator=g)[: shape.num_blocks].sort().values
    document = torch.searchsorted(starts, anchors, right=True) - 1
    return starts[document].int(), anchors.int()


def random_leaves(shape: Shape, device: str, dtype: torch.dtype) -> Tensors:
    rows = shape.num_blocks * shape.B
    sizes = [(rows, shape.Hq), *[(shape.T, shape.Hkv)] * 2, *[(rows, shape.Hkv)] * 2]
    return Tensors(
        *(
            torch.randn(r, h, shape.D, device=device, dtype=dtype, requires_grad=True)
            for r, h in sizes
        )
    )


def make_problem(shape: Shape, device: str, dtype: torch.dtype) -> Problem:
    start, end = intervals(shape)
    leaves = random_leaves(shape, device, dtype)
    return Problem(shape, leaves, start.to(device), end.to(device), visible_rows(start, end))


def useful_pairs(layout: AttentionLayout) -> int:
    """Visible (query, key) pairs per query head; a window counts slot by slot."""
    B, start, end = layout.block_size, layout.ctx_start.long(), layout.ctx_end.long()
    context = (end - start).clamp(min=0)[:, None].expand(-1, B)
    if layout.window is not None:
        slot = torch.arange(B, device=start.device)
        context = context.minimum((layout.window - 1 - slot).clamp(min=0))
    own = B * (B + 1) // 2 if layout.causal else B * B
    return int(context.sum()) + int((start <= end).sum()) * own


def without_window(problem: Problem) -> Problem:
    """The same tensors with (nearly) the same visible pairs, and no window or causality.

    Every interval is cut to the length at which B full rows and a full own block hold as many pairs
    as a block whose window is full.
    """
    B, window = problem.shape.B, problem.shape.window
    plain = replace(problem, shape=replace(problem.shape, window=None, causal=False))
    if window is None:
        return plain
    own = B * (B + 1) // 2 if problem.shape.causal else B * B
    full = sum(max(window - 1 - slot, 0) for slot in range(B)) + own
    length = max(round((full - B * B) / B), 0)
    start = torch.maximum(problem.ctx_start, problem.ctx_end - length)
    most = length * problem.shape.num_blocks
    return replace(plain, ctx_start=start, visible_rows=min(problem.visible_rows, most))


def gradient_run(out: Tensor, leaves: Sequence[Tensor]) -> Run:
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def kept_bytes(problem: Problem, layout: AttentionLayout) -> int:
    """Of dS between the backward's kernels; 0 where it is computed again."""
    counts = attention_cuda.images_of_ds(problem.leaves, layout)
    return bytes_for(counts, problem.leaves.q.device) if counts else 0


def operator_runs(problem: Problem, layout: AttentionLayout) -> dict[str, Run]:
    """The operator's three parts as a training step calls them."""
    forward = partial(dflash_attention, *problem.leaves, layout)
    return {
        "fwd": forward,
        "bwd": gradient_run(forward(), problem.leaves),
        "layout": problem.build_layout,
    }


def recomputed_run(problem: Problem, layout: AttentionLayout, path: str | None) -> Run:
    """A backward that computes dS again for dQ, on a forced path or the operator's own."""
    with room_for_ds(None), forced_path(path):
        return gradient_run(dflash_attention(*problem.leaves, layout), problem.leaves)


def forced_runs(problem: Problem, layout: AttentionLayout, path: str) -> dict[str, Run]:
    """Forward and backward through one kernel path, whatever the operator would choose.

    Raises RuntimeError if "triton" still launches Hopper's kernels: the backward runs in autograd's
    own thread, where a forced path is easily lost.
    """

    def under(run: Run) -> Run:
        def forced() -> object:
            with forced_path(path):
                return run()

        return forced

    forward = under(partial(dflash_attention, *problem.leaves, layout))
    with recorded(attention_cuda) as calls:
        backward = under(gradient_run(forward(), problem.leaves))
        backward()
    wrong = [name for name, _ in calls if name.startswith("hopper")]
    if path == "triton" and wrong:
        raise RuntimeError(f"forced onto {path!r}, the operator still launched {wrong}")
    return {f"{path} fwd": forward, f"{path} bwd": backward}
