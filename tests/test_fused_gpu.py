"""The row-wise kernels on a real GPU: bf16 by the 2x rule, odd shapes, slices, bits, 64 bits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fused_cases import EPS, OPS, assert_two_times_rule, make
from torch import Tensor

from dflash_ext.bench import fused
from dflash_ext.bench.recorder import recorded
from dflash_ext.bench.timing import interleaved
from dflash_ext.ops import norm, quantise, rotary, swiglu

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MODULES = {"rms_norm": norm, "add_rms_norm": norm, "swiglu": swiglu, "head_norm_rope": rotary}


@pytest.mark.parametrize("fused_rows", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 37, 1000])
@pytest.mark.parametrize("width", [8, 72, 1024, 2048, 2056, 4096, 4104, 5120, 8192])
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "swiglu"])
def test_numerics(op: str, width: int, rows: int, fused_rows: bool) -> None:
    problem = make(op, rows, width, BF16, "cuda", fused=fused_rows)
    with recorded(MODULES[op]) as calls:
        assert_two_times_rule(problem, BF16)
    assert len(calls) == 2, "the kernels were not taken"


@pytest.mark.parametrize("fused_rows", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 8, 9, 32])
@pytest.mark.parametrize("rows", [1, 15, 1001])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rotary_numerics(head_dim: int, rows: int, heads: int, fused_rows: bool) -> None:
    problem = make("head_norm_rope", rows, head_dim, BF16, "cuda", fused=fused_rows, heads=heads)
    assert_two_times_rule(problem, BF16)


def test_rotation_alone() -> None:
    heads = torch.randn(1001, 9, 128, device="cuda", dtype=BF16)
    tables = rotary.rope_tables(torch.arange(1001, device="cuda"), 128, 1e6)
    low, high = heads.double().chunk(2, dim=-1)
    cos, sin = (t.double()[:, None] for t in tables)
    truth = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    error = (truth.to(BF16).double() - truth).norm()  # of the one rounding
    found = rotary.head_rope_forward(heads, tables, out=heads)
    assert (found.double() - truth).norm() <= 2 * error


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [16, 64, 2048, 4096, 12288, 28672])
def test_quantised_rows(width: int, gated: bool) -> None:
    if torch.cuda.get_device_capability() < quantise.CAPABILITY:
        pytest.skip("no FP8 products with a scale for each row")
    wide = torch.randn(257, 2 * width, device="cuda", dtype=BF16)
    x, up = wide.chunk(2, dim=1)
    x[3] = 0
    found = quantise.quantise_rows(x, up if gated else None)
    truth = quantise.quantise_rows_reference(x, up if gated else None)
    torch.testing.assert_close(found.scales, truth.scales, rtol=1e-5, atol=0)
    a, b = found.values.float(), truth.values.float()
    assert (a != b).float().mean() <= 1e-3  # in the middle between two numbers
    torch.testing.assert_close(a, b, rtol=2**-3, atol=2**-9)
    weight = quantise.quantise_rows(torch.randn(48, width, device="cuda", dtype=BF16))
    product = quantise.scaled_product(found, weight, BF16)
    exact = [q.values.double() * q.scales.double()[:, None] for q in (found, weight)]
    expected = exact[0] @ exact[1].T
    assert (product.double() - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: str) -> None:
    found = make(op, 0, 64, BF16, "cuda").run("ours")
    assert found.pop("dweight", torch.zeros(1)).eq(0).all()
    torch.cuda.synchronize()


@pytest.mark.parametrize("op", OPS)
def test_fp32_on_cuda_takes_torch(op: str) -> None:
    with recorded(MODULES[op]) as calls:
        assert_two_times_rule(make(op, 33, 64, torch.float32, "cuda"), torch.float32)
    assert calls == []


@pytest.mark.parametrize("op", OPS)
def test_bits_repeat_also_from_many_threads(op: str) -> None:
    problem = make(op, 3000, 128, BF16, "cuda", heads=8)
    expected = problem.run("ours")

    def work(_: int) -> list[str]:
        failed: list[str] = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = problem.run("ours")
                torch.cuda.current_stream().synchronize()
                failed.extend(n for n, x in found.items() if not torch.equal(x, expected[n]))
        return failed

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(work, range(4)))


def assert_same(ours: Callable[[Tensor], tuple], near: Tensor, far: Tensor) -> None:
    """A call reads rows that lie far apart as it reads the same rows close together."""
    for x, y in zip(ours(far), ours(near), strict=True):
        assert torch.equal(x, y)


def test_offsets_beyond_2_31_elements() -> None:
    rows, width, stride = 1030, 256, 2**21 + 8  # the last row starts at 2^31.006 elements
    if torch.cuda.get_device_properties(0).total_memory < 10 * 2**30:
        pytest.skip("needs 5 GiB at once")
    memory = torch.empty(rows * stride, dtype=BF16, device="cuda")
    far = memory.as_strided((rows, width), (stride, 1))
    near = torch.randn(rows, width, device="cuda", dtype=BF16)
    g, weight = torch.randn_like(near), torch.rand(width, device="cuda")
    tables = rotary.rope_tables(torch.arange(rows, device="cuda"), 128, 1e6)
    half = weight[:128].clone()

    def heads(x: Tensor) -> Tensor:
        return x.as_strided((rows, 2, 128), (x.stride(0), 128, 1))

    reads: list[Callable[[Tensor], tuple]] = [
        lambda x: (norm.rms_norm_forward(x, weight, EPS),),
        lambda x: norm.add_rms_norm_forward(x, x, weight, EPS),
        lambda x: norm.rms_norm_backward(x, weight, EPS, x, grad_total=x),
        lambda x: (swiglu.swiglu_forward(x, x),),
        lambda x: swiglu.swiglu_backward(x, x, x),
        lambda x: (rotary.head_norm_rope_forward(heads(x), half, tables, EPS),),
        lambda x: rotary.head_norm_rope_backward(heads(x), half, tables, EPS, heads(x)),
    ]
    far.copy_(near)
    for read in reads:
        assert_same(read, near, far)
    writes: list[Callable[[Tensor], Tensor]] = [
        lambda out: norm.rms_norm_forward(near, weight, EPS, out=out),
        lambda out: norm.add_rms_norm_forward(near, g, weight, EPS, total=out)[1],
        lambda out: norm.rms_norm_backward(near, weight, EPS, g, dx=out)[0],
        lambda out: (norm.rms_norm_backward(near, weight, EPS, g, normed=out), out)[1],
        lambda out: swiglu.swiglu_forward(near, g, out=out),
        lambda out: swiglu.swiglu_backward(near, g, near, dgate=out)[0],
        lambda out: swiglu.swiglu_backward(near, g, near, dup=out)[1],
        lambda out: (swiglu.swiglu_backward(near, g, near, act=out), out)[1],
        lambda out: rotary.head_norm_rope_forward(heads(near), half, tables, EPS, out=heads(out)),
        lambda out: rotary.head_norm_rope_backward(
            heads(near), half, tables, EPS, heads(g), dx=heads(out)
        )[0],
    ]
    for write in writes:
        far.fill_(float("nan"))
        close = torch.empty_like(near)
        assert torch.equal(write(far), write(close))


def test_in_place_as_the_layers_use_it() -> None:
    wide, dact = (torch.randn(500, n, device="cuda", dtype=BF16) for n in (2 * 6144, 6144))
    gate, up = wide.clone().chunk(2, dim=1)
    expected, act = swiglu.swiglu_backward(gate, up, dact), swiglu.swiglu_forward(gate, up)
    g, u = wide.chunk(2, dim=1)
    swiglu.swiglu_backward(g, u, dact, dgate=g, dup=u, act=dact)
    assert torch.equal(wide, torch.cat(expected, dim=1))
    torch.testing.assert_close(dact, act, rtol=2**-7, atol=0)
    x, grad, passed = (torch.randn(500, 4096, device="cuda", dtype=BF16) for _ in range(3))
    weight = torch.rand(4096, device="cuda")
    dx, dweight = norm.rms_norm_backward(x, weight, EPS, grad, grad_total=passed)
    normed, again = norm.rms_norm_forward(x, weight, EPS), torch.empty_like(x)
    mine, other = norm.rms_norm_backward(
        x, weight, EPS, grad, grad_total=passed, dx=grad, normed=again
    )
    assert torch.equal(mine, dx)
    assert torch.equal(other, dweight)
    # The backward adds the squares in another order: at most one rounding apart.
    torch.testing.assert_close(again, normed, rtol=2**-7, atol=0)


def test_a_captured_graph_replays() -> None:
    problem = make("add_rms_norm", 300, 4096, BF16, "cuda")
    x, residual, weight = problem.leaves.values()
    expected = norm.add_rms_norm_forward(x, residual, weight, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norm.add_rms_norm_forward(x, residual, weight, EPS)
    graph.replay()
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def test_benchmark_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    small = fused.Sizes(512, (4096,), (2048,), (8,), 128, 2**24)
    monkeypatch.setattr(fused, "interleaved", lambda r, d, n, burst: interleaved(r, d, n, 1e-4))
    copy = fused.copy_run(small.copied, "cuda")
    for found in fused.passes(small, "cuda", BF16):
        row = fused.measure(found, copy, small.copied, "cuda", 1)
        assert min(row[k] for k in ("ms", "gb_per_s", "over_copy", "plain_ms")) > 0
