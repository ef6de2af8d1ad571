"""Memory to keep dS between an attention backward's kernels: how much, and whether it is taken.

With it the backward computes five matrix products, without it seven (hopper_kept.py under python/
says how dS lies there). Both round dS alike; sums come in another order, so that the last bits of
dQ and dK differ. Which way is taken follows from sizes, and after memory ran out once it is the
second for the rest of the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ext import _C

SHARE = 1 / 16
"""Of the device's memory, at most. A drafter's rank takes 12 to 50 GiB; sm_90 has 80 and more."""
IMAGE_ROWS = 64  # rows, and keys, of one image of dS
# Of the hopper path, of the kernels around kept dS, and of those that make dK and dV in one launch.
HOPPER_HEAD_DIMS = (64, 128)
LARGEST_BLOCK_ROWS = 128  # of a block and head group: a tile of rows holds whole blocks


def tiles_seen(visible_rows: int, num_blocks: int, window: int) -> int:
    """Context tiles that blocks see at most, summed over blocks, if they see `visible_rows`.

    n rows in a run touch at most n // KEY_TILE + 2 tiles.
    """
    return max(0, min(visible_rows, num_blocks * window)) // _C.KEY_TILE + 2 * num_blocks


class ImageCounts(NamedTuple):
    """Images of dS that a layout fills at most."""

    total: int
    head_group: int
    """Of one head group: as many of a key-value head's query heads as are a power of two."""
    context: int
    """The first of a head group's; the others are of the blocks' own keys."""


def _head_group(gqa_ratio: int) -> int:
    return gqa_ratio & -gqa_ratio


def keeps(block_size: int, gqa_ratio: int, head_dim: int) -> bool:
    """Whether there are kernels that keep dS of such blocks."""
    block_rows = block_size * _head_group(gqa_ratio)
    return head_dim in HOPPER_HEAD_DIMS and block_rows <= LARGEST_BLOCK_ROWS


def countable(num_ctx: int, num_blocks: int, block_size: int, gqa_ratio: int) -> bool:
    """The kernels count rows of all blocks that see a tile in 32 bits, whatever the host says."""
    tiles = -(-num_ctx // _C.KEY_TILE)
    return num_blocks * tiles * block_size * _head_group(gqa_ratio) < 2**31


def image_counts(
    *,
    tiles_seen: int,
    num_ctx: int,
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    gqa_ratio: int,
) -> ImageCounts:
    block_rows = block_size * _head_group(gqa_ratio)
    context = tiles_seen * block_rows // IMAGE_ROWS + 2 * -(-num_ctx // _C.KEY_TILE)
    head_group = context + -(-num_blocks * block_rows // IMAGE_ROWS)
    return ImageCounts(
        head_group * kv_heads * (gqa_ratio // _head_group(gqa_ratio)), head_group, context
    )


def image_bytes(images: int) -> int:
    """Of images in bf16."""
    return images * IMAGE_ROWS * IMAGE_ROWS * 2


def ds_limit(device: torch.device) -> int:
    """Bytes that dS may take on a CUDA device; 0 if its kernels keep none."""
    if device.type != "cuda" or not reads_by_maps(device):
        return 0
    return int(SHARE * torch.cuda.get_device_properties(device).total_memory)


def reads_by_maps(device: torch.device) -> bool:
    """Whether a CUDA device runs our kernels for tensor maps: those of sm_90."""
    return _C.device_images(device.index) == (90, False)


_short: set[int | None] = set()
"""Indices of devices whose memory ran out: asking again would empty torch's cache each time, and a
repeated run would not repeat its bits."""

_least: ContextVar[int | None] = ContextVar("least_ds", default=0)


@contextmanager
def room_for_ds(least: int | None) -> Iterator[None]:
    """Backwards of forwards within take at least so many bytes for dS (up to the limit), as a
    rehearsal of larger batches; None: they compute dS again, as where memory is short."""
    token = _least.set(least)
    try:
        yield
    finally:
        _least.reset(token)


def least_ds() -> int | None:
    """What `room_for_ds` set; to be asked in the forward, since autograd's threads do not know."""
    return _least.get()


class KeptDS(NamedTuple):
    """Memory for the images of one backward."""

    images: Tensor
    """bf16, 1-D: room for `counts.total` images or more."""
    counts: ImageCounts


def bytes_for(counts: ImageCounts, device: torch.device) -> int:
    """What images take on a device; 0: dS is computed again, for want of memory."""
    needed = image_bytes(counts.total)
    return needed if needed <= ds_limit(device) and device.index not in _short else 0


def take_room(like: Tensor, counts: ImageCounts, least: int | None) -> KeptDS | None:
    """Memory for images on the device of `like`, or None: compute dS again.

    To be asked for after everything that either way needs.
    """
    device = like.device
    if least is None or device.index in _short:
        return None
    needed = bytes_for(counts, device)
    wanted = max(needed, min(least, ds_limit(device))) if least else needed
    try:
        images = like.new_empty(wanted // like.element_size())
    except torch.OutOfMemoryError:
        _short.add(device.index)
        warnings.warn(
            f"{device} has no memory to keep dS: from now on attention's backward recomputes it",
            stacklevel=1,
        )
        return None
    return KeptDS(images, counts) if needed else None
