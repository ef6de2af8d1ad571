"""The row-wise Triton kernels under their operators, in Triton's interpreter, against fp64.

fp32 shows the formulas and fp16 the roundings; bf16 is left to the GPU, because the interpreter
truncates where a device rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fused_cases import EPS, OPS, assert_two_times_rule, make
from interpreted import PROGRAMS, Interpreter, interpreted
from triton_sources import skip_module_without_triton

from dflash_ext.ops import norm, quantise, rotary, swiglu

skip_module_without_triton()
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreter]:
    """The operators on fp32 run the kernels; see `interpreted`."""
    with interpreted(monkeypatch, torch.float32) as interpreter:
        yield interpreter


CASES = [  # op, rows, width, slices of a wider matrix, heads
    ("rms_norm", 2 * PROGRAMS + 1, 72, True, 0),
    ("rms_norm", 2, 4104, False, 0),
    ("add_rms_norm", PROGRAMS + 1, 4096, True, 0),
    ("add_rms_norm", 1, 8192, False, 0),
    ("swiglu", 3, 64, False, 0),
    ("swiglu", 3, 2 * 2048 + 8, True, 0),
    ("head_norm_rope", 70, 64, True, 3),
    ("head_norm_rope", 17, 128, False, 9),
    ("head_norm_rope", 9, 256, True, 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
def test_outputs_and_gradients_match_fp64(
    case: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, rows, width, fused, heads = case
    with interpreted(monkeypatch, dtype) as interpreter:
        assert_two_times_rule(make(op, rows, width, dtype, fused=fused, heads=heads), dtype)
    assert len(interpreter.launched) == 2


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: str, kernels: Interpreter) -> None:
    found = make(op, 0, 64, torch.float32).run("ours")
    assert len(kernels.launched) == 2
    assert found.pop("dweight", torch.zeros(1)).eq(0).all()


def test_norms_block_is_the_smallest_that_fits(kernels: Interpreter) -> None:
    for width, block in [(8, 4096), (4096, 4096), (4104, 8192), (8192, 8192)]:
        norm.rms_norm_forward(torch.zeros(1, width), torch.ones(width), EPS)
        assert kernels.launched.pop() == f"rms_norm_fwd_{block}"
    with pytest.raises(ValueError, match="H 8200 is not supported on CUDA in bf16: at most 8192"):
        norm.rms_norm(torch.zeros(1, 8200), torch.ones(8200), EPS)
    with pytest.raises(ValueError, match=r"x is \(1, 12\) .* multiples of 8 elements"):
        norm.rms_norm(torch.zeros(1, 12), torch.ones(12), EPS)


def test_norm_backward_in_place_gives_the_norm_back(kernels: Interpreter) -> None:
    x, g, h = (torch.randn(5, 40) for _ in range(3))
    weight = torch.rand(40)
    plain_dx, plain_dweight = norm.rms_norm_backward(x, weight, EPS, g)
    dx, dweight = norm.rms_norm_backward(x, weight, EPS, g, grad_total=h)
    torch.testing.assert_close(dx, plain_dx + h)
    assert torch.equal(dweight, plain_dweight)
    out = norm.rms_norm_forward(x, weight, EPS)
    norm.rms_norm_backward(x, weight, EPS, g, grad_total=h, dx=h, normed=x)
    assert torch.equal(h, dx)
    torch.testing.assert_close(x, out, rtol=1e-6, atol=1e-6)


def test_swiglu_backward_in_place_recomputes_the_activation(kernels: Interpreter) -> None:
    wide, dact = torch.randn(3, 2 * 2056), torch.randn(3, 2056)
    gate, up = wide.chunk(2, dim=1)
    act = swiglu.swiglu_forward(gate, up)
    expected = torch.cat(swiglu.swiglu_backward(gate, up, dact), dim=1)
    swiglu.swiglu_backward(gate, up, dact, dgate=gate, dup=up, act=dact)
    assert torch.equal(wide, expected)
    torch.testing.assert_close(dact, act, rtol=1e-6, atol=1e-6)


def test_rotary_in_place_inside_a_fused_projection(kernels: Interpreter) -> None:
    count, heads, D = 35, 10, 64
    qkv = torch.randn(count, heads, D)
    tables, weight = rotary.rope_tables(torch.arange(count), D, 1e4), torch.rand(D)
    before, part = qkv.clone(), qkv[:, 2:7]
    out = rotary.head_norm_rope_forward(part.clone(), weight, tables, EPS)
    dx, _ = rotary.head_norm_rope_backward(part.clone(), weight, tables, EPS, out)
    rotary.head_norm_rope_forward(part, weight, tables, EPS, out=part)
    assert torch.equal(qkv[:, 2:7], out)
    qkv[:, 2:7] = before[:, 2:7]
    rotary.head_norm_rope_backward(part, weight, tables, EPS, out, dx=part)
    assert torch.equal(qkv[:, 2:7], dx)
    for untouched in (slice(0, 2), slice(7, None)):
        assert torch.equal(qkv[:, untouched], before[:, untouched])


def test_rotation_alone(kernels: Interpreter) -> None:
    heads, tables = torch.randn(19, 3, 64), rotary.rope_tables(torch.arange(19), 64, 1e4)
    expected = rotary.head_rope_forward(heads.double().float(), tables)
    low, high = heads.double().chunk(2, dim=-1)
    cos, sin = (t.double()[:, None] for t in tables)
    truth = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    torch.testing.assert_close(expected.double(), truth, rtol=1e-6, atol=1e-6)
    rotary.head_rope_forward(heads, tables, out=heads)
    assert torch.equal(heads, expected)
    assert kernels.launched == ["head_norm_rope_fwd"] * 2


@pytest.mark.parametrize("gated", [False, True])
def test_quantised_rows(gated: bool, kernels: Interpreter) -> None:
    """Of two widths: a part of one tile, and more than one tile with a part."""
    torch.manual_seed(0)
    for width in (48, 2048 + 64):
        wide = torch.randn(5, 2 * width)
        x, up = wide.chunk(2, dim=1)
        x[3] = 0
        found = quantise.quantise_rows(x, up if gated else None)
        truth = quantise.quantise_rows_reference(x, up if gated else None)
        torch.testing.assert_close(found.scales, truth.scales, rtol=1e-6, atol=0)
        a, b = found.values.float(), truth.values.float()
        # The interpreter loses the carry where a number rounds up to a power of two; some few
        # others lie in the middle between two numbers.
        carried = (2 * a == b) & (b != 0)
        assert (b[carried].abs().log2().frac() == 0).all()
        assert ((a != b) & ~carried).float().mean() <= 1e-3
        torch.testing.assert_close(a[~carried], b[~carried], rtol=2**-3, atol=2**-9)
    assert kernels.launched == ["quantise_rows"] * 2


def test_rotary_takes_every_second_table_row_and_one_row_for_all(kernels: Interpreter) -> None:
    tables, weight = rotary.rope_tables(torch.arange(18), 64, 1e4), torch.rand(64)
    sliced = rotary.RopeTables(tables.cos[::2], tables.sin[::2])
    one = torch.randn(1, 2, 64).expand(9, 2, 64)
    out = rotary.head_norm_rope_forward(one, weight, sliced, EPS)
    truth = rotary.head_norm_rope_reference(one, weight, sliced, EPS)
    torch.testing.assert_close(out, truth, rtol=1e-5, atol=1e-5)


def test_rows_beyond_2_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of 4 GiB is only reserved: three rows of it are touched."""
    stride, dtype = 2**30 + 8, torch.float16
    far = torch.empty(2 * stride + 64, dtype=dtype).as_strided((3, 64), (stride, 1))
    near = torch.randn(3, 64).to(dtype)
    far.copy_(near)
    weight = torch.rand(64)
    tables = rotary.rope_tables(torch.arange(3), 64, 1e4)
    with interpreted(monkeypatch, dtype):
        for x, out in ((far, None), (near, far)):
            assert torch.equal(
                norm.rms_norm_forward(x, weight, EPS, out=out),
                norm.rms_norm_forward(near, weight, EPS),
            )
            far.copy_(near)
            assert torch.equal(
                swiglu.swiglu_forward(x, x, out=out), swiglu.swiglu_forward(near, near)
            )
            far.copy_(near)
            heads = None if out is None else out[:, None]
            assert torch.equal(
                rotary.head_norm_rope_forward(x[:, None], weight, tables, EPS, out=heads),
                rotary.head_norm_rope_forward(near[:, None], weight, tables, EPS),
            )
            far.copy_(near)
        grads = norm.rms_norm_backward(far, weight, EPS, near)
        expected = norm.rms_norm_backward(near, weight, EPS, near)
        for x, y in zip(grads, expected):
            assert torch.equal(x, y)
        dgate, dup = swiglu.swiglu_backward(near, far, near)
        for x, y in zip((dgate, dup), swiglu.swiglu_backward(near, near, near)):
            assert torch.equal(x, y)
        grads = rotary.head_norm_rope_backward(near[:, None], weight, tables, EPS, far[:, None])
        expected = rotary.head_norm_rope_backward(near[:, None], weight, tables, EPS, near[:, None])
        for x, y in zip(grads, expected):
            assert torch.equal(x, y)
