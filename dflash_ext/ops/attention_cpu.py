"""Launches of the C++ attention kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_ext import _C
from dflash_ext.ops.attention_call import Tensors, contiguous_like, new_lse
from dflash_ext.ops.layout import AttentionLayout


def _problem(
    t: Tensors, layout: AttentionLayout, scale: float
) -> tuple[Any, list[int], list[int], int, int]:
    """What both passes begin with: shape, pointers, strides, ctx_start, ctx_end."""
    shape = _C.CpuShape(
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        num_ctx=layout.num_ctx,
        q_heads=t.q.shape[1],
        kv_heads=t.k_blk.shape[1],
        head_dim=t.q.shape[2],
        window=layout.window or 0,
        causal=layout.causal,
        scale=scale,
        bf16=t.q.dtype == torch.bfloat16,
    )
    pointers = [x.data_ptr() for x in t]
    strides = [s for x in t for s in x.stride()[:2]]
    return shape, pointers, strides, layout.ctx_start.data_ptr(), layout.ctx_end.data_ptr()


def forward(t: Tensors, layout: AttentionLayout, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = contiguous_like(t.q), new_lse(t)
    _C.attention_cpu_forward(
        *_problem(t, layout, scale), out.data_ptr(), lse.data_ptr(), torch.get_num_threads()
    )
    return out, lse


def backward(
    t: Tensors, out: Tensor, lse: Tensor, grad_out: Tensor, layout: AttentionLayout, scale: float
) -> list[Tensor]:
    grads = [contiguous_like(x) for x in t]
    _C.attention_cpu_backward(
        *_problem(t, layout, scale),
        out.data_ptr(),
        grad_out.data_ptr(),
        lse.data_ptr(),
        [g.data_ptr() for g in grads],
        torch.get_num_threads(),
    )
    return grads
