"""The CUDA kernels on a real GPU: bf16 numerics by the 2x rule, threads, graphs, 64-bit offsets.

The rule (style.md): error(ours, fp64) <= 2 * error(torch in bf16, fp64) + tiny, so no tolerance is
chosen by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, Case, case_layout, make_inputs, reference_gradients

from dflash_ext import _C
from dflash_ext.bench.problem import make_problem
from dflash_ext.bench.shapes import CUDA_SHAPES
from dflash_ext.ops.attention import dflash_attention, dflash_attention_forward, visible_pairs
from dflash_ext.ops.attention_call import Tensors, attention_path, forced_path
from dflash_ext.ops.kept import room_for_ds
from dflash_ext.ops.layout import AttentionLayout, build_layout, schedule_reference

pytestmark = pytest.mark.gpu
NAMES = ("out", "dq", "dk_ctx", "dv_ctx", "dk_blk", "dv_blk")
BF16 = torch.bfloat16


FORCED = {"chosen": None, "triton": "triton"}


@pytest.fixture(params=["chosen", "chosen again", "triton", "triton again"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both what the operator chooses on this device and plain Triton, which serves everything;
    each with dS kept for dQ, and ("again") with dS computed again."""
    name, _, again = request.param.partition(" ")
    with room_for_ds(None if again else 0), forced_path(FORCED[name]):
        yield name


def ours(t: tuple[torch.Tensor, ...], layout: AttentionLayout, dout: torch.Tensor) -> list:
    leaves = [x.detach().requires_grad_() for x in t]
    out = dflash_attention(*leaves, layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_two_times_rule(t: tuple, layout: AttentionLayout, dout: torch.Tensor) -> None:
    truth = reference_gradients(t, layout, dout, torch.float64)
    rounded = reference_gradients(t, layout, dout, BF16)
    for name, x, r, y in zip(NAMES, ours(t, layout, dout), rounded, truth, strict=True):
        assert x.dtype == BF16
        assert x.isfinite().all(), name
        error, allowed = (x.double() - y).norm(), (r.double() - y).norm()
        assert error <= 2 * allowed + 1e-3 * y.norm() + 1e-6, (
            f"{name}: {error:.3e} vs {allowed:.3e}"
        )


def spread(T: int, n: int, seed: int) -> tuple[int, ...]:
    return tuple(
        torch.randperm(T, generator=torch.Generator().manual_seed(seed))[:n].sort().values.tolist()
    )


GRID = [
    Case(
        f"B{B}_Hkv{Hkv}_G{G}_D{D}",
        (517, 60, 3, 700),
        spread(1280, 37, B + G),
        B=B,
        Hkv=Hkv,
        G=G,
        D=D,
    )
    for B, Hkv, G, D in [
        (4, 2, 1, 64),
        (8, 3, 3, 64),
        (16, 2, 4, 64),
        (16, 2, 4, 128),
        (16, 1, 8, 128),
        (16, 4, 7, 128),
        (32, 2, 2, 128),
        (32, 1, 16, 128),
        (8, 2, 5, 256),
        (16, 2, 4, 256),
        (4, 1, 16, 256),
        (16, 2, 12, 256),
        (1, 2, 4, 128),
        (1, 4, 1, 64),  # rows of a head that start at any multiple of 4 bytes
        (1, 2, 7, 128),
    ]
]
GRID += [
    replace(GRID[3], name="window", window=129),
    replace(GRID[3], name="window_causal", window=300, causal=True),
    replace(GRID[3], name="padding", padding=5),
    replace(GRID[9], name="window_256", window=77, causal=True),
]


PUBLISHED = [  # what published drafters use: B 8 and 16, G 1 to 8, D 64 and 128
    replace(
        GRID[3],
        name=f"B{B}_G{G}_D{D}_{name}",
        B=B,
        G=G,
        D=D,
        window=window,
        causal=causal,
        padding=3,
    )
    for B in (8, 16)
    for G in (1, 2, 4, 8)
    for D in (64, 128)
    for name, window, causal in [("full", None, False), ("window", 100, False), ("mixed", 90, True)]
]
# Other ways to fill a tile of 128 rows: one block alone, and many small ones.
PUBLISHED += [replace(GRID[3], name=f"B{B}_G{G}", B=B, G=G) for B, G in [(32, 4), (8, 16), (4, 1)]]


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_hopper_numerics(case: Case) -> None:
    if _C.device_images(0) != (90, False):
        pytest.skip("the Hopper kernels are for sm_90")
    t, layout, dout = make_inputs(case, BF16, "cuda")
    assert attention_path(Tensors(*t), layout) == "hopper"
    assert_two_times_rule(t, layout, dout)


@pytest.mark.parametrize("case", [*CASES, *GRID], ids=str)
def test_numerics(case: Case, path: str) -> None:
    assert_two_times_rule(*make_inputs(case, BF16, "cuda"))


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("case", [GRID[2], GRID[3]], ids=str)
def test_scores_that_rise_or_fall_along_the_context(case: Case, rising: bool, path: str) -> None:
    """So the maximum moves from tile to tile, or never after the first."""
    t, layout, dout = make_inputs(case, BF16, "cuda")
    slope = torch.linspace(0, 6, layout.num_ctx, dtype=BF16, device="cuda")[:, None, None]
    t = (t[0], t[1] * (slope if rising else slope.flip(0)), *t[2:])
    assert_two_times_rule(t, layout, dout)


@pytest.mark.parametrize("case", [GRID[0], GRID[3], GRID[5], GRID[-1]], ids=str)
def test_lse_of_every_head_and_row(case: Case, path: str) -> None:
    t, layout, _ = make_inputs(replace(case, padding=0), BF16, "cuda")
    _, lse = dflash_attention_forward(*t, layout)
    q, k_ctx, _, k_blk, _ = (x.double() for x in t)
    keys = torch.cat([k_ctx, k_blk]).repeat_interleave(case.G, dim=1)
    score = torch.einsum("qhd,khd->hqk", q, keys) * case.D**-0.5
    truth = score.masked_fill(~visible_pairs(layout), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse.double(), truth, rtol=0, atol=2e-3)


@pytest.mark.parametrize("T", [*range(1, 33), 63, 64, 65, 127, 128, 129])
def test_every_short_length(T: int, path: str) -> None:
    case = Case("short", (T,), tuple(range(0, T, max(1, T // 4))), B=8, Hkv=2, G=2, D=64)
    assert_two_times_rule(*make_inputs(case, BF16, "cuda", seed=T))


@pytest.mark.parametrize("case", [*CASES, *GRID], ids=str)
def test_layout_kernel(case: Case) -> None:
    layout = case_layout(case, "cuda")
    assert layout.schedule is not None
    for made, truth in zip(layout.schedule, schedule_reference(layout), strict=True):
        assert torch.equal(made, truth)


@pytest.mark.parametrize("case", [GRID[3], GRID[-1]], ids=str)
def test_two_runs_are_bit_identical(case: Case, path: str) -> None:
    t, layout, dout = make_inputs(case, BF16, "cuda")
    for a, b in zip(ours(t, layout, dout), ours(t, layout, dout), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("D", [128, 256])
def test_long_walks_repeat_to_the_bit_beside_other_work(D: int, path: str) -> None:
    """Up to 64 tiles a loop, through two or three slots of shared memory each: one that is filled
    while it is still read would show now and then."""
    problem = make_problem(replace(CUDA_SHAPES[0], D=D), "cuda", BF16)
    layout = problem.build_layout()
    dout = torch.randn_like(problem.leaves.q)
    first = ours(problem.leaves, layout, dout)
    noise = torch.randn(2048, 2048, dtype=BF16, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            for _ in range(8):
                noise @ noise
        for name, x, y in zip(NAMES, first, ours(problem.leaves, layout, dout), strict=True):
            assert torch.equal(x, y), name


def test_invisible_tokens_do_not_leak(path: str) -> None:
    case = replace(GRID[3], window=200, causal=True)
    t, layout, dout = make_inputs(case, BF16, "cuda")
    base = ours(t, layout, dout)
    chosen = 20  # the block watched; everything it may not see is shifted by 1e3
    a, lo = int(layout.ctx_end[chosen]), int(layout.ctx_start[chosen])
    first, last = chosen * case.B, (chosen + 1) * case.B
    shifted = [x.clone() for x in t]
    for x in shifted[1:3]:
        x[:lo] += 1e3
        x[a:] += 1e3
        x[lo : max(lo, a - case.window + 1)] += 1e3
    for x in shifted[3:]:
        x[:first] += 1e3
        x[last:] += 1e3
    other = ours(tuple(shifted), layout, dout)
    for i in (0, 1, 4, 5):  # out, dq and the block's own dk, dv
        assert torch.equal(base[i][first:last], other[i][first:last]), NAMES[i]


def test_fused_views_and_expanded_gradient() -> None:
    case = GRID[3]
    t, layout, _ = make_inputs(case, BF16, "cuda")
    Hq, Hkv = case.Hkv * case.G, case.Hkv
    fused = torch.cat([t[0], t[3], t[4]], dim=1).requires_grad_()
    q, k_blk, v_blk = fused.split([Hq, Hkv, Hkv], dim=1)
    context = torch.cat([t[1], t[2]], dim=1).requires_grad_()
    k_ctx, v_ctx = context.split([Hkv, Hkv], dim=1)
    dflash_attention(q, k_ctx, v_ctx, k_blk, v_blk, layout).sum().backward()
    plain = ours(t, layout, torch.ones_like(t[0]))
    assert torch.equal(fused.grad, torch.cat([plain[1], plain[4], plain[5]], dim=1))
    assert torch.equal(context.grad, torch.cat([plain[2], plain[3]], dim=1))


def test_eight_threads_on_eight_streams_equal_serial() -> None:
    problems = [make_inputs(GRID[i % len(GRID)], BF16, "cuda", seed=i) for i in range(8)]
    serial = [ours(*p) for p in problems]
    torch.cuda.synchronize()
    barrier = threading.Barrier(8)

    def work(i: int) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait()
            for _ in range(20):
                found = ours(*problems[i])
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(8) as pool:
        for found, expected in zip(pool.map(work, range(8)), serial, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_raw_launch_from_a_thread_without_a_context() -> None:
    # No torch call in the thread: it has no current context until the launcher pushes one.
    case = GRID[3]
    layout = case_layout(case, "cuda")
    made = torch.full_like(layout.schedule.ranges, -1)
    first, last = torch.empty_like(layout.ctx_start), torch.empty_like(layout.ctx_start)
    arguments = dict(
        device=0,
        stream=0,
        head_dim=0,
        ctx_start_ptr=layout.ctx_start.data_ptr(),
        ctx_end_ptr=layout.ctx_end.data_ptr(),
        ranges_ptr=made.data_ptr(),
        seen_ptr=torch.empty_like(layout.schedule.seen).data_ptr(),
        doc_first_ptr=first.data_ptr(),
        doc_last_ptr=last.data_ptr(),
        num_blocks=layout.num_blocks,
        num_ctx=layout.num_ctx,
        B=case.B,
        window=layout.window_or_none,
    )
    torch.cuda.synchronize()
    errors: list[Exception] = []

    def work() -> None:
        try:
            _C.attention_layout(**arguments)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors
    assert torch.equal(made, layout.schedule.ranges)


def test_cuda_graph_capture_and_replay() -> None:
    t, layout, dout = make_inputs(GRID[3], BF16, "cuda")
    _C.warmup(0)
    leaves = [x.clone().requires_grad_() for x in t]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's own lazy initialisation must precede the capture
        torch.autograd.grad(dflash_attention(*leaves, layout), leaves, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dflash_attention(*leaves, layout)
        grads = torch.autograd.grad(out, leaves, dout)
    fresh, _, _ = make_inputs(GRID[3], BF16, "cuda", seed=9)
    with torch.no_grad():
        for leaf, x in zip(leaves, fresh, strict=True):
            leaf.copy_(x)
    graph.replay()
    for a, b in zip([out, *grads], ours(fresh, layout, dout), strict=True):
        assert torch.equal(a, b)


def test_no_host_synchronisation() -> None:
    t, _, dout = make_inputs(GRID[3], BF16, "cuda")
    layout = case_layout(GRID[3], "cuda")
    start, end = layout.ctx_start.clone(), layout.ctx_end.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sizes = {"num_ctx": layout.num_ctx, "visible_rows": layout.visible_rows}
        layout = build_layout(start, end, block_size=16, **sizes)
        ours(t, layout, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_query_offsets_past_2_to_31() -> None:
    """N*B*Hq*D = 2.16e9 elements; the last blocks equal the same blocks computed alone."""
    B, Hq, Hkv, D, T, N = 16, 32, 8, 128, 300, 33_000
    end = torch.arange(N, device="cuda") * T // N
    layout = build_layout(torch.zeros_like(end), end, num_ctx=T, block_size=B)
    assert N * B * Hq * D > 2**31
    g = torch.Generator("cuda").manual_seed(0)
    make = lambda r, h: torch.randn(r, h, D, device="cuda", dtype=BF16, generator=g)  # noqa: E731
    t = (make(N * B, Hq), make(T, Hkv), make(T, Hkv), make(N * B, Hkv), make(N * B, Hkv))
    dout = make(N * B, Hq)
    whole = ours(t, layout, dout)
    tail = 40
    rows = slice((N - tail) * B, None)
    alone = build_layout(torch.zeros_like(end[-tail:]), end[-tail:], num_ctx=T, block_size=B)
    part = ours((t[0][rows], t[1], t[2], t[3][rows], t[4][rows]), alone, dout[rows])
    for i in (0, 1, 4, 5):
        truth = part[i].float()
        error = (whole[i][rows].float() - truth).norm() / truth.norm()
        assert error < 1e-2, NAMES[i]


def test_context_offsets_past_2_to_31() -> None:
    """T*Hkv*D = 2.15e9 elements; windows at the far end equal the same rows alone."""
    B, Hq, Hkv, D, W = 16, 32, 8, 128, 512
    T = 2**21 + 1000
    assert T * Hkv * D > 2**31
    end = torch.tensor([5, T - 900, T - 500, T - 1], device="cuda")
    layout = build_layout(torch.zeros_like(end), end, num_ctx=T, block_size=B, window=W)
    g = torch.Generator("cuda").manual_seed(0)
    make = lambda r, h: torch.randn(r, h, D, device="cuda", dtype=BF16, generator=g)  # noqa: E731
    t = (make(4 * B, Hq), make(T, Hkv), make(T, Hkv), make(4 * B, Hkv), make(4 * B, Hkv))
    dout = make(4 * B, Hq)
    whole = ours(t, layout, dout)
    cut = T - 2000
    rows = slice(B, None)
    alone = build_layout(
        torch.zeros_like(end[1:]), end[1:] - cut, num_ctx=2000, block_size=B, window=W
    )
    part_in = (t[0][rows], t[1][cut:], t[2][cut:], t[3][rows], t[4][rows])
    part = ours(part_in, alone, dout[rows])
    for i, where in ((0, rows), (1, rows), (2, slice(cut, None)), (3, slice(cut, None))):
        truth = part[i].float()
        error = (whole[i][where].float() - truth).norm() / truth.norm()
        assert error < 1e-2, NAMES[i]
    assert not whole[2][1000:cut].any(), "rows nobody sees have gradient 0"


def test_misaligned_and_wrong_dtype_are_refused() -> None:
    t, layout, _ = make_inputs(GRID[3], BF16, "cuda")
    q = torch.empty(t[0].numel() + 1, dtype=BF16, device="cuda")[1:].view(t[0].shape)
    with pytest.raises(ValueError, match="starts 2 bytes past a multiple of 16"):
        dflash_attention(q, *t[1:], layout)
    with pytest.raises(ValueError, match=r"torch.float32 is not supported on cuda"):
        dflash_attention(*(x.float() for x in t), layout)
    wide = torch.empty(t[0].shape[0], t[0].shape[1], t[0].shape[2] + 8, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="multiples of 16 elements"):
        dflash_attention(wide[..., : t[0].shape[2]], *t[1:], layout)
