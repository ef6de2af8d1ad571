"""Causal attention of documents laid end to end, for a frozen target.

Shapes: T tokens, Hq / Hkv query / key-value heads, D head dim.

It is the block attention of attention.py with blocks of one token: token t sees the context rows
[start of its document, t) and itself, the only slot of its block. So the target runs the kernels of
the drafter, G query heads of a key-value head in one tile, on any length without padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_ext.ops.attention import dflash_attention_forward
from dflash_ext.ops.layout import AttentionLayout, build_layout
from dflash_ext.placement import to_device


def causal_layout(
    doc_starts: Tensor, device: torch.device | str, window: int | None = None
) -> AttentionLayout:
    """Layout of documents [doc_starts[d], doc_starts[d + 1]), for one kind of layer.

    doc_starts: int64 [docs + 1] on the CPU, rising from 0 to T; window W: token t sees rows
    j > t - W, its own among them. The host waits for nothing. ValueError on wrong options.
    """
    start = doc_starts[:-1].repeat_interleave(doc_starts.diff()).to(torch.int32)
    T = start.numel()
    own = torch.arange(T, dtype=torch.int32, device=device)
    return build_layout(to_device(start, device), own, num_ctx=T, block_size=1, window=window)


@torch.no_grad()
def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the visible pairs, [T, Hq, D]; without a gradient.

    q [T, Hq, D]; k, v [T, Hkv, D]; layout from `causal_layout`; types, strides and errors as
    `dflash_attention`, `scale` too. sinks [Hq]: of each head the score of one more key, visible to
    all, whose value is 0.
    """
    out, lse = dflash_attention_forward(q, k, v, k, v, layout, scale=scale)
    if sinks is not None:
        # exp(lse) / (exp(lse) + exp(sink)): what the sink leaves of the other keys' weights.
        out.mul_(torch.sigmoid(lse - sinks.float()[:, None]).T[..., None])
    return out


def causal_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_starts: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Naive, document by document, in the dtype of its inputs. For tests."""
    group, D = q.shape[1] // k.shape[1], q.shape[2]
    scale = D**-0.5 if scale is None else scale
    outputs = []
    for begin, end in zip(doc_starts.tolist(), doc_starts.tolist()[1:]):
        i = torch.arange(end - begin, device=q.device)
        hidden = i[None] > i[:, None]
        if window is not None:
            hidden |= i[None] <= i[:, None] - window
        keys = k[begin:end].repeat_interleave(group, dim=1)
        values = v[begin:end].repeat_interleave(group, dim=1)
        s = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * scale
        s = s.masked_fill(hidden, -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(-1, len(i), 1)], dim=-1)
        p = s.softmax(-1)[..., : len(i)]
        outputs.append(torch.einsum("hqk,khd->qhd", p, values))
    return torch.cat(outputs) if outputs else torch.empty_like(q)
