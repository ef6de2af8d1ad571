"""Which context rows a block sees: the attention layout, built once per batch.

A DFlash block i sees ONE interval of the packed context, [ctx_start[i], ctx_end[i]), and itself
(semantics.md, "Attention mask"), so no mask tensor exists anywhere: the interval ends are the mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ext import _C
from dflash_ext.ops.kept import ImageCounts, image_counts, tiles_seen
from dflash_ext.ops.rows import place

BLOCK_SIZES = (4, 8, 16, 32)
"""Of a drafter. The kernels also take blocks of one token: that is causal attention (causal.py)."""
NO_WINDOW = 2**30  # what the kernels take for "no sliding window"; larger than any context


class Schedule(NamedTuple):
    """What the CUDA kernels look up instead of searching; every entry is int32 on the device."""

    ranges: Tensor
    """[ceil(T / KEY_TILE), 4]: per context tile, the blocks that see any of it are [0] .. [3], the
    blocks whose every slot sees all of it are [1] .. [2]."""
    seen: Tensor
    """[ceil(T / KEY_TILE)]: blocks that see an earlier context tile, counted once for each tile."""
    doc_first: Tensor
    """[N]: first block of the block's document."""
    doc_last: Tensor
    """[N]: last block of the block's document."""


@dataclass(frozen=True)
class AttentionLayout:
    """Intervals of N blocks over T context rows, plus the static options of one layer type.

    Blocks are sorted by document, then anchor: ctx_start and ctx_end never decrease. A padding
    block has ctx_start > ctx_end (use T + 1 and T, which keeps the order): output and gradient 0.
    Build it with `build_layout`.
    """

    ctx_start: Tensor
    """int32 [N]: first row of the block's document."""
    ctx_end: Tensor
    """int32 [N]: the anchor's own row, not visible itself."""
    num_ctx: int
    """T, rows of the packed context."""
    block_size: int
    """B, slots per block."""
    window: int | None = None
    """Sliding window W: slot k of a block anchored at a sees context rows j >= a + k - W + 1."""
    causal: bool = False
    """Slot k sees slots m <= k of its block only."""
    visible_rows: int | None = None
    """At least the sum of the real blocks' ctx_end - ctx_start, where it is known on the host: lets
    the backward keep dS between its kernels (kept.py) if there is memory for it."""
    schedule: Schedule | None = None
    """Present on CUDA; the CPU kernels need none."""

    @property
    def num_blocks(self) -> int:
        return self.ctx_start.numel()

    @property
    def window_or_none(self) -> int:
        """The window as the kernels take it."""
        return NO_WINDOW if self.window is None else min(self.window, NO_WINDOW)

    @property
    def tiles_seen(self) -> int | None:
        """At least the context tiles that the blocks see, summed over blocks; None: not known."""
        if self.visible_rows is None:
            return None
        return tiles_seen(self.visible_rows, self.num_blocks, self.window_or_none)

    def images(self, kv_heads: int, gqa_ratio: int) -> ImageCounts | None:
        """Images of dS that a backward fills at most; None: not known."""
        seen = self.tiles_seen
        if seen is None:
            return None
        return image_counts(
            tiles_seen=seen,
            num_ctx=self.num_ctx,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            kv_heads=kv_heads,
            gqa_ratio=gqa_ratio,
        )


def build_layout(
    ctx_start: Tensor,
    ctx_end: Tensor,
    *,
    num_ctx: int,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
    visible_rows: int | None = None,
) -> AttentionLayout:
    """Layout of one layer type for a packed batch, on the device of its inputs.

    ctx_start, ctx_end: int32 or int64 [N], sorted. No host synchronisation: on CUDA one kernel
    derives the schedule. visible_rows (int): the sum of ctx_end - ctx_start over blocks that are no
    padding, or more, if the caller has it on the host; too small a number makes the gradients of
    queries and keys NaN. Raises ValueError on unsupported options or shapes.
    """
    if block_size not in (1, *BLOCK_SIZES):
        raise ValueError(f"block_size {block_size} is not supported: use one of {BLOCK_SIZES}")
    if ctx_start.dim() != 1 or ctx_start.shape != ctx_end.shape:
        raise ValueError(
            f"ctx_start and ctx_end must both be [N], got {tuple(ctx_start.shape)} and "
            f"{tuple(ctx_end.shape)}"
        )
    if ctx_start.device != ctx_end.device:
        raise ValueError(f"ctx_start is on {ctx_start.device}, ctx_end on {ctx_end.device}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1, or None for full attention")
    if visible_rows is not None and not (isinstance(visible_rows, int) and visible_rows >= 0):
        raise ValueError(
            f"visible_rows {visible_rows!r} must be an int of at least 0, known on the host, or "
            "None: leave it out"
        )
    if not 0 <= num_ctx < NO_WINDOW:
        raise ValueError(f"num_ctx {num_ctx} must be in [0, 2**30)")
    layout = AttentionLayout(
        ctx_start.to(torch.int32).contiguous(),
        ctx_end.to(torch.int32).contiguous(),
        num_ctx,
        block_size,
        window,
        causal,
        visible_rows,
    )
    if ctx_start.device.type != "cuda":
        return layout
    return replace(layout, schedule=_cuda_schedule(layout))


def _empty_schedule(layout: AttentionLayout) -> Schedule:
    tiles = -(-layout.num_ctx // _C.KEY_TILE)
    new = layout.ctx_start.new_empty
    return Schedule(new((tiles, 4)), new(tiles), new(layout.num_blocks), new(layout.num_blocks))


def _cuda_schedule(layout: AttentionLayout) -> Schedule:
    schedule = _empty_schedule(layout)
    _C.attention_layout(
        **place(layout.ctx_start),
        ctx_start_ptr=layout.ctx_start.data_ptr(),
        ctx_end_ptr=layout.ctx_end.data_ptr(),
        ranges_ptr=schedule.ranges.data_ptr(),
        seen_ptr=schedule.seen.data_ptr(),
        doc_first_ptr=schedule.doc_first.data_ptr(),
        doc_last_ptr=schedule.doc_last.data_ptr(),
        num_blocks=layout.num_blocks,
        num_ctx=layout.num_ctx,
        B=layout.block_size,
        window=layout.window_or_none,
    )
    return schedule


def schedule_reference(layout: AttentionLayout) -> Schedule:
    """The same schedule in plain torch: binary searches over the sorted blocks. For tests."""
    start, end = layout.ctx_start.long(), layout.ctx_end.long()
    window, B, T = layout.window_or_none, layout.block_size, layout.num_ctx
    n0 = torch.arange(0, T, _C.KEY_TILE, device=start.device)
    n1 = (n0 + _C.KEY_TILE).clamp(max=T)
    lowest = torch.maximum(start, end - window + 1)  # lower limit of slot 0
    highest = torch.maximum(start, end - window + B)  # lower limit of slot B - 1
    see_lo = torch.searchsorted(end, n0, right=True)
    see_hi = torch.maximum(torch.searchsorted(lowest, n1), see_lo)
    full_lo = torch.minimum(torch.maximum(torch.searchsorted(end, n1), see_lo), see_hi)
    full_hi = torch.maximum(
        torch.minimum(torch.searchsorted(highest, n0, right=True), see_hi), full_lo
    )
    viewers = see_hi - see_lo
    return Schedule(
        torch.stack([see_lo, full_lo, full_hi, see_hi], dim=1).to(torch.int32),
        (viewers.cumsum(0) - viewers).to(torch.int32),
        torch.searchsorted(start, start).to(torch.int32),
        (torch.searchsorted(start, start, right=True) - 1).to(torch.int32),
    )
