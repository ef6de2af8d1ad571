"""One call of the attention operator: its tensors, and which kernels it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ext.ops.kept import HOPPER_HEAD_DIMS, reads_by_maps
from dflash_ext.ops.layout import AttentionLayout

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


def gqa_ratio(t: Tensors) -> int:
    """Query heads per key-value head."""
    return t.q.shape[1] // t.k_blk.shape[1]


def attention_path(t: Tensors, layout: AttentionLayout) -> str:
    """Which kernels a call takes: "cpu", "hopper" or "triton" (what Hopper's do not cover)."""
    if not t.q.is_cuda:
        return "cpu"
    covered = (
        HOPPER_TILE % (layout.block_size * gqa_ratio(t)) == 0
        and t.q.shape[2] in HOPPER_HEAD_DIMS
        and tensor_maps_fit(t, layout)
    )
    return _forced_path.get() or ("hopper" if covered else "triton")


def backward_path(t: Tensors, layout: AttentionLayout, path: str) -> str:
    """TMA copies rows of lse from multiples of 16 bytes: fewer than 4 rows a block may not be."""
    aligned = layout.block_size * gqa_ratio(t) % 4 == 0
    return path if aligned or path == "cpu" else "triton"


def tensor_maps_fit(t: Tensors, layout: AttentionLayout) -> bool:
    """Whether the device has kernels that read by tensor maps, and maps can describe t."""
    return (
        reads_by_maps(t.q.device)
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


def contiguous_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def new_lse(t: Tensors) -> Tensor:
    """fp32, room for the log-sum-exp of every row, in the layout and base of who fills it.

    CPU: [Hq, N*B], base e. CUDA: [Hkv, N*B, G], base 2.
    """
    return torch.empty(t.q.shape[1], t.q.shape[0], dtype=torch.float32, device=t.q.device)
