"""The Triton kernels' arithmetic, run by Triton's interpreter on the CPU in fp32 and fp16.

bf16 is left to the GPU tests: the interpreter's bf16 `tl.dot` returns garbage. Buffers start as NaN
so that an element nobody writes shows.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import CASES, Case, make_inputs, reference_gradients

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
triton = pytest.importorskip("triton", reason="pip install -e '.[kernels]' brings it")
if triton.__version__ != "3.6.0":
    pytest.skip("these are sources for Triton 3.6.0", allow_module_level=True)

from dflash_kernels import attention  # noqa: E402
from dflash_kernels import layout as layout_kernels  # noqa: E402

from dflash_ext.ops.layout import AttentionLayout, Schedule, schedule_reference  # noqa: E402

KEY_TILE = 16  # small tiles: full, partial and empty tiles all occur in small problems
ROW_TILE = 32


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def run_schedule(layout: AttentionLayout) -> Schedule:
    tiles = -(-layout.num_ctx // KEY_TILE)
    made = Schedule(
        torch.full((tiles, 4), -1, dtype=torch.int32),
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
        BN=KEY_TILE,
        GROUP=4,
        CHUNK=8,
    )
    return made


def run_attention(t: tuple[torch.Tensor, ...], layout: AttentionLayout, dout: torch.Tensor) -> list:
    """Output and the five gradients through the three kernels."""
    q, k_ctx, _, k_blk, _ = t
    (rows, Hq, D), Hkv, T = q.shape, k_blk.shape[1], layout.num_ctx
    B, G = layout.block_size, Hq // Hkv
    schedule = run_schedule(layout)
    out, dq = nan(*q.shape, dtype=q.dtype), nan(*q.shape, dtype=q.dtype)
    dk, dv = nan(*k_ctx.shape, dtype=q.dtype), nan(*k_ctx.shape, dtype=q.dtype)
    dk_blk, dv_blk = nan(*k_blk.shape, dtype=q.dtype), nan(*k_blk.shape, dtype=q.dtype)
    lse, delta = nan(Hq, rows), nan(Hq, rows)
    strides = [s for x in t for s in x.stride()[:2]]
    sizes = [layout.num_blocks, T, Hkv, B, G, layout.window_or_none, int(layout.causal)]
    scale = D**-0.5
    log2 = scale * math.log2(math.e)
    interval = (layout.ctx_start, layout.ctx_end)
    order = (schedule.doc_first, schedule.doc_last)
    row_grid = (-(-rows * G // ROW_TILE) * Hkv,)
    tile = dict(D=D, M=ROW_TILE, BN=KEY_TILE, STAGES=1)
    attention.attention_fwd_kernel[row_grid](
        *t, out, lse, *interval, *order, *strides, *sizes, log2, OWN=16, **tile
    )
    attention.attention_bwd_dq_kernel[row_grid](
        *t,
        out,
        dout,
        lse,
        delta,
        dq,
        *interval,
        *order,
        *strides,
        *sizes,
        log2,
        scale,
        OWN=16,
        **tile,
    )
    key_grid = ((-(-T // KEY_TILE) + -(-rows // KEY_TILE)) * Hkv,)
    attention.attention_bwd_dkv_kernel[key_grid](
        *t, dout, lse, delta, dk, dv, dk_blk, dv_blk, *interval, schedule.ranges,
        *strides, *sizes, log2, scale, **tile,
    )  # fmt: skip
    return [out, dq, dk, dv, dk_blk, dv_blk]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_match_reference(case: Case, dtype: torch.dtype) -> None:
    t, layout, dout = make_inputs(case, dtype=dtype)
    truth = reference_gradients(t, layout, dout, torch.float64)
    ours = run_attention(t, layout, dout)
    # fp16 rounds probabilities and dS to 2^-11 as bf16 does on the GPU, so its bound is loose.
    bound = 3e-6 if dtype == torch.float32 else 4e-3
    for name, x, y in zip(("out", "dq", "dk", "dv", "dk_blk", "dv_blk"), ours, truth, strict=True):
        assert x.isfinite().all(), f"{name} has elements that were not written or are not finite"
        error = (x.double() - y).norm() / y.norm().clamp(min=1e-6)
        assert error < bound, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_kernel_matches_searches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _, layout, _ = make_inputs(case)
    monkeypatch.setattr("dflash_ext.ops.layout._C", type("C", (), {"KEY_TILE": KEY_TILE}))
    for ours, truth in zip(run_schedule(layout), schedule_reference(layout), strict=True):
        assert torch.equal(ours, truth)
