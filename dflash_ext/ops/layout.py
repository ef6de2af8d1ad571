"""Which context rows a block sees: the attention layout, built once per batch.

A DFlash block i sees ONE interval of the packed context, [ctx_start[i], ctx_end[i]), and itself
(semantics.md, "Attention mask"), so no mask tensor exists anywhere: the interval ends are the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZES = (4, 8, 16, 32)


@dataclass(frozen=True)
class AttentionLayout:
    """Intervals of N blocks over T context rows, plus the static options of one layer type.

    Blocks are sorted by document, then anchor: ctx_start and ctx_end never decrease. A padding
    block has ctx_start > ctx_end (use T + 1 and T, which keeps the order): output and gradient 0.
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

    @property
    def num_blocks(self) -> int:
        return self.ctx_start.numel()


def build_layout(
    ctx_start: Tensor,
    ctx_end: Tensor,
    *,
    num_ctx: int,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> AttentionLayout:
    """Layout of one layer type for a packed batch; no host synchronisation."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size {block_size} is not supported: use one of {BLOCK_SIZES}")
    if ctx_start.shape != ctx_end.shape or ctx_start.dim() != 1:
        raise ValueError(f"ctx_start {tuple(ctx_start.shape)} and ctx_end {tuple(ctx_end.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1, or None for full attention")
    return AttentionLayout(
        ctx_start.to(torch.int32), ctx_end.to(torch.int32), num_ctx, block_size, window, causal
    )
