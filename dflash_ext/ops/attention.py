"""DFlash attention: block queries over one context interval each, and over their own block.

Shapes: N blocks, B slots, T context rows, Hq / Hkv query / key-value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ext.ops.layout import AttentionLayout


def visible_pairs(layout: AttentionLayout) -> Tensor:
    """bool [N*B, T + N*B]: the mask the kernels never build (semantics.md, "Attention mask")."""
    B, T = layout.block_size, layout.num_ctx
    start = layout.ctx_start.long().repeat_interleave(B)[:, None]
    end = layout.ctx_end.long().repeat_interleave(B)[:, None]
    rows = torch.arange(layout.num_blocks * B, device=start.device)
    block, slot = rows // B, rows % B
    j = torch.arange(T, device=start.device)[None]
    context = (j >= start) & (j < end)
    if layout.window is not None:
        context &= j >= end + slot[:, None] - layout.window + 1
    own = (block[:, None] == block[None]) & (start <= end)
    if layout.causal:
        own &= slot[None] <= slot[:, None]
    return torch.cat([context, own], dim=1)


def dflash_attention_reference(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    layout: AttentionLayout,
    *,
    scale: float | None = None,
) -> Tensor:
    """Naive plain-torch attention in the dtype of its inputs; builds the whole mask. For tests."""
    Hq, D = q.shape[1:]
    G = Hq // k_blk.shape[1]
    k = torch.cat([k_ctx, k_blk]).repeat_interleave(G, dim=1)
    v = torch.cat([v_ctx, v_blk]).repeat_interleave(G, dim=1)
    visible = visible_pairs(layout)
    score = torch.einsum("qhd,khd->hqk", q, k) * (D**-0.5 if scale is None else scale)
    score = score.masked_fill(~visible, float("-inf"))
    hidden = ~visible.any(dim=1)  # padding rows: softmax of nothing is 0, not NaN
    prob = score.masked_fill(hidden[:, None], 0.0).softmax(-1).masked_fill(hidden[:, None], 0.0)
    return torch.einsum("hqk,khd->qhd", prob, v)


dflash_attention = dflash_attention_reference
