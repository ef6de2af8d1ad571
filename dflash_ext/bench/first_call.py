"""First call against the hundredth, for shapes that nothing in the process has run before."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from dflash_ext import _C
from dflash_ext.bench.problem import make_problem
from dflash_ext.bench.shapes import UNSEEN, WARM, Shape
from dflash_ext.bench.timing import Run, rounded
from dflash_ext.ops.attention import dflash_attention

CALLS = 100


def training_step(shape: Shape) -> Run:
    """Layout, forward and backward of a new problem; its tensors exist before the first call."""
    problem = make_problem(shape, "cuda", torch.bfloat16)
    grad = torch.randn_like(problem.leaves.q)

    def step() -> None:
        out = dflash_attention(*problem.leaves, problem.build_layout())
        torch.autograd.grad(out, problem.leaves, grad)

    return step


def _mallocs() -> int:
    return torch.cuda.memory_stats()["num_device_alloc"]


def _fill_cache() -> None:
    """Leave torch's cache with free blocks that every request of a step fits into."""
    large = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    small = [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(64)]
    del large, small


def calls(shape: Shape, warm_allocator: bool) -> dict[str, Any]:
    """Wall milliseconds, each call synchronised: the first, calls 91-100 (median), and `fresh`.

    Fresh is the first call of another problem of the same shape, set up in the same way: what it
    takes over the hundredth is the cold host's, caches' and clocks' share of the first call, and
    what the first takes over it is the price of a shape that was never seen.
    """
    step, mallocs = _set_up(shape, warm_allocator), _mallocs()
    first = _timed(step)
    mallocs = _mallocs() - mallocs
    times = [_timed(step) for _ in range(CALLS - 1)]
    del step
    fresh = _timed(_set_up(shape, warm_allocator))
    hundredth = statistics.median(times[-10:])
    return {
        "shape": shape.what,
        "first_ms": rounded(first * 1e3),
        "fresh_ms": rounded(fresh * 1e3),
        "hundredth_ms": rounded(hundredth * 1e3),
        "first_over_fresh": rounded(first / fresh),
        "first_over_hundredth": rounded(first / hundredth),
        "mallocs": mallocs,
    }


def _set_up(shape: Shape, warm_allocator: bool) -> Run:
    step = training_step(shape)
    torch.cuda.empty_cache()
    if warm_allocator:
        _fill_cache()
    return step


def _timed(step: Run) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def first_calls() -> list[dict[str, Any]]:
    """A row per never-seen shape; then again for other shapes with torch's cache empty.

    `allocator` says which: "warm" compares kernels only; "empty" adds cudaMalloc, which any torch
    program pays once per size.
    """
    _C.warmup(0)
    warm = training_step(WARM)
    for _ in range(3):
        warm()
    del warm
    rows = []
    for shape in UNSEEN:
        rows.append({"allocator": "warm"} | calls(shape, warm_allocator=True))
        other = replace(shape, documents=(*shape.documents, 219), num_blocks=shape.num_blocks + 11)
        rows.append({"allocator": "empty"} | calls(other, warm_allocator=False))
    return rows
