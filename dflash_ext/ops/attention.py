"""DFlash attention: block queries over one context interval each, and over their own block.

Shapes: N blocks, B slots, T context rows, Hq / Hkv query / key-value heads, D head dim.

`dflash_attention` checks, picks the device's kernels and is differentiable;
`dflash_attention_reference` is the naive plain-torch truth beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dflash_ext import _C
from dflash_ext.ops.kept import (
    MAP_HEAD_DIMS,
    ImageCounts,
    KeptDS,
    countable,
    keeps,
    least_ds,
    reads_by_maps,
    take_room,
)
from dflash_ext.ops.layout import AttentionLayout
from dflash_ext.ops.rows import check_pointer, place, readable

HEAD_DIMS = (64, 128, 256)
MAX_GQA_RATIO = 16
CPU_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.bfloat16,)
# The CUDA kernels copy 16 bytes at a time and were promised strides in multiples of 16 elements.
STRIDE_ALIGNMENT = 16
# The Hopper kernels (TMA, wgmma) take tiles of 128 rows, each a whole number of blocks, and are
# compiled for these numbers of own keys.
HOPPER_TILE = 128
HOPPER_OWN_TILES = (16, 32, 64)
TENSOR_NAMES = ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")


class Tensors(NamedTuple):
    q: Tensor
    k_ctx: Tensor
    v_ctx: Tensor
    k_blk: Tensor
    v_blk: Tensor


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
        grouped = lse.view(t.k_blk.shape[1], t.q.shape[0], _gqa_ratio(t))
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


_forced_path: ContextVar[str | None] = ContextVar("forced_path", default=None)


@contextmanager
def forced_path(path: str | None) -> Iterator[None]:
    """Within: calls on CUDA take this path ("triton" runs everywhere), None: the operator's own
    choice. For tests and benchmarks."""
    token = _forced_path.set(path)
    try:
        yield
    finally:
        _forced_path.reset(token)


def _gqa_ratio(t: Tensors) -> int:
    """Query heads per key-value head."""
    return t.q.shape[1] // t.k_blk.shape[1]


def attention_path(t: Tensors, layout: AttentionLayout) -> str:
    """Which kernels a call takes: "cpu", "hopper" or "triton" (what Hopper's do not cover)."""
    if not t.q.is_cuda:
        return "cpu"
    covered = HOPPER_TILE % (layout.block_size * _gqa_ratio(t)) == 0 and _tensor_maps_fit(t, layout)
    return _forced_path.get() or ("hopper" if covered else "triton")


def _backward_path(t: Tensors, layout: AttentionLayout, path: str) -> str:
    """TMA copies rows of lse from multiples of 16 bytes: fewer than 4 rows a block may not be."""
    aligned = layout.block_size * _gqa_ratio(t) % 4 == 0
    return path if aligned or path == "cpu" else "triton"


def _tensor_maps_fit(t: Tensors, layout: AttentionLayout) -> bool:
    """Whether the device has kernels that read by tensor maps, and maps can describe t."""
    return (
        reads_by_maps(t.q.device)
        and t.q.shape[2] in MAP_HEAD_DIMS
        and layout.num_ctx > 0  # a tensor map has no empty tensors
        and layout.num_blocks > 0
        and t.q.shape[0] * t.q.shape[1] < 2**31  # rows of all heads, as TMA counts them
    )


def hopper_own_tile(block_size: int, gqa_ratio: int) -> int:
    """Own keys that a consumer's 64 rows attend to, rounded up to a compiled tile."""
    # A block of 128 rows is split over two consumers: each needs the keys of the whole block.
    whole = block_size * gqa_ratio == HOPPER_TILE
    keys = block_size if whole else HOPPER_TILE // 2 // gqa_ratio
    return min(tile for tile in HOPPER_OWN_TILES if tile >= keys)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, layout, scale = args
        t = Tensors(*tensors)
        path = attention_path(t, layout)
        out, lse = _forward(t, layout, scale, path)
        ctx.save_for_backward(*t, out, lse)
        # Chosen here because autograd's threads know nothing of `forced_path`.
        ctx.layout, ctx.scale, ctx.path = layout, scale, _backward_path(t, layout, path)
        ctx.least_ds = least_ds()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        t = Tensors(*tensors)
        grad_out = readable(grad_outputs[0])
        if ctx.path == "cpu":
            grads = _backward_cpu(t, out, lse, grad_out, ctx.layout, ctx.scale)
        else:
            saved = (t, out, lse, grad_out, ctx.layout, ctx.scale, ctx.path)
            grads = _backward_cuda(*saved, ctx.least_ds)
        return (*grads, None, None)


def _forward(t: Tensors, layout: AttentionLayout, scale: float, path: str) -> tuple[Tensor, Tensor]:
    if path == "cpu":
        return _forward_cpu(t, layout, scale)
    return _forward_cuda(t, layout, scale, path)


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _new_lse(t: Tensors) -> Tensor:
    """fp32, room for the log-sum-exp of every row, in the layout and base of who fills it.

    CPU: [Hq, N*B], base e. CUDA: [Hkv, N*B, G], base 2.
    """
    return torch.empty(t.q.shape[1], t.q.shape[0], dtype=torch.float32, device=t.q.device)


def _cpu_problem(t: Tensors, layout: AttentionLayout, scale: float) -> tuple[Any, list, list]:
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
    strides = [s for x in t for s in x.stride()[:2]]
    return shape, [x.data_ptr() for x in t], strides


def _forward_cpu(t: Tensors, layout: AttentionLayout, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _contiguous_like(t.q), _new_lse(t)
    shape, pointers, strides = _cpu_problem(t, layout, scale)
    _C.attention_cpu_forward(
        shape,
        pointers,
        strides,
        layout.ctx_start.data_ptr(),
        layout.ctx_end.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        torch.get_num_threads(),
    )
    return out, lse


def _backward_cpu(
    t: Tensors, out: Tensor, lse: Tensor, grad_out: Tensor, layout: AttentionLayout, scale: float
) -> list[Tensor]:
    grads = [_contiguous_like(x) for x in t]
    shape, pointers, strides = _cpu_problem(t, layout, scale)
    _C.attention_cpu_backward(
        shape,
        pointers,
        strides,
        layout.ctx_start.data_ptr(),
        layout.ctx_end.data_ptr(),
        out.data_ptr(),
        grad_out.data_ptr(),
        lse.data_ptr(),
        [g.data_ptr() for g in grads],
        torch.get_num_threads(),
    )
    return grads


def _sizes(t: Tensors, layout: AttentionLayout) -> dict[str, Any]:
    return {
        **place(t.q, t.q.shape[2]),
        "num_blocks": layout.num_blocks,
        "num_ctx": layout.num_ctx,
        "num_kv_heads": t.k_blk.shape[1],
        "B": layout.block_size,
        "G": _gqa_ratio(t),
    }


def _mask(layout: AttentionLayout) -> dict[str, int]:
    return {
        "ctx_start_ptr": layout.ctx_start.data_ptr(),
        "ctx_end_ptr": layout.ctx_end.data_ptr(),
        "window": layout.window_or_none,
        "causal": int(layout.causal),
    }


def _addresses(t: Tensors, *names: str) -> dict[str, int]:
    arguments: dict[str, int] = {}
    for name in names:
        x: Tensor = getattr(t, name)
        arguments[f"{name}_ptr"] = x.data_ptr()
        arguments[f"{name}_row"], arguments[f"{name}_head"] = x.stride()[:2]
    return arguments


def _cuda_arguments(t: Tensors, layout: AttentionLayout, scale: float) -> dict[str, Any]:
    """What the kernels that compute scores share (names as in python/dflash_kernels)."""
    return {
        **_sizes(t, layout),
        **_mask(layout),
        **_addresses(t, *TENSOR_NAMES),
        "scale_log2": scale * math.log2(math.e),
    }


def _order(layout: AttentionLayout) -> dict[str, int]:
    assert layout.schedule is not None, "a CUDA layout is built by build_layout"
    return {
        "doc_first_ptr": layout.schedule.doc_first.data_ptr(),
        "doc_last_ptr": layout.schedule.doc_last.data_ptr(),
    }


class _Kernels(NamedTuple):
    """The launchers of a path, and the arguments that only this path takes."""

    forward: Callable[..., None]
    dq: Callable[..., None]
    dkv: tuple[Callable[..., None], ...]
    """Together they make the gradients of all keys and values."""
    dkv_keep: tuple[Callable[..., None], ...]
    """The same, keeping dS; only where `take_room` finds room."""
    extra: dict[str, int]
    memory: Tensor | None
    """Behind `extra`, to be held until the launches are queued."""


def _kernels(t: Tensors, layout: AttentionLayout, path: str) -> _Kernels:
    if path == "triton":
        prefix = "attention_tma_" if _tensor_maps_fit(t, layout) else "attention_"
        names = ("fwd", "bwd_dq", "bwd_dkv", "bwd_own")
        forward, dq, *dkv = (getattr(_C, prefix + name) for name in names)
        keep = (_C.attention_tma_bwd_dkv_keep, _C.attention_tma_bwd_own_keep)
        return _Kernels(forward, dq, tuple(dkv), keep, {}, None)
    own = hopper_own_tile(layout.block_size, _gqa_ratio(t))
    counter = _new_counter(t)
    return _Kernels(
        getattr(_C, f"hopper_fwd_own{own}"),
        getattr(_C, f"hopper_bwd_dq_own{own}"),
        (_C.hopper_bwd_dkv,),
        (_C.hopper_bwd_dkv_keep,),
        {"counter_ptr": counter.data_ptr()},
        counter,
    )


def _new_counter(t: Tensors) -> Tensor:
    """What persistent programs draw their work from; the launcher zeroes it each time."""
    return torch.empty(1, dtype=torch.int32, device=t.q.device)


def _forward_cuda(
    t: Tensors, layout: AttentionLayout, scale: float, path: str
) -> tuple[Tensor, Tensor]:
    out, lse = _contiguous_like(t.q), _new_lse(t)
    kernels = _kernels(t, layout, path)
    kernels.forward(
        out_ptr=out.data_ptr(),
        lse_ptr=lse.data_ptr(),
        **_order(layout),
        **_cuda_arguments(t, layout, scale),
        **kernels.extra,
    )
    return out, lse


def images_of_ds(t: Tensors, layout: AttentionLayout) -> ImageCounts | None:
    """Images of dS that a backward fills at most, or None: it cannot keep dS (kept.py)."""
    if layout.visible_rows is None or not _tensor_maps_fit(t, layout):
        return None
    gqa_ratio = _gqa_ratio(t)
    sizes = layout.block_size, gqa_ratio
    if not (keeps(*sizes, t.q.shape[2]) and countable(layout.num_ctx, layout.num_blocks, *sizes)):
        return None
    return layout.images(t.k_blk.shape[1], gqa_ratio)


def _backward_cuda(
    t: Tensors,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    layout: AttentionLayout,
    scale: float,
    path: str,
    least_ds: int | None,
) -> list[Tensor]:
    dq, dk_ctx, dv_ctx, dk_blk, dv_blk = grads = [_contiguous_like(x) for x in t]
    # rowsum(out * dout) per row; the plain kernels keep pairs (lse, delta) there.
    delta = lse.new_empty((*lse.shape, 2) if path == "triton" else lse.shape)
    assert layout.schedule is not None
    kernels = _kernels(t, layout, path)
    shared = _cuda_arguments(t, layout, scale) | {
        "dout_ptr": grad_out.data_ptr(),
        "lse_ptr": lse.data_ptr(),
        "delta_ptr": delta.data_ptr(),
        "scale": scale,
        **kernels.extra,
    }
    keys = {
        "ranges_ptr": layout.schedule.ranges.data_ptr(),
        "dk_ctx_ptr": dk_ctx.data_ptr(),
        "dv_ctx_ptr": dv_ctx.data_ptr(),
        "dk_blk_ptr": dk_blk.data_ptr(),
        "dv_blk_ptr": dv_blk.data_ptr(),
    }
    counts = images_of_ds(t, layout)
    kept = None if counts is None else take_room(t.q, counts, least_ds)
    if kept is None:
        kernels.dq(out_ptr=out.data_ptr(), dq_ptr=dq.data_ptr(), **_order(layout), **shared)
        for launch in kernels.dkv:
            launch(**keys, **shared)
    else:
        sizes, images = _sizes(t, layout), _images(kept, layout)
        _make_delta(out, lse, grad_out, delta, layout, sizes)
        for launch in kernels.dkv_keep:
            launch(**keys, **images, **shared)
        _sum_kept(t, dq, layout, scale, images | sizes)
    return grads


def _images(kept: KeptDS, layout: AttentionLayout) -> dict[str, int]:
    assert layout.schedule is not None
    return {
        "seen_ptr": layout.schedule.seen.data_ptr(),
        "images_ptr": kept.images.data_ptr(),
        "head_images": kept.counts.head_group,
        "ctx_images": kept.counts.context,
    }


def _make_delta(
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    layout: AttentionLayout,
    sizes: dict[str, Any],
) -> None:
    assert layout.schedule is not None
    assert layout.tiles_seen is not None
    pairs = delta.dim() > lse.dim()
    launch = _C.attention_bwd_delta_pairs if pairs else _C.attention_bwd_delta
    launch(
        out_ptr=out.data_ptr(),
        dout_ptr=grad_out.data_ptr(),
        lse_ptr=lse.data_ptr(),
        delta_ptr=delta.data_ptr(),
        ranges_ptr=layout.schedule.ranges.data_ptr(),
        seen_ptr=layout.schedule.seen.data_ptr(),
        tiles_seen=layout.tiles_seen,
        **sizes,
    )


def _sum_kept(
    t: Tensors, dq: Tensor, layout: AttentionLayout, scale: float, given: dict[str, Any]
) -> None:
    """dQ = scale * dS K; given: `_sizes` and `_images`."""
    assert layout.schedule is not None
    counter = _new_counter(t)
    _C.attention_bwd_dq_kept(
        dq_ptr=dq.data_ptr(),
        counter_ptr=counter.data_ptr(),
        ranges_ptr=layout.schedule.ranges.data_ptr(),
        scale=scale,
        **given,
        **_order(layout),
        **_mask(layout),
        **_addresses(t, "k_ctx", "k_blk"),
    )


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
