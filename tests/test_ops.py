"""The checked wrapper: what it refuses and how, the GIL, and no silent double backward."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from attention_cases import Case, case_layout, make_inputs

from dflash_ext.ops.attention import _check_alignment, dflash_attention
from dflash_ext.ops.layout import build_layout

CASE = Case("refusals", (40, 20), (3, 39, 45), B=8, Hkv=2, G=2)


def refused(message: str, *changes: tuple[int, torch.Tensor], **options: float) -> None:
    tensors, layout, _ = make_inputs(CASE)
    inputs = list(tensors)
    for index, tensor in changes:
        inputs[index] = tensor
    with pytest.raises(ValueError, match=message):
        dflash_attention(*inputs, layout, **options)


def test_unsupported_inputs_are_refused_with_the_supported_set() -> None:
    t, _, _ = make_inputs(CASE)
    q, k_ctx = t[0], t[1]
    refused(
        r"head_dim 96 is not supported: use one of \(64, 128, 256\)", (0, q.new_zeros(24, 4, 96))
    )
    refused("3 query heads over 2 key-value heads: the ratio must be", (0, q.new_zeros(24, 3, 64)))
    refused("34 query heads over 2 key-value heads: the ratio", (0, q.new_zeros(24, 34, 64)))
    refused(r"q and k_blk must be \[rows, heads, head_dim\]", (0, q.new_zeros(24, 256)))
    refused(r"k_ctx is \(59, 2, 64\), expected \(60, 2, 64\)", (1, k_ctx[:-1]))
    refused(r"v_ctx is torch.bfloat16 on cpu, q is torch.float32", (2, t[2].bfloat16()))
    wide = k_ctx.new_zeros(60, 2, 128)[..., ::2]
    refused(r"k_ctx has innermost stride 2: call .contiguous\(\)", (1, wide))
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        refused("must be finite and positive", scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_unsupported_dtypes_are_refused(dtype: torch.dtype) -> None:
    tensors, layout, _ = make_inputs(CASE)
    with pytest.raises(ValueError, match=r"is not supported on cpu: use one of \(torch.float32"):
        dflash_attention(*(x.to(dtype) for x in tensors), layout)


def test_unsupported_device_is_refused() -> None:
    tensors, layout, _ = make_inputs(CASE)
    with pytest.raises(ValueError, match="device meta is not supported: use cpu or cuda"):
        dflash_attention(*(x.to("meta") for x in tensors), layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_size=12), r"block_size 12 is not supported: use one of \(4, 8, 16, 32\)"),
        (dict(window=0), "window 0 must be at least 1, or None"),
        (dict(num_ctx=-1), "num_ctx -1 must be in"),
        (dict(num_ctx=2**30), "must be in"),
        (dict(ctx_end=torch.zeros(3)), r"must both be \[N\], got \(2,\) and \(3,\)"),
        (dict(ctx_end=torch.zeros(2, device="meta")), "ctx_start is on cpu, ctx_end on meta"),
    ],
)
def test_unsupported_layouts_are_refused(change: dict, message: str) -> None:
    start = torch.zeros(2, dtype=torch.int32)
    options = dict(ctx_start=start, ctx_end=start + 1, num_ctx=4, block_size=8)
    with pytest.raises(ValueError, match=message):
        build_layout(**(options | change))


def test_cuda_strides_are_checked_before_any_launch() -> None:
    """Heads of a row are addressed in 32 bits in the kernels: head-major views can outgrow them."""

    def strided(row: int, head: int) -> torch.Tensor:
        return torch.empty_strided((600_000, 32, 128), (row, head, 1), device="meta")

    _check_alignment("q", strided(32 * 128, 128))
    _check_alignment("q", strided(128, 600_000 * 48))
    with pytest.raises(ValueError, match=r"one row must span less than 2\*\*30 elements"):
        _check_alignment("q", strided(128, 600_000 * 128))  # [heads, rows, D] transposed
    with pytest.raises(ValueError, match="multiples of 16 elements"):
        _check_alignment("q", strided(32 * 136, 136))


def test_gil_is_released_while_a_kernel_runs() -> None:
    case = Case("long", (1500,), tuple(range(20, 1500, 4)), B=16, Hkv=2, G=8, D=128)
    tensors, layout, _ = make_inputs(case)

    def moves_meanwhile() -> bool:
        """Did this thread stand still for less than half of a kernel's time?"""
        done = threading.Event()

        def work() -> None:
            dflash_attention(*tensors, layout)
            done.set()

        thread = threading.Thread(target=work)
        longest, before = 0.0, time.perf_counter()
        began = before
        thread.start()
        while not done.is_set():  # this thread needs the GIL for every turn of the loop
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        thread.join()
        return longest < (time.perf_counter() - began) / 2

    # A busy machine may hold it up as the GIL would, but not every time.
    assert any(moves_meanwhile() for _ in range(50))


def test_double_backward_is_an_error_and_not_a_wrong_number() -> None:
    tensors, layout, _ = make_inputs(CASE)
    leaves = [x.requires_grad_() for x in tensors]
    (grad,) = torch.autograd.grad(
        dflash_attention(*leaves, layout).square().sum(), leaves[0], create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_layout_is_on_the_device_of_its_inputs_and_int32() -> None:
    layout = case_layout(CASE)
    assert layout.ctx_start.dtype == layout.ctx_end.dtype == torch.int32
    assert layout.schedule is None
