"""DFlash attention: block queries over one context interval each, and over their own block.

Shapes: N blocks, B slots, T context rows, Hq / Hkv query / key-value heads, D head dim.

`dflash_attention` checks, picks the device's kernels and is differentiable;
`dflash_attention_reference` is the naive plain-torch truth beside it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_ext.ops import attention_cpu, attention_cuda
from dflash_ext.ops.attention_call import (
    TENSOR_NAMES,
    Tensors,
    attention_path,
    backward_path,
    gqa_ratio,
)
from dflash_ext.ops.kept import least_ds
from dflash_ext.ops.layout import AttentionLayout
from dflash_ext.ops.rows import check_pointer, readable

HEAD_DIMS = (64, 128, 256)
MAX_GQA_RATIO = 16
CPU_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.bfloat16,)
# The CUDA kernels copy 16 bytes at a time and were promised strides in multiples of 16 elements.
STRIDE_ALIGNMENT = 16


def dflash_attention(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    layout: AttentionLayout,
    *,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of every block over its visible context and itself, [N*B, Hq, D].

    q [N*B, Hq, D]; k_ctx, v_ctx [T, Hkv, D]; k_blk, v_blk [N*B, Hkv, D]; Hq a multiple of Hkv.
    bf16 on CUDA, fp32 or bf16 on the CPU, arithmetic in fp32. Row and head strides are free (on
    CUDA: multiples of 16 elements), the innermost stride is 1, so slices of a fused projection need
    no copy. `scale` defaults to D**-0.5. Differentiable once, in all five tensors;
    bit-reproducible. The visible pairs are semantics.md's "Attention mask"; a padding block gets
    output 0 and gradient 0.

    Raises ValueError, naming what is supported, before anything is launched.
    """
    t = Tensors(q, k_ctx, v_ctx, k_blk, v_blk)
    return _Attention.apply(*t, layout, _check(t, layout, scale))


def dflash_attention_forward(
    q: Tensor,
    k_ctx: Tensor,
    v_ctx: Tensor,
    k_blk: Tensor,
    v_blk: Tensor,
    layout: AttentionLayout,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`dflash_attention` without autograd, and fp32 [Hq, N*B]: log of the sum of exp(scores).

    Of a padding row it is 0 on the CPU, infinite on CUDA.
    """
    t = Tensors(q, k_ctx, v_ctx, k_blk, v_blk)
    scale, path = _check(t, layout, scale), attention_path(t, layout)
    out, lse = _forward(t, layout, scale, path)
    if path != "cpu":  # base 2, and the heads of a group beside each other
        grouped = lse.view(t.k_blk.shape[1], t.q.shape[0], gqa_ratio(t))
        lse = grouped.transpose(1, 2).flatten(0, 1) * math.log(2)
    return out, lse


def _check(t: Tensors, layout: AttentionLayout, scale: float | None) -> float:
    """ValueError unless the kernels can do it; returns the scale."""
    _check_tensors(t, layout)
    scale = t.q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale {scale} must be finite and positive")
    return scale


def _check_tensors(t: Tensors, layout: AttentionLayout) -> None:
    rows, T = layout.num_blocks * layout.block_size, layout.num_ctx
    if t.q.dim() != 3 or t.k_blk.dim() != 3:
        raise ValueError(
            f"q and k_blk must be [rows, heads, head_dim], got {tuple(t.q.shape)} and "
            f"{tuple(t.k_blk.shape)}"
        )
    Hq, D = t.q.shape[1:]
    Hkv = t.k_blk.shape[1]
    if D not in HEAD_DIMS:
        raise ValueError(f"head_dim {D} is not supported: use one of {HEAD_DIMS}")
    if Hkv == 0 or Hq % Hkv or not 1 <= Hq // Hkv <= MAX_GQA_RATIO:
        raise ValueError(
            f"{Hq} query heads over {Hkv} key-value heads: the ratio must be a whole number from 1 "
            f"to {MAX_GQA_RATIO}"
        )
    expected = {
        "q": (rows, Hq, D),
        "k_ctx": (T, Hkv, D),
        "v_ctx": (T, Hkv, D),
        "k_blk": (rows, Hkv, D),
        "v_blk": (rows, Hkv, D),
    }
    device, dtype = t.q.device, t.q.dtype
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device} is not supported: use cpu or cuda")
    dtypes = CUDA_DTYPES if device.type == "cuda" else CPU_DTYPES
    if dtype not in dtypes:
        raise ValueError(f"dtype {dtype} is not supported on {device.type}: use one of {dtypes}")
    if layout.ctx_start.device != device:
        raise ValueError(f"layout is on {layout.ctx_start.device}, q on {device}")
    for name, x in zip(TENSOR_NAMES, t):
        if tuple(x.shape) != expected[name]:
            raise ValueError(f"{name} is {tuple(x.shape)}, expected {expected[name]}")
        if x.device != device or x.dtype != dtype:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {dtype} on {device}")
        if x.numel() and x.stride(-1) != 1:
            raise ValueError(f"{name} has innermost stride {x.stride(-1)}: call .contiguous()")
        if device.type == "cuda" and x.numel():
            _check_alignment(name, x)


def _check_alignment(name: str, x: Tensor) -> None:
    check_pointer(name, x)
    row, head, _ = x.stride()
    if row % STRIDE_ALIGNMENT or head % STRIDE_ALIGNMENT:
        raise ValueError(
            f"{name} has strides {x.stride()}: row and head strides must be multiples of "
            f"{STRIDE_ALIGNMENT} elements, call .contiguous()"
        )
    # Rows are addressed in 64 bits, the bytes of one row in 32.
    if row >= 2**30 or x.shape[1] * head >= 2**30:
        raise ValueError(
            f"{name} has strides {x.stride()}: one row must span less than 2**30 elements, call "
            ".contiguous()"
        )


def _forward(t: Tensors, layout: AttentionLayout, scale: float, path: str) -> tuple[Tensor, Tensor]:
    if path == "cpu":
        return attention_cpu.forward(t, layout, scale)
    return attention_cuda.forward(t, layout, scale, path)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, layout, scale = args
        t = Tensors(*tensors)
        path = attention_path(t, layout)
        out, lse = _forward(t, layout, scale, path)
        ctx.save_for_backward(*t, out, lse)
        # Chosen here because autograd's threads know nothing of `forced_path`.
        ctx.layout, ctx.scale, ctx.path = layout, scale, backward_path(t, layout, path)
        ctx.least_ds = least_ds()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        t = Tensors(*tensors)
        grad_out = readable(grad_outputs[0])
        if ctx.path == "cpu":
            grads = attention_cpu.backward(t, out, lse, grad_out, ctx.layout, ctx.scale)
        else:
            saved = (t, out, lse, grad_out, ctx.layout, ctx.scale, ctx.path)
            grads = attention_cuda.backward(*saved, ctx.least_ds)
        return (*grads, None, None)


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
