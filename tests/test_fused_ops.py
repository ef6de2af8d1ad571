"""RMSNorm, SwiGLU and head norm + RoPE on the CPU: against fp64, gradients, strides, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from fused_cases import EPS, OPS, assert_two_times_rule, make
from torch import Tensor

from dflash_ext.ops import norm, rotary, rows, swiglu

DTYPES = [torch.float32, torch.bfloat16]


def assert_same(a: Tensor, b: Tensor) -> None:
    """To a last bit or two: over another stride torch's CPU may take other instructions."""
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def width_of(op: str, width: int) -> int:
    return 64 if op == "head_norm_rope" else width


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("count", "width", "fused"), [(33, 104, False), (1, 8, False), (57, 72, True), (3, 255, False)]
)
def test_outputs_and_gradients_match_fp64(
    op: str, count: int, width: int, fused: bool, dtype: torch.dtype
) -> None:
    assert_two_times_rule(make(op, count, width_of(op, width), dtype, fused=fused), dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_head_dim(head_dim: int) -> None:
    problem = make("head_norm_rope", 21, head_dim, torch.bfloat16, fused=True, heads=5)
    assert_two_times_rule(problem, torch.bfloat16)


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op: str) -> None:
    found = make(op, 0, 64, torch.bfloat16).run("ours")
    assert found.pop("dweight", torch.zeros(1)).eq(0).all()
    assert all(x.shape[0] == 0 for x in found.values())


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_of_stride_0_or_transposed_is_taken(op: str) -> None:
    problem = make(op, 16, 64, torch.float32)
    leaves = [x.detach().requires_grad_() for x in problem.leaves.values()]
    out = problem.ours(*leaves)[0]
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    ones = torch.ones_like(out)
    transposed = ones.transpose(0, -1).contiguous().transpose(0, -1)
    for grad in (ones, transposed):
        again = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        for x, y in zip(expanded, again):
            assert torch.equal(x, y)


@pytest.mark.parametrize("op", OPS)
def test_double_backward_is_an_error_and_not_a_wrong_number(op: str) -> None:
    problem = make(op, 2, 64, torch.float32)
    leaves = [x.requires_grad_() for x in problem.leaves.values()]
    out = problem.ours(*leaves)[0]
    (grad, *_) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("used", [0, 1])
def test_norm_or_sum_alone(used: int) -> None:
    problem = make("add_rms_norm", 5, 16, torch.float32)
    found = {}
    for how in ("ours", "naive"):
        leaves = [x.detach().requires_grad_() for x in problem.leaves.values()]
        out = getattr(problem, how)(*leaves)[used]
        found[how] = torch.autograd.grad(out, leaves, problem.grads[0], allow_unused=True)
    for x, y in zip(found["ours"], found["naive"]):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)


# ---- passes without autograd: where they write, and what they may overwrite


def inputs(count: int, *widths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, width, generator=generator) for width in widths]


def inside_wide(width: int, count: int = 7) -> tuple[Tensor, Tensor]:
    """A matrix of zeros and the slice of it to write into."""
    wide = torch.zeros(count, 3 * width)
    return wide, wide[:, width : 2 * width]


def assert_only_slice_written(wide: Tensor, width: int) -> None:
    assert wide[:, :width].eq(0).all()
    assert wide[:, 2 * width :].eq(0).all()
    assert wide[:, width : 2 * width].ne(0).any()


def test_norm_writes_into_slices_and_over_its_inputs() -> None:
    x, y, g, h = inputs(7, 24, 24, 24, 24)
    weight = torch.rand(24)
    out, total = norm.add_rms_norm_forward(x, y, weight, EPS)
    wide, slot = inside_wide(24)
    assert norm.rms_norm_forward(total, weight, EPS, out=slot) is slot
    assert_same(slot, out)
    assert_only_slice_written(wide, 24)
    a, b = x.clone(), y.clone()
    norm.add_rms_norm_forward(a, b, weight, EPS, out=a, total=b)
    assert torch.equal(a, out)
    assert torch.equal(b, total)

    dx, dweight = norm.rms_norm_backward(total, weight, EPS, g, grad_total=h)
    wide, slot = inside_wide(24)
    again = torch.empty_like(out)
    norm.rms_norm_backward(total, weight, EPS, g, grad_total=h, dx=slot, normed=again)
    assert_same(slot, dx)
    torch.testing.assert_close(again, out)
    assert_only_slice_written(wide, 24)
    for over in (total, g, h):
        mine = [total.clone(), g.clone(), h.clone()]
        target = mine[next(i for i, x in enumerate((total, g, h)) if x is over)]
        d, dw = norm.rms_norm_backward(mine[0], weight, EPS, mine[1], grad_total=mine[2], dx=target)
        assert d is target
        assert torch.equal(d, dx)
        assert torch.equal(dw, dweight)


def test_swiglu_backward_in_place_recomputes_the_activation() -> None:
    gate, up, dact = inputs(7, 16, 16, 16)
    act = swiglu.swiglu_forward(gate, up)
    dgate, dup = swiglu.swiglu_backward(gate, up, dact)
    wide = torch.cat([gate, up], dim=1)  # the fused projection's output becomes its gradient
    mine = dact.clone()
    g, u = wide.chunk(2, dim=1)
    swiglu.swiglu_backward(g, u, mine, dgate=g, dup=u, act=mine)
    assert_same(wide, torch.cat([dgate, dup], dim=1))
    torch.testing.assert_close(mine, act)
    wide, slot = inside_wide(16)
    assert swiglu.swiglu_forward(gate, up, out=slot) is slot
    assert_same(slot, act)
    assert_only_slice_written(wide, 16)


def test_rotary_reads_and_writes_slices_of_a_fused_projection() -> None:
    Hq, Hkv, D, count = 4, 2, 64, 7
    (qkv,) = inputs(count, (Hq + 2 * Hkv) * D)
    heads = qkv.view(count, -1, D)
    tables, weight = rotary.rope_tables(torch.arange(count), D, 1e4), torch.rand(D)
    dqkv = torch.zeros_like(heads)
    for part in (slice(0, Hq), slice(Hq, Hq + Hkv)):
        x = heads[:, part]
        grad = torch.randn_like(x)
        out = rotary.head_norm_rope_forward(x, weight, tables, EPS)
        assert out.is_contiguous()
        assert_same(out, rotary.head_norm_rope_forward(x.clone(), weight, tables, EPS))
        dx, _ = rotary.head_norm_rope_backward(x, weight, tables, EPS, grad, dx=dqkv[:, part])
        expected, _ = rotary.head_norm_rope_backward(x.clone(), weight, tables, EPS, grad)
        assert_same(dx, expected)
        assert_same(dqkv[:, part], expected)
    assert dqkv[:, Hq + Hkv :].eq(0).all()


def test_one_row_may_stand_for_all() -> None:
    """In the first layer all mask slots share one row of the projection: stride 0."""
    one = torch.randn(1, 3, 64).expand(9, 3, 64)
    tables, weight = rotary.rope_tables(torch.arange(9), 64, 1e4), torch.rand(64)
    out = rotary.head_norm_rope(one, weight, tables, EPS)
    assert_same(out, rotary.head_norm_rope(one.contiguous(), weight, tables, EPS))


# ---- the angles


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (128, 1e6), (128, 1e7), (256, 5e5)])
def test_rope_tables_round_the_angle_and_nothing_else(head_dim: int, theta: float) -> None:
    positions = torch.tensor([0, 1, 2, 1000, 40_960, 131_071])
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = positions.double()[:, None] / theta**exponent
    tables = rotary.rope_tables(positions, head_dim, theta)
    # Three fp32 roundings on the way to the angle, the power being good to two of them.
    bound = angle * 4 * 2**-24 * (1 + math.log(theta) / 4) + 2**-23
    for table, truth in zip(tables, (angle.cos(), angle.sin())):
        assert table.dtype == torch.float32
        assert table.is_contiguous()
        assert ((table.double() - truth).abs() <= bound).all()
        assert torch.equal(table[0], truth[0].float())


# ---- refusals


WEIGHT = torch.ones(64)
X = torch.zeros(4, 64)
HEADS = torch.zeros(4, 2, 64)
TABLES = rotary.rope_tables(torch.arange(4), 64, 1e4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norm.rms_norm(X.double(), WEIGHT, EPS), "dtype torch.float64 is not supported"),
        (lambda: norm.rms_norm(X.to("meta"), WEIGHT, EPS), "device meta is not supported: use cpu"),
        (lambda: norm.rms_norm(HEADS, WEIGHT, EPS), r"expected \[rows, H\]"),
        (lambda: norm.rms_norm(X.t(), WEIGHT, EPS), r"innermost stride 64: call .contiguous"),
        (lambda: norm.rms_norm(X, WEIGHT[:-1], EPS), r"expected the fp32 master \(64,\)"),
        (lambda: norm.rms_norm(X, WEIGHT.bfloat16(), EPS), "expected the fp32 master"),
        (lambda: norm.rms_norm(X, torch.ones(128)[::2], EPS), "weight must be contiguous"),
        (lambda: norm.rms_norm(X, WEIGHT.to("meta"), EPS), "weight is on meta"),
        (lambda: norm.rms_norm(X, WEIGHT, -1.0), "eps -1.0 must be finite and above 0"),
        (lambda: norm.add_rms_norm(X, X[:3], WEIGHT, EPS), r"residual is \(3, 64\), expected"),
        (lambda: norm.add_rms_norm(X, X.bfloat16(), WEIGHT, EPS), "residual is torch.bfloat16"),
        (lambda: norm.rms_norm_forward(X, WEIGHT, EPS, out=X[:2]), r"out is \(2, 64\), expected"),
        (lambda: norm.rms_norm_backward(X, WEIGHT, EPS, X.t()), r"grad is \(64, 4\), expected"),
        (lambda: swiglu.swiglu(HEADS, HEADS), r"expected \[rows, I\]"),
        (lambda: swiglu.swiglu(X, X[:, :32]), r"up is \(4, 32\), expected \(4, 64\)"),
        (lambda: swiglu.swiglu_backward(X, X, X.half()), "dact is torch.float16"),
        (lambda: rotary.head_norm_rope(X, WEIGHT, TABLES, EPS), r"expected \[rows, heads, D\]"),
        (
            lambda: rotary.head_norm_rope(torch.zeros(4, 2, 96), torch.ones(96), TABLES, EPS),
            r"head_dim 96 is not supported: use one of \(64, 128, 256\)",
        ),
        (
            lambda: rotary.head_norm_rope(HEADS[:3], WEIGHT, TABLES, EPS),
            r"cos is \(4, 32\), expected \(3, 32\)",
        ),
        (
            lambda: rotary.head_norm_rope(
                HEADS, WEIGHT, rotary.RopeTables(TABLES.cos, TABLES.sin.bfloat16()), EPS
            ),
            r"sin is torch.bfloat16 on cpu, expected torch.float32",
        ),
        (
            lambda: rotary.head_norm_rope(
                HEADS, WEIGHT, rotary.RopeTables(TABLES.cos, TABLES.sin.repeat(2, 1)[::2]), EPS
            ),
            r"cos and sin have strides \(32, 1\) and \(64, 1\): they must be equal",
        ),
    ],
)
def test_unsupported_inputs_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_that_the_kernels_cannot_address_are_refused() -> None:
    """What is checked on CUDA, on meta tensors: no memory is touched."""

    def strided(*stride: int, width: int = 64) -> Tensor:
        shape = (4, width) if len(stride) == 1 else (4, 2, width)
        return torch.empty_strided(shape, (*stride, 1), dtype=torch.bfloat16, device="meta")

    rows.check_alignment("x", strided(64))
    rows.check_alignment("x", strided(0))
    rows.check_alignment("x", strided(2**31 - 8))
    rows.check_alignment("x", strided(4, width=64)[:1])  # one row: its stride means nothing
    for bad in (strided(68), strided(64, width=60), strided(256, 68)):
        with pytest.raises(ValueError, match="multiples of 8 elements"):
            rows.check_alignment("x", bad)
    with pytest.raises(ValueError, match=r"must be below 2\*\*31"):
        rows.check_alignment("x", strided(2**31))
    with pytest.raises(ValueError, match="starts 2 bytes past a multiple of 16"):
        rows.check_alignment("x", torch.zeros(65, dtype=torch.bfloat16)[1:].view(1, 64))
