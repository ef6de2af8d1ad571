"""Benchmarks: what they measure, their arithmetic and their clocks; on a GPU, a small run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from bench_cases import SMALL, small

from dflash_ext.bench import anchors, attention, first_call, launch, problem, recorder, timing
from dflash_ext.bench.shapes import (
    CUDA_SHAPES,
    TARGETS,
    UNSEEN,
    Shape,
    Target,
    lognormal_documents,
    missed,
    reached,
    sweeps,
)
from dflash_ext.ops import attention_cpu, attention_cuda
from dflash_ext.ops import layout as layout_ops
from dflash_ext.ops.attention import dflash_attention, visible_pairs

# ---- what is measured


@pytest.mark.parametrize("window", [None, 1, 5, 20, 500])
@pytest.mark.parametrize("causal", [False, True])
def test_useful_pairs_are_the_visible_ones(window: int | None, causal: bool) -> None:
    layout = small(window, causal).build_layout()
    assert problem.useful_pairs(layout) == int(visible_pairs(layout).sum())
    ends = torch.tensor([3, 90, SMALL.T], dtype=torch.int32)
    starts = torch.tensor([0, 57, SMALL.T + 1], dtype=torch.int32)  # the last one is padding
    padded = layout_ops.build_layout(
        starts, ends, num_ctx=SMALL.T, block_size=4, window=window, causal=causal
    )
    assert problem.useful_pairs(padded) == int(visible_pairs(padded).sum())


def test_documents_fill_the_budget() -> None:
    lengths = lognormal_documents(49152, 1500)
    assert sum(lengths) == 49152
    assert max(lengths) <= 8192


@pytest.mark.parametrize("shape", CUDA_SHAPES, ids=lambda s: s.name)
def test_shapes_are_those_of_the_anchor_measurement(shape: Shape) -> None:
    """Anchors and visible pairs by the other way round: a document id per token."""
    lengths = torch.tensor(shape.documents)
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    first = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randperm(shape.T - 1, generator=generator)[: shape.num_blocks].sort().values
    start, end = problem.intervals(shape)
    assert torch.equal(end.long(), anchor)
    assert torch.equal(start.long(), first[document[anchor]])


def test_every_dimension_is_swept_alone() -> None:
    rows = sweeps()
    base = rows[0][1]
    assert {sweep for sweep, _ in rows} == {"base", "T", "N", "B", "G", "D", "window"}
    fields = {"T": "documents", "N": "num_blocks", "B": "B", "G": "Hkv", "D": "D"}
    for sweep, shape in rows[1:]:
        assert shape.num_blocks < shape.T
        if sweep == "window":
            kept = replace(shape, name="base", window=None, causal=False)
        else:
            kept = replace(shape, name="base", **{fields[sweep]: getattr(base, fields[sweep])})
        assert kept == base
    assert {s.B for _, s in rows} == {4, 8, 16, 32}
    assert {s.Hq // s.Hkv for _, s in rows} == {1, 2, 4, 8}
    assert {(s.window, s.causal) for _, s in rows} >= {(512, False), (2048, True), (None, True)}
    assert len({s.name for _, s in rows}) == len(rows)
    measured = {(s.T, s.num_blocks) for s in (*CUDA_SHAPES, *(s for _, s in rows))}
    assert not measured & {(s.T, s.num_blocks) for s in UNSEEN}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [20, 64])
def test_plain_layout_has_nearly_the_same_pairs(window: int, causal: bool) -> None:
    shape = Shape("s", (2000, 30, 900), 60, 8, 2, 1, 64, window, causal)
    windowed = problem.make_problem(shape, "cpu", torch.float32)
    plain = problem.without_window(windowed)
    before, after = windowed.build_layout(), plain.build_layout()
    assert (after.window, after.causal) == (None, False)
    assert plain.leaves is windowed.leaves
    assert bool((after.ctx_start.diff() >= 0).all())  # still a legal layout
    pairs = problem.useful_pairs(before)
    assert abs(problem.useful_pairs(after) / pairs - 1) < 0.05
    # Where the window is full the two differ by rounding only: half a row of the block.
    rows = visible_pairs(before).sum(1).reshape(-1, 8).sum(1)
    plain_rows = visible_pairs(after).sum(1).reshape(-1, 8).sum(1)
    full = windowed.ctx_end - windowed.ctx_start >= window
    assert bool((rows[full] - plain_rows[full]).abs().max() <= 4)


def test_without_window_of_the_swept_windows() -> None:
    for sweep, shape in sweeps():
        if sweep == "window":
            windowed = problem.Problem(shape, None, *problem.intervals(shape), 0)  # type: ignore
            ratio = problem.useful_pairs(windowed.build_layout()) / problem.useful_pairs(
                problem.without_window(windowed).build_layout()
            )
            assert abs(ratio - 1) < 0.006, shape.name


def test_flex_is_given_the_same_mask() -> None:
    p = small()
    layout = p.build_layout()
    rows = layout.num_blocks * layout.block_size
    q = torch.arange(rows)[:, None]
    kv = torch.arange(layout.num_ctx + rows)[None]
    for visible in (anchors.flex_visible(layout), anchors.flex_by_document(p)):
        assert torch.equal(visible(q, q, q, kv), visible_pairs(layout))


def test_sdpa_contestant_computes_the_operator() -> None:
    p = small()
    layout = p.build_layout()
    theirs = anchors.sdpa_runs(p, layout)["sdpa fwd"]()[0].transpose(0, 1)
    torch.testing.assert_close(dflash_attention(*p.leaves, layout), theirs)


# ---- arithmetic


def test_numbers_of_round_times() -> None:
    work = 10**9  # pairs * heads * D: 4 GFLOP forward, 10 GFLOP backward
    dense = 4 * 32 * 128 * 16384**2 // 2
    ours = {"fwd": 10e-6, "bwd": 50e-6}
    numbers = attention.own_numbers(
        work,
        ours
        | {
            "product": 2 * 8192**3 / 800e12,
            "layout": 20e-6,
            "triton fwd": 20e-6,
            "triton bwd": 100e-6,
            "recomputed bwd": 62.5e-6,
            "triton recomputed bwd": 125e-6,
        },
    )
    numbers |= attention.anchor_numbers(
        work,
        ours
        | {
            "flex fwd": 30e-6,
            "flex bwd": 200e-6,
            "flex intervals bwd": 150e-6,
            "cudnn 4096 fwd": dense / 16 / 100e12,
            "cudnn 4096 bwd": 2.5 * dense / 16 / 100e12,
            "cudnn 16384 fwd": dense / 200e12,
            "cudnn 16384 bwd": 2.5 * dense / 250e12,
        },
    )
    expected = {
        "product_tflops": 800,
        "fwd_ms": 0.01,
        "fwd_tflops": 400,
        "bwd_tflops": 200,
        "fwd_over_product": 0.5,
        "bwd_over_product": 0.25,
        "triton_fwd_tflops": 200,
        "triton_bwd_over_product": 0.125,
        "recomputed_bwd_over_product": 0.2,
        "triton_recomputed_bwd_over_product": 0.1,
        "fwd_over_flex": 3,
        "bwd_over_flex": 4,
        "bwd_over_flex_intervals": 3,
        "flex_bwd_tflops": 50,
        "cudnn_fwd_tflops": 200,
        "fwd_over_cudnn": 2,
        "bwd_over_cudnn": 0.8,
        "layout_ms": 0.02,
    }
    assert {k: numbers[k] for k in expected} == pytest.approx(expected)


@pytest.mark.parametrize("n", range(1, 10))
def test_nobody_keeps_following_the_same_one(n: int) -> None:
    names = [str(i) for i in range(n)]
    orders = timing.balanced_orders(names, 2 * n)
    assert all(sorted(order) == names for order in orders)
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert all(follows[a, b] == 2 for a in names for b in names if a != b)
    few = timing.balanced_orders(names, max(n // 2, 1))  # fewer rounds than names: still nobody
    assert max(Counter(p for o in few for p in pairwise(o)).values(), default=1) == 1


def test_window_overhead_is_per_visible_pair() -> None:
    seconds = {"fwd": 1.1, "bwd": 2.0, "plain fwd": 1.0, "plain bwd": 2.0}
    assert attention.window_overhead(100, 100, seconds)["fwd_overhead"] == pytest.approx(0.1)
    assert attention.window_overhead(200, 100, seconds)["bwd_overhead"] == pytest.approx(-0.5)


def test_floors_and_goals() -> None:
    assert [reached(x, Target(0.8, 0.9)) for x in (0.79, 0.8, 0.9)] == [
        "below floor",
        "floor",
        "goal",
    ]
    assert reached(5.0, Target(0.8)) == "floor"
    assert [reached(x, Target(0.1, 0.03), smaller=True) for x in (0.11, 0.1, 0.03)] == [
        "below floor",
        "floor",
        "goal",
    ]
    assert all(set(of_shape) == set("ABCD") for of_shape in TARGETS.values())
    row = {"shape": "B", "fwd_over_product": 0.73, "bwd_over_product": 0.57, "layout_ms": 0.2}
    assert missed(row) == [
        "B: fwd_over_product 0.730 is below 0.74",
        "B: layout_ms 0.200 is above 0.1",
    ]


class FakeEvent:
    """A device that is busy spinning for as long as it was last told to."""

    spins: list[int]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.spins[-1] < 3 * timing.HEAD_START  # the host needs three head starts

    def elapsed_time(self, end: FakeEvent) -> float:
        return 40.0


def test_device_time_needs_the_host_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.spins = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", FakeEvent.spins.append)
    calls: list[None] = []
    one = timing.Contestant(lambda: calls.append(None), "cuda", repeats=4)
    assert one.seconds() == pytest.approx(0.01)
    assert FakeEvent.spins == [timing.HEAD_START * k for k in (1, 2, 4)]
    assert len(calls) == 12
    one.seconds()
    assert FakeEvent.spins[3:] == [timing.HEAD_START * 4]  # it remembers
    assert timing.warmed_up(lambda: None, "cuda", burst=0.2).repeats == 15
    monkeypatch.setattr(FakeEvent, "query", lambda self: True)
    with pytest.raises(RuntimeError, match="waits for the device"):
        one.seconds()


def test_recorded_launch_repeats_the_call() -> None:
    p = small()
    layout, real = p.build_layout(), attention_cpu._C
    with recorder.recorded(attention_cpu) as calls:
        out = dflash_attention(*p.leaves, layout)
    assert attention_cpu._C is real
    assert [name for name, _ in calls] == ["attention_cpu_forward"]
    expected = out.detach().clone()
    out.detach().zero_()
    calls[0][1]()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", ["attention_bwd_dq", "hopper_bwd_dq"])
def test_a_forced_path_must_be_taken(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = small()
    layout = p.build_layout()
    monkeypatch.setattr(attention_cuda, "_C", SimpleNamespace(**{kernel: lambda: None}))
    monkeypatch.setattr(problem, "dflash_attention", lambda *tensors: None)
    monkeypatch.setattr(
        problem, "gradient_run", lambda out, leaves: lambda: getattr(attention_cuda._C, kernel)()
    )
    if kernel.startswith("hopper"):
        with pytest.raises(RuntimeError, match=r"still launched \['hopper_bwd_dq'\]"):
            problem.forced_runs(p, layout, "triton")
    else:
        assert list(problem.forced_runs(p, layout, "triton")) == ["triton fwd", "triton bwd"]


# ---- on a GPU


@pytest.mark.gpu
def test_cuda_contestants_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contestant but the compiled ones, on a small problem, with real clocks."""
    monkeypatch.setattr(anchors, "PRODUCT", 1024)
    monkeypatch.setattr(anchors, "CUDNN_LENGTHS", (256,))
    monkeypatch.setattr(attention, "BURST", 0.001)
    bench = attention.CudaBench(2, lambda result: None, dense=True)
    shape = Shape("A", (700, 300), 64, 16, 8, 2, 128)
    row = bench.row(shape, triton=True)
    assert bench.result["failed"] == []
    assert min(row[k] for k in ("fwd_ms", "bwd_ms", "layout_ms", "triton_bwd_tflops")) > 0
    assert row["fwd_over_cudnn"] > 0
    assert min(row["kept_gb"], row["triton_recomputed_bwd_tflops"]) > 0
    windowed = bench.row(replace(shape, window=100, causal=True))
    assert windowed["plain_pairs"] == pytest.approx(windowed["pairs"], rel=0.05)


@pytest.mark.gpu
def test_first_calls_on_a_gpu() -> None:
    row = first_call.calls(replace(UNSEEN[1], num_blocks=37), warm_allocator=True)
    assert row["mallocs"] == 0
    assert min(row["first_ms"], row["fresh_ms"], row["hundredth_ms"]) > 0


@pytest.mark.gpu
def test_launch_on_a_gpu() -> None:
    times = {row["what"]: row["microseconds"] for row in launch.measure("cuda", 3)}
    assert any(name.startswith("raw call: attention") for name in times)
    assert min(times.values()) > 0
