"""Launches of the CUDA attention kernels (python/dflash_kernels names their arguments)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_ext import _C
from dflash_ext.ops.attention_call import (
    TENSOR_NAMES,
    Tensors,
    contiguous_like,
    gqa_ratio,
    hopper_own_tile,
    new_lse,
    tensor_maps_fit,
)
from dflash_ext.ops.kept import HOPPER_HEAD_DIMS, ImageCounts, KeptDS, countable, keeps, take_room
from dflash_ext.ops.layout import AttentionLayout
from dflash_ext.ops.rows import place


def _sizes(t: Tensors, layout: AttentionLayout) -> dict[str, Any]:
    return {
        **place(t.q, t.q.shape[2]),
        "num_blocks": layout.num_blocks,
        "num_ctx": layout.num_ctx,
        "num_kv_heads": t.k_blk.shape[1],
        "B": layout.block_size,
        "G": gqa_ratio(t),
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


def _arguments(t: Tensors, layout: AttentionLayout, scale: float) -> dict[str, Any]:
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
        if not tensor_maps_fit(t, layout):
            plain = (_C.attention_bwd_dkv, _C.attention_bwd_own)
            return _Kernels(_C.attention_fwd, _C.attention_bwd_dq, plain, (), {}, None)
        forward, dq = _C.attention_tma_fwd, _C.attention_tma_bwd_dq
        if t.q.shape[2] not in HOPPER_HEAD_DIMS:
            apart = (_C.attention_tma_bwd_dk, _C.attention_tma_bwd_dv, _C.attention_bwd_own)
            return _Kernels(forward, dq, apart, (), {}, None)
        together = (_C.attention_tma_bwd_dkv, _C.attention_tma_bwd_own)
        keep = (_C.attention_tma_bwd_dkv_keep, _C.attention_tma_bwd_own_keep)
        return _Kernels(forward, dq, together, keep, {}, None)
    own = hopper_own_tile(layout.block_size, gqa_ratio(t))
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


def forward(t: Tensors, layout: AttentionLayout, scale: float, path: str) -> tuple[Tensor, Tensor]:
    out, lse = contiguous_like(t.q), new_lse(t)
    kernels = _kernels(t, layout, path)
    kernels.forward(
        out_ptr=out.data_ptr(),
        lse_ptr=lse.data_ptr(),
        **_order(layout),
        **_arguments(t, layout, scale),
        **kernels.extra,
    )
    return out, lse


def images_of_ds(t: Tensors, layout: AttentionLayout) -> ImageCounts | None:
    """Images of dS that a backward fills at most, or None: it cannot keep dS (kept.py)."""
    if layout.visible_rows is None or not tensor_maps_fit(t, layout):
        return None
    ratio = gqa_ratio(t)
    sizes = layout.block_size, ratio
    if not (keeps(*sizes, t.q.shape[2]) and countable(layout.num_ctx, layout.num_blocks, *sizes)):
        return None
    return layout.images(t.k_blk.shape[1], ratio)


def backward(
    t: Tensors,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    layout: AttentionLayout,
    scale: float,
    path: str,
    least_ds: int | None,
) -> list[Tensor]:
    dq, dk_ctx, dv_ctx, dk_blk, dv_blk = grads = [contiguous_like(x) for x in t]
    # rowsum(out * dout) per row; the plain kernels keep pairs (lse, delta) there.
    delta = lse.new_empty((*lse.shape, 2) if path == "triton" else lse.shape)
    assert layout.schedule is not None
    kernels = _kernels(t, layout, path)
    shared = _arguments(t, layout, scale) | {
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
