"""The CPU attention operator through its public function, against an fp64 loop over blocks.

The rule (style.md): error(ours, fp64) <= 2 * error(torch in our dtype, fp64) + tiny, so no
tolerance is chosen by hand.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_cases import CASES, Case, case_layout, make_inputs
from busy_machine import PATIENCE_SECONDS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_ext import _C
from dflash_ext.ops import AttentionLayout, build_layout, dflash_attention

NAMES = ("out", "dq", "dk_ctx", "dv_ctx", "dk_blk", "dv_blk")
DTYPES = (torch.float32, torch.bfloat16)


def spread(T: int, n: int, seed: int) -> tuple[int, ...]:
    order = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    return tuple(order[:n].sort().values.tolist())


# Every B, D and kind of GQA ratio; documents longer than a chunk and shorter than a vector.
GRID = tuple(
    Case(f"B{B}_Hkv{Hkv}_G{G}_D{D}", docs, spread(sum(docs), n, B + G), B=B, Hkv=Hkv, G=G, D=D)
    for B, Hkv, G, D, docs, n in (
        (4, 2, 1, 64, (150, 3, 290), 40),
        (4, 1, 3, 128, (140, 60), 30),
        (4, 1, 16, 256, (70, 65), 8),
        (8, 3, 3, 64, (300, 41), 30),
        (8, 1, 7, 64, (90, 60), 9),
        (8, 2, 5, 128, (150,), 9),
        (16, 1, 4, 64, (70, 9), 7),
        (16, 1, 8, 128, (140, 20), 6),
        (16, 2, 2, 256, (130, 30), 12),
        (32, 1, 5, 64, (90,), 5),
        (32, 1, 2, 128, (140,), 7),
        (32, 1, 16, 64, (80,), 3),
    )
)
VARIANTS = (
    replace(GRID[0], name="dense_window", window=33),
    replace(GRID[3], name="window_causal_chunks", window=270, causal=True),
    replace(GRID[5], name="window_one", window=1, causal=True),
    replace(GRID[8], name="padding_and_causal", padding=3, causal=True),
    Case("no_blocks", (5,), ()),
    Case("nothing", (), ()),
    *(Case(f"context_of_{n}", (n + 1,), (n,), B=8, G=3) for n in (1, 15, 16, 17, 32, 63, 65, 81)),
)


def naive(t: tuple[Tensor, ...], layout: AttentionLayout) -> Tensor:
    """semantics.md's "Attention mask", block by block, in the dtype of the inputs."""
    q, k_ctx, v_ctx, k_blk, v_blk = t
    B, G, D = layout.block_size, q.shape[1] // k_blk.shape[1], q.shape[2]
    slot = torch.arange(B)
    blocks = []
    for i, (start, end) in enumerate(zip(layout.ctx_start.tolist(), layout.ctx_end.tolist())):
        own = slice(i * B, (i + 1) * B)
        if start > end:
            blocks.append(q[own] * 0.0)
            continue
        k = torch.cat([k_ctx[start:end], k_blk[own]]).repeat_interleave(G, dim=1)
        v = torch.cat([v_ctx[start:end], v_blk[own]]).repeat_interleave(G, dim=1)
        distance = end + slot[:, None] - torch.arange(start, end)
        sees_context = distance <= (layout.window or math.inf) - 1
        sees_own = slot[:, None] >= slot if layout.causal else torch.ones(B, B, dtype=torch.bool)
        score = torch.einsum("qhd,khd->hqk", q[own], k) * D**-0.5
        score = score.masked_fill(~torch.cat([sees_context, sees_own], dim=1), -math.inf)
        blocks.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), v))
    return torch.cat(blocks) if blocks else q * 0.0


def results(function, t: tuple[Tensor, ...], layout: AttentionLayout, dout: Tensor) -> list[Tensor]:
    """Output and five gradients."""
    leaves = [x.detach().requires_grad_() for x in t]
    out = function(leaves, layout)
    grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads))]


def ours(t: tuple[Tensor, ...], layout: AttentionLayout, dout: Tensor) -> list[Tensor]:
    return results(lambda x, y: dflash_attention(*x, y), t, layout, dout)


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    yield
    torch.set_num_threads(before)


@torch_threads(1)  # hundreds of products too small to share
def naive_results(t: tuple, layout: AttentionLayout, dout: Tensor, dtype: torch.dtype) -> list:
    return results(naive, tuple(x.to(dtype) for x in t), layout, dout.to(dtype))


def assert_two_times_rule(
    actual: list[Tensor], t: tuple, layout: AttentionLayout, dout: Tensor, luck: float = 1e-7
) -> None:
    truth = naive_results(t, layout, dout, torch.float64)
    rounded = naive_results(t, layout, dout, dout.dtype)
    for name, x, r, y in zip(NAMES, actual, rounded, truth, strict=True):
        assert (x.dtype, x.shape) == (dout.dtype, y.shape), name
        error, allowed = (x.double() - y).norm(), (r.double() - y).norm()
        tiny = luck * y.norm() + 1e-6  # the constant: gradients that cancel to zero
        assert error <= 2 * allowed + tiny, f"{name}: {error:.2e}, torch {allowed:.2e}"


def assert_bitwise(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(x, y), f"{name} differs: {what}"


@pytest.fixture
def nan_filled_memory() -> Iterator[None]:
    """Every torch.empty is full of NaN: an element that is not written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize("case", CASES + GRID + VARIANTS, ids=str)
def test_output_and_gradients(case: Case, dtype: torch.dtype) -> None:
    t, layout, dout = make_inputs(case, dtype)
    assert_two_times_rule(ours(t, layout, dout), t, layout, dout)


@settings(max_examples=30)
@given(data=st.data())
def test_any_layout(data: st.DataObject) -> None:
    documents = data.draw(st.lists(st.integers(0, 90), max_size=5), label="documents")
    T = sum(documents)
    starts = torch.tensor([0, *documents]).cumsum(0).tolist()
    draw_anchors = st.lists(st.integers(0, max(T - 1, 0)), max_size=9 if T else 0)  # may repeat
    anchors = sorted(data.draw(draw_anchors, label="anchors"))
    padding = data.draw(st.integers(0, 2), label="padding")
    start = [max(s for s in starts if s <= a) for a in anchors] + [T + 1] * padding
    layout = build_layout(
        torch.tensor(start, dtype=torch.int64),
        torch.tensor(anchors + [T] * padding, dtype=torch.int64),
        num_ctx=T,
        block_size=data.draw(st.sampled_from((4, 8, 16, 32)), label="B"),
        window=data.draw(st.none() | st.integers(1, 100), label="window"),
        causal=data.draw(st.booleans(), label="causal"),
    )
    Hkv, G = data.draw(st.integers(1, 3), label="Hkv"), data.draw(st.integers(1, 7), label="G")
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    rows = layout.num_blocks * layout.block_size
    q, dout = (torch.randn(rows, Hkv * G, 64, generator=g) for _ in range(2))
    k_ctx, v_ctx = (torch.randn(T, Hkv, 64, generator=g) for _ in range(2))
    k_blk, v_blk = (torch.randn(rows, Hkv, 64, generator=g) for _ in range(2))
    t = (q, k_ctx, v_ctx, k_blk, v_blk)
    # In a problem of a few numbers torch may be luckier than the rounding of one dot product.
    luck = math.sqrt(64) * torch.finfo(torch.float32).eps
    assert_two_times_rule(ours(t, layout, dout), t, layout, dout, luck)


SMALL = Case("small", (70, 40), (3, 30, 31, 69, 71, 100), B=8, Hkv=2, G=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
def test_slices_of_fused_tensors(dtype: torch.dtype) -> None:
    """q, k, v as slices of one projection that starts one element past any alignment."""
    t, layout, dout = make_inputs(SMALL, dtype)
    q, k_ctx, v_ctx, k_blk, v_blk = t

    def fuse(*parts: Tensor) -> tuple[Tensor, ...]:
        widths = [x[0].numel() for x in parts]
        flat = torch.cat([x.flatten(1) for x in parts], dim=1)
        buffer = torch.zeros(flat.numel() + 1, dtype=dtype)[1:].view_as(flat).copy_(flat)
        return tuple(
            y.unflatten(1, x.shape[1:]) for x, y in zip(parts, buffer.split(widths, dim=1))
        )

    views = (lambda a, b, c, d, e: (a, d, e, b, c))(*fuse(q, k_blk, v_blk), *fuse(k_ctx, v_ctx))
    assert not any(x.is_contiguous() for x in views)
    assert views[0].data_ptr() % 4 == q.itemsize % 4
    assert_bitwise(ours(views, layout, dout), ours(t, layout, dout), "fused views")
    head_major = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in t)
    assert_bitwise(ours(head_major, layout, dout), ours(t, layout, dout), "head-major views")


def test_expanded_and_transposed_output_gradients() -> None:
    t, layout, dout = make_inputs(SMALL)
    leaves = [x.clone().requires_grad_() for x in t]
    dflash_attention(*leaves, layout).sum().backward()  # autograd hands over a stride-0 gradient
    ones = torch.ones_like(dout)
    assert_bitwise([ones, *(x.grad for x in leaves)], [ones, *ours(t, layout, ones)[1:]], "sum")
    turned = dout.transpose(0, 1).contiguous().transpose(0, 1)
    assert_bitwise(ours(t, layout, turned), ours(t, layout, dout), "transposed gradient")


def test_scale_argument() -> None:
    t, layout, _ = make_inputs(SMALL, torch.float64)
    out = dflash_attention(*(x.float() for x in t), layout, scale=0.37)
    expected = naive((t[0] * 0.37 * math.sqrt(SMALL.D), *t[1:]), layout)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


LEAKAGE_CASES = (
    SMALL,
    replace(SMALL, name="window", window=12),
    replace(SMALL, name="window_causal", window=6, causal=True),
    replace(SMALL, name="small_blocks", B=4, G=1),
    replace(SMALL, name="pieces", B=16, G=7, D=128),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize("case", LEAKAGE_CASES, ids=str)
def test_nothing_hidden_leaks_into_a_block(case: Case, dtype: torch.dtype) -> None:
    """Requirement 6: output and gradients of a block keep every bit."""
    t, layout, dout = make_inputs(case, dtype)
    before, B = ours(t, layout, dout), case.B
    for i, (start, end) in enumerate(zip(layout.ctx_start.tolist(), layout.ctx_end.tolist())):
        own = slice(i * B, (i + 1) * B)
        lowest = max(start, end - (case.window or end + 1) + 1)
        hidden_context = torch.ones(layout.num_ctx, dtype=torch.bool)
        hidden_context[lowest:end] = False
        other_rows = torch.ones(layout.num_blocks * B, dtype=torch.bool)
        other_rows[own] = False
        for amount in (1e3, -1e30):  # the second makes a probability of 1e-38 count
            q, k_ctx, v_ctx, k_blk, v_blk, d = (x.clone() for x in (*t, dout))
            for x in (k_ctx, v_ctx):
                x[hidden_context] += amount
            for x in (q, k_blk, v_blk, d):
                x[other_rows] += amount
            after = ours((q, k_ctx, v_ctx, k_blk, v_blk), layout, d)
            for at in (0, 1, 4, 5):
                assert torch.equal(after[at][own], before[at][own]), (NAMES[at], i)


@pytest.mark.parametrize("case", LEAKAGE_CASES[1:3], ids=str)
def test_nothing_hidden_leaks_into_a_slot(case: Case) -> None:
    """The window moves with the slot, and a causal slot does not see the later ones."""
    t, layout, dout = make_inputs(case)
    before, B = ours(t, layout, dout), case.B
    for i, end in enumerate(layout.ctx_end.tolist()):
        for slot in range(B):
            _, k_ctx, v_ctx, k_blk, v_blk = (x.clone() for x in t)
            for x in (k_ctx, v_ctx):
                x[: max(0, end + slot - case.window + 1)] += 1e3
            if case.causal:
                for x in (k_blk, v_blk):
                    x[i * B + slot + 1 :] += 1e3
            after = ours((t[0], k_ctx, v_ctx, k_blk, v_blk), layout, dout)
            for at in (0, 1):
                assert torch.equal(after[at][i * B + slot], before[at][i * B + slot]), NAMES[at]


def test_other_documents_may_be_nan() -> None:
    case = Case("documents", (30, 1, 60, 50), (3, 29, 30, 31, 40, 90, 91, 139), B=4, G=1)
    t, layout, dout = make_inputs(case)
    before, first = ours(t, layout, dout), int(layout.ctx_start[4])
    mine = slice(3 * case.B, 6 * case.B)  # the third document's blocks, one with empty context
    assert layout.ctx_start[3:6].tolist() == [first] * 3
    poisoned = [torch.full_like(x, math.nan) for x in (*t, dout)]
    for x, source in zip(poisoned, (*t, dout)):
        rows = slice(first, first + 60) if x.shape[0] == layout.num_ctx else mine
        x[rows] = source[rows]
    after = ours(tuple(poisoned[:5]), layout, poisoned[5])
    for at in range(6):
        rows = slice(first, first + 60) if at in (2, 3) else mine
        assert torch.equal(after[at][rows], before[at][rows]), NAMES[at]


# Several chunks, segments and documents: enough work for three threads, enough waiting to go wrong.
BUSY = Case("busy", (150, 200), spread(350, 40, 1), B=8, Hkv=1, G=5, D=128)


@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize("window", [None, 60])
def test_results_do_not_depend_on_threads(dtype: torch.dtype, window: int | None) -> None:
    t, layout, dout = make_inputs(replace(BUSY, window=window), dtype)
    with torch_threads(1):
        expected = ours(t, layout, dout)
    for n in (2, 3, 7, 2, 3, 7):
        with torch_threads(n):
            assert_bitwise(ours(t, layout, dout), expected, f"{n} threads")


@torch_threads(2)
def test_concurrent_calls_equal_serial_ones() -> None:
    problems = [make_inputs(c, seed=s) for s, c in enumerate((BUSY, SMALL, *GRID[:2], *GRID[5:9]))]
    serial = [ours(*p) for p in problems]
    concurrent: list[list] = [[] for _ in problems]
    start = threading.Barrier(len(problems))

    @torch_threads(2)  # the number is each thread's own
    def work(i: int) -> None:
        start.wait()
        for _ in range(3):
            concurrent[i].append(ours(*problems[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    for expected, rounds in zip(serial, concurrent):
        assert len(rounds) == 3
        for actual in rounds:
            assert_bitwise(actual, expected, "8 Python threads")


@torch_threads(2)
def attend_and_fork() -> None:
    """Ends this process with 0 if its child computes what it did itself."""
    t, layout, dout = make_inputs(BUSY)
    expected = ours(t, layout, dout)[0].numpy()  # the parent's workers exist from here
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_SECONDS))  # ends a child that hangs
        with torch.no_grad():
            same = (dflash_attention(*t, layout).numpy() == expected).all()
        os._exit(0 if same else 1)
    os._exit(os.waitpid(child, 0)[1] != 0)


def test_a_forked_child_gets_threads_of_its_own() -> None:
    # In a process that has no other threads, which might hold what the child would wait for.
    parent = multiprocessing.get_context("forkserver").Process(target=attend_and_fork)
    parent.start()
    parent.join()
    assert parent.exitcode == 0


NAME_SCRIPT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("dflash_ext._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.cpu_instruction_set())
"""
RUN_SCRIPT = """
import sys, torch
from dflash_ext import _C
from dflash_ext.ops import AttentionLayout, dflash_attention
torch.serialization.add_safe_globals([AttentionLayout])
def run(t, layout, dout):
    leaves = [x.requires_grad_() for x in t]
    out = dflash_attention(*leaves, layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
torch.save((_C.cpu_instruction_set(), [run(*p) for p in torch.load(sys.argv[1])]), sys.argv[2])
"""


def run_with_isa(isa: str, script: str, *arguments: str) -> subprocess.CompletedProcess:
    search = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "DFLASH_CPU_ISA": isa, "PYTHONPATH": search}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def test_every_instruction_set(tmp_path: Path) -> None:
    """Each set this machine has is right; the others, and names that are none, are refused."""
    usable = set()
    for name in ("sse2", "avx2", "avx512", "baseline", "neon"):
        child = run_with_isa(name, NAME_SCRIPT, _C.__file__)
        if child.returncode == 0:
            assert child.stdout.split() == [name]
            usable.add(name)
        else:
            assert f"DFLASH_CPU_ISA={name} is not available on this machine" in child.stderr
    assert _C.cpu_instruction_set() in usable
    assert "neon" not in usable

    cases = (GRID[0], GRID[2], GRID[4], replace(BUSY, window=60, causal=True))
    problems = [make_inputs(c, dtype) for c in cases for dtype in DTYPES]
    given_path, results_path = tmp_path / "problems", tmp_path / "results"
    torch.save(problems, given_path)
    for name in usable - {_C.cpu_instruction_set()}:  # this process tests its own everywhere else
        child = run_with_isa(name, RUN_SCRIPT, str(given_path), str(results_path))
        assert child.returncode == 0, child.stderr
        used, actual = torch.load(results_path)
        assert used == name
        for problem, result in zip(problems, actual, strict=True):
            assert_two_times_rule(result, *problem)


def test_wrong_layouts_are_refused() -> None:
    t, _, _ = make_inputs(SMALL)
    good = case_layout(SMALL)
    for at, value, message in (
        (2, 200, "sees context rows"),
        (1, 2, "out of order"),
    ):
        end = good.ctx_end.clone()
        end[at] = value
        with pytest.raises(ValueError, match=message):
            dflash_attention(*t, replace(good, ctx_end=end))
    with pytest.raises(ValueError, match="sees context rows"):
        dflash_attention(*t, replace(good, ctx_start=good.ctx_start - 1))
    start = good.ctx_start.clone()
    start[1] = good.num_ctx + 1  # a padding block among the others
    with pytest.raises(ValueError, match="padding blocks come last"):
        dflash_attention(*t, replace(good, ctx_start=start))
