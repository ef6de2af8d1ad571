"""The Triton kernels' arithmetic, run by Triton's interpreter on the CPU in fp32 and fp16.

bf16 is left to the GPU tests: the interpreter's bf16 `tl.dot` returns garbage. Buffers start as NaN
so that an element nobody writes shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import CASES, Case, make_inputs, reference_gradients
from triton_sources import skip_module_without_triton

skip_module_without_triton()

from dflash_kernels import (  # noqa: E402
    attention_backward,
    attention_forward,
    attention_kept,
)
from dflash_kernels import layout as layout_kernels  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from dflash_ext.ops.attention import visible_pairs  # noqa: E402
from dflash_ext.ops.layout import AttentionLayout, Schedule, schedule_reference  # noqa: E402

KEY_TILE = 16  # small tiles: full, partial and empty tiles all occur in small problems


@dataclass(frozen=True)
class Tiles:
    """One choice of constexprs for the three kernels."""

    name: str
    rows: int = 32
    pair: int = 0
    own: int = 16
    keys: int = 16
    """Context rows per tile of the row kernels and of the dK/dV kernel."""
    heads: int = 1
    """Query heads in a tile of the dK/dV kernel; 0: as many as divide G, with tensor maps."""
    apart: bool = False
    """dK and dV in a launch each and own keys without maps, as at head_dim 256."""

    def __str__(self) -> str:
        return self.name


TILES = (
    Tiles("single", rows=64),
    Tiles("pair", rows=64, pair=1, own=32, keys=32),
    Tiles("maps", rows=64, pair=1, heads=0),
    Tiles("apart", rows=64, heads=0, apart=True),
)


@pytest.fixture(autouse=True)
def memcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element that a kernel loads or stores lies in one of the tensors it was given (by
    position; atomics are not looked at)."""
    begins, ends = np.empty(0, np.int64), np.empty(0, np.int64)
    to_host = interpreter.GridExecutor._init_args_hst
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def remember(self: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        nonlocal begins, ends
        host = to_host(self, args, kwargs)
        tensors = [getattr(x, "base", x) for x in host[0]]
        spans = sorted(
            (x.data_ptr(), x[-1].data_ptr() + x[-1].nbytes)
            for x in tensors
            if isinstance(x, torch.Tensor) and x.numel()
        )
        begins, ends = (np.array(x, np.int64) for x in zip(*spans, strict=True))
        return host

    def check(ptrs: Any, mask: Any) -> None:
        at = ptrs.data[mask.data].astype(np.int64)
        span = np.searchsorted(begins, at, side="right") - 1
        outside = np.count_nonzero((span < 0) | (at >= ends[span]))
        assert outside == 0, f"{outside} of {at.size} elements lie outside of every argument"

    def checked_load(self: object, ptrs: Any, mask: Any, *rest: object, **named: object) -> object:
        check(ptrs, mask)
        return load(self, ptrs, mask, *rest, **named)

    def checked_store(
        self: object, ptrs: Any, value: Any, mask: Any, *rest: object, **named: object
    ) -> object:
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", remember)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def run_schedule(layout: AttentionLayout, key_tile: int = KEY_TILE) -> Schedule:
    tiles = -(-layout.num_ctx // key_tile)
    made = Schedule(
        torch.full((tiles, 4), -1, dtype=torch.int32),
        torch.full((tiles,), -1, dtype=torch.int32),
        torch.full((layout.num_blocks,), -1, dtype=torch.int32),
        torch.full((layout.num_blocks,), -1, dtype=torch.int32),
    )
    layout_kernels.attention_layout_kernel[(tiles + -(-layout.num_blocks // 4),)](
        layout.ctx_start,
        layout.ctx_end,
        *made,
        layout.num_blocks,
        layout.num_ctx,
        layout.block_size,
        layout.window_or_none,
        BN=key_tile,
        GROUP=4,
        CHUNK=8,
    )
    return made


def descriptor(x: torch.Tensor, rows: int, heads: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, heads, x.shape[2]])


def run_attention(
    t: tuple[torch.Tensor, ...], layout: AttentionLayout, dout: torch.Tensor, tiles: Tiles
) -> list[torch.Tensor]:
    """Output and the five gradients through the three kernels."""
    q, k_ctx, v_ctx, k_blk, _ = t
    (rows, Hq, D), Hkv, T = q.shape, k_blk.shape[1], layout.num_ctx
    B, G = layout.block_size, Hq // Hkv
    schedule = run_schedule(layout)
    out, dq = nan(*q.shape, dtype=q.dtype), nan(*q.shape, dtype=q.dtype)
    dk, dv = nan(*k_ctx.shape, dtype=q.dtype), nan(*k_ctx.shape, dtype=q.dtype)
    dk_blk, dv_blk = nan(*k_blk.shape, dtype=q.dtype), nan(*k_blk.shape, dtype=q.dtype)
    lse, pairs = nan(Hq, rows), nan(Hq, rows, 2)
    strides = [s for x in t for s in x.stride()[:2]]
    options = [layout.window_or_none, int(layout.causal)]
    scale = D**-0.5
    log2 = scale * math.log2(math.e)
    interval = (layout.ctx_start, layout.ctx_end)
    order = (schedule.doc_first, schedule.doc_last)
    row_grid = (-(-rows * G // tiles.rows) * Hkv,)
    sizes = [layout.num_blocks, Hkv, B, G]
    maps = int(tiles.heads == 0 and T > 0)
    key_maps = [descriptor(x, tiles.keys, 1) if maps else 0 for x in (k_ctx, v_ctx)]
    tile = dict(D=D, M=tiles.rows, BN=tiles.keys, OWN=tiles.own, STAGES=1, EDGE_STAGES=1, TMA=maps)
    attention_forward.attention_fwd_kernel[row_grid](
        *t, *key_maps, out, lse, *interval, *order, *strides, *sizes, *options, log2,
        PAIR=tiles.pair, **tile,
    )  # fmt: skip
    attention_backward.attention_bwd_dq_kernel[row_grid](
        *t, *key_maps, out, dout, lse, pairs, dq, *interval, *order,
        *strides, *sizes, *options, log2, scale, **tile,
    )  # fmt: skip
    M = 32
    launches = [(0, T, maps, 1, 1), (1, rows, maps, 1, 1)]
    if tiles.apart:
        launches = [(0, T, maps, 1, 0), (0, T, maps, 0, 1), (1, rows, 0, 1, 1)]
    for own, keys, mapped, with_dk, with_dv in launches:
        if keys == 0:
            continue
        heads = G & -G if mapped else 1
        row_maps = [descriptor(x, M // heads, heads) if mapped else 0 for x in (q, dout)]
        attention_backward.attention_bwd_dkv_kernel[(-(-keys // tiles.keys) * Hkv,)](
            *t, *row_maps, dout, pairs, dk, dv, dk_blk, dv_blk, 0, *interval, schedule.ranges, 0,
            *strides, layout.num_blocks, T, Hkv, 0, 0, B, G, heads, *options, log2, scale,
            D=D, BN=tiles.keys, M=M, EDGE=16, KEY_TILE=KEY_TILE, STAGES=1, EDGE_STAGES=1,
            TMA=mapped, OWN=own, KEEP=0, DK=with_dk, DV=with_dv,
        )  # fmt: skip
    return [out, dq, dk, dv, dk_blk, dv_blk]


@pytest.mark.parametrize(
    ("tiles", "dtype"),
    [(tiles, torch.float16 if tiles.name == "pair" else torch.float32) for tiles in TILES],
    ids=lambda x: str(x).removeprefix("torch."),
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_match_reference(case: Case, tiles: Tiles, dtype: torch.dtype) -> None:
    t, layout, dout = make_inputs(case, dtype=dtype)
    truth = reference_gradients(t, layout, dout, torch.float64)
    ours = run_attention(t, layout, dout, tiles)
    # fp16 rounds probabilities and dS to 2^-11 as bf16 does on the GPU, so its bound is loose.
    bound = 3e-6 if dtype == torch.float32 else 4e-3
    for name, x, y in zip(("out", "dq", "dk", "dv", "dk_blk", "dv_blk"), ours, truth, strict=True):
        assert x.isfinite().all(), f"{name} has elements that were not written or are not finite"
        error = (x.double() - y).norm() / y.norm().clamp(min=1e-6)
        assert error < bound, f"{name}: relative error {error:.2e}"


KEPT_KEYS = 64  # keys and rows of an image


def dq_of_images(
    images: torch.Tensor, layout: AttentionLayout, schedule: Schedule, t: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """dS K, unscaled, from images as hopper_kept.py describes them, one image at a time."""
    q, k_ctx, _, k_blk, _ = t
    (rows, Hq, D), Hkv, T = q.shape, k_blk.shape[1], layout.num_ctx
    G = Hq // Hkv
    heads = G & -G
    tokens = 64 // heads
    block_rows = layout.block_size * heads
    _, head_images, ctx_images = layout.images(Hkv, G)
    dq = torch.zeros(rows, Hq, D, dtype=torch.float64)

    def add(image: int, group: int, k: torch.Tensor, first: int, head: int) -> None:
        x = images[image].double().view(4, 4, 8, 4, 2, 2, 2)  # w, v, l, m, j, i, bit
        ds = x.permute(1, 4, 3, 6, 0, 5, 2).reshape(64, 64)  # rows 16v+8j+2m+bit, keys 16w+8i+l
        keys = min(64, k.shape[0] - first)
        product = ds[:, :keys] @ k[first : first + keys].double()
        for r in range(64):
            token = group * tokens + r // heads
            if token < rows:
                dq[token, head + r % heads] += product[r]

    for h in range(Hq // heads):
        kv_head = h * heads // G
        for n in range(-(-T // 64)):
            see_lo, _, _, see_hi = schedule.ranges[n].tolist()
            lo = see_lo * block_rows // 64
            hi = -(-see_hi * block_rows // 64) if see_hi > see_lo else lo
            first = int(schedule.seen[n]) * block_rows // 64 + 2 * n - lo
            for group in range(lo, hi):
                at = h * head_images + first + group
                assert first + group < ctx_images
                add(at, group, k_ctx[:, kv_head], n * 64, h * heads)
        for group in range(-(-rows * heads // 64)):
            own = group * tokens // 64 * 64
            add(h * head_images + ctx_images + group, group, k_blk[:, kv_head], own, h * heads)
    return dq


def run_kept(
    t: tuple[torch.Tensor, ...], layout: AttentionLayout, out: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    """dQ (of the images), dK and dV of the context, of the blocks, with dS kept."""
    q, k_ctx, _, k_blk, _ = t
    (rows, Hq, D), Hkv, T = q.shape, k_blk.shape[1], layout.num_ctx
    B, G = layout.block_size, Hq // Hkv
    heads, scale = G & -G, D**-0.5
    schedule = run_schedule(layout, KEPT_KEYS)
    count, head_images, ctx_images = layout.images(Hkv, G)
    images = nan(count, 64 * 64)
    keys = torch.cat([k_ctx, k_blk]).nan_to_num().repeat_interleave(G, dim=1)
    score = torch.einsum("qhd,khd->hqk", q, keys).masked_fill(~visible_pairs(layout), -torch.inf)
    lse = (score * scale).logsumexp(-1) * math.log2(math.e)  # [Hq, rows]
    lse = torch.where(lse.isinf(), math.inf, lse).view(Hkv, G, rows).transpose(1, 2).contiguous()
    pairs = nan(Hkv, rows, G, 2)
    attention_kept.attention_bwd_delta_kernel[(-(-rows * Hq // 16),)](
        out.contiguous(), dout, lse, pairs, schedule.ranges, schedule.seen,
        rows * Hq, T, Hkv, G, layout.tiles_seen,
        D=D, M=16, KEY_TILE=KEPT_KEYS, PAIRS=1,
    )  # fmt: skip
    dk, dv = nan(*k_ctx.shape), nan(*k_ctx.shape)
    dk_blk, dv_blk = nan(*k_blk.shape), nan(*k_blk.shape)
    maps = [descriptor(x, 64 // heads, heads) for x in (q, dout)]
    for own, number in ((0, T), (1, rows)):
        attention_backward.attention_bwd_dkv_kernel[(-(-number // 64) * Hkv,)](
            *t, *maps, dout, pairs, dk, dv, dk_blk, dv_blk, images,
            layout.ctx_start, layout.ctx_end, schedule.ranges, schedule.seen,
            *(s for x in t for s in x.stride()[:2]), layout.num_blocks, T, Hkv,
            head_images, ctx_images, B, G, heads, layout.window_or_none, int(layout.causal),
            scale * math.log2(math.e), scale,
            D=D, BN=64, M=64, EDGE=32, KEY_TILE=KEPT_KEYS, STAGES=1, EDGE_STAGES=1, TMA=1, OWN=own,
            KEEP=1, DK=1, DV=1,
        )  # fmt: skip
    return [dq_of_images(images, layout, schedule, t) * scale, dk, dv, dk_blk, dv_blk]


@pytest.mark.parametrize("case", [c for c in CASES if sum(c.documents) and c.G < 16], ids=str)
def test_kept_scores_give_dq(case: Case) -> None:
    """dK/dV with dS kept: the same gradients, and images whose product with K is dQ."""
    t, layout, dout = make_inputs(case)
    out, *truth = reference_gradients(t, layout, dout, torch.float64)
    ours = run_kept(t, layout, out.float(), dout)
    for name, x, y in zip(("dq", "dk", "dv", "dk_blk", "dv_blk"), ours, truth, strict=True):
        assert x.isfinite().all(), name
        error = (x.double() - y).norm() / y.norm().clamp(min=1e-6)
        assert error < 3e-6, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("document", [0, 1])
def test_nan_of_a_document_stays_out_of_another_s_keys_with_scores_kept(document: int) -> None:
    """Images hold whole groups of 64 rows, also of blocks that see none of the keys."""
    case = Case("two", (64, 64), (20, 50, 80, 120), B=4, G=2)
    t, layout, dout = make_inputs(case)
    out = reference_gradients(t, layout, dout, torch.float32)[0].contiguous()
    before = run_kept(t, layout, out, dout)
    dout.view(2, 2 * case.B, -1)[document] = math.nan
    after = run_kept(t, layout, out, dout)
    for x, y in zip(before[1:3], after[1:3], strict=True):
        assert torch.equal(x.view(2, 64, -1)[1 - document], y.view(2, 64, -1)[1 - document])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_kernel_matches_searches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _, layout, _ = make_inputs(case)
    monkeypatch.setattr("dflash_ext.ops.layout._C", type("C", (), {"KEY_TILE": KEY_TILE}))
    for ours, truth in zip(run_schedule(layout), schedule_reference(layout), strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_nan_in_rows_that_nobody_sees_stays_there(tiles: Tiles) -> None:
    """Tiles reach past the last visible row; what is there must not enter even as 0 * NaN."""
    case = Case("unseen", (70,), (9, 17, 40), B=8, padding=2)
    t, layout, dout = make_inputs(case)
    before = run_attention(t, layout, dout, tiles)
    seen = max(case.anchors)
    for x in t[1:3]:
        x[seen:] = math.nan
    after = run_attention(t, layout, dout, tiles)
    for i in (0, 1, 4, 5):
        assert torch.equal(before[i], after[i])
    for i in (2, 3):
        assert torch.equal(before[i][:seen], after[i][:seen])
