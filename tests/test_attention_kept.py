"""dS kept between the backward's kernels: room for it, the same gradients, and where it is refused.

The images themselves are tested in test_triton_interpreter.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, Case, make_inputs
from hypothesis import given
from hypothesis import strategies as st
from interpreted import Launchers, placed

from dflash_ext import _C
from dflash_ext.bench.problem import make_problem
from dflash_ext.bench.shapes import CUDA_SHAPES
from dflash_ext.blocks import visible_rows
from dflash_ext.ops import attention_call, attention_cuda
from dflash_ext.ops.attention import dflash_attention
from dflash_ext.ops.attention_call import Tensors, forced_path
from dflash_ext.ops.attention_cuda import images_of_ds
from dflash_ext.ops.kept import (
    IMAGE_ROWS,
    ImageCounts,
    countable,
    ds_limit,
    image_bytes,
    keeps,
    room_for_ds,
    take_room,
    tiles_seen,
)
from dflash_ext.ops.layout import AttentionLayout, build_layout, schedule_reference

BF16 = torch.bfloat16


@st.composite
def layouts(draw: st.DrawFn) -> AttentionLayout:
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))
    T = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = st.lists(st.integers(0, T - 1), min_size=1, max_size=40, unique=True)
    anchors = torch.tensor(sorted(draw(rows)))
    start = starts[torch.searchsorted(starts, anchors, right=True) - 1]
    padding = torch.ones(draw(st.integers(0, 3)), dtype=torch.int64)
    return build_layout(
        torch.cat([start, padding * (T + 1)]),
        torch.cat([anchors, padding * T]),
        num_ctx=T,
        block_size=draw(st.sampled_from((1, 4, 8, 16, 32))),
        window=draw(st.sampled_from((None, 1, 7, 64, 130))),
        visible_rows=int((anchors - start).sum()),
    )


@given(layout=layouts(), gqa_ratio=st.integers(1, 16))
def test_images_of_tiles_fit_and_do_not_overlap(layout: AttentionLayout, gqa_ratio: int) -> None:
    schedule = schedule_reference(layout)
    viewers = (schedule.ranges[:, 3] - schedule.ranges[:, 0]).sum()
    assert viewers <= layout.tiles_seen
    block_rows = layout.block_size * (gqa_ratio & -gqa_ratio)
    images, head_images, ctx_images = layout.images(3, gqa_ratio)
    end = 0
    for n, (see_lo, _, _, see_hi) in enumerate(schedule.ranges.tolist()):
        # Row groups that see any of the tile, and one that sees nothing where there are none.
        lo = see_lo * block_rows // IMAGE_ROWS
        hi = max(-(-see_hi * block_rows // IMAGE_ROWS), lo + 1)
        first = int(schedule.seen[n]) * block_rows // IMAGE_ROWS + 2 * n
        assert first >= end
        end = first + hi - lo
    assert end <= ctx_images
    groups = -(-layout.num_blocks * block_rows // IMAGE_ROWS)
    assert head_images == ctx_images + groups
    assert images == head_images * 3 * (gqa_ratio // (gqa_ratio & -gqa_ratio))


def test_without_a_number_from_the_host_nothing_is_kept() -> None:
    t, layout, _ = make_inputs(CASES[0], BF16)
    assert replace(layout, visible_rows=None).tiles_seen is None
    assert images_of_ds(Tensors(*t), replace(layout, visible_rows=None)) is None


def test_padding_takes_nothing_from_what_is_visible() -> None:
    start, end = torch.tensor([0, 0, 2000, 20000]), torch.tensor([3, 900, 1000, 10000])
    assert visible_rows(start, end) == 903
    assert tiles_seen(-7, 4, 2**30) == tiles_seen(0, 4, 2**30) == 8


def test_shapes_that_no_kernel_keeps_or_counts() -> None:
    assert keeps(16, 8, 128)
    assert keeps(32, 7, 64)  # a head a group
    assert not keeps(32, 8, 128)
    assert not keeps(16, 4, 256)
    assert countable(64 * 1023, 2**14, 32, 4)
    assert not countable(64 * 1024, 2**14, 32, 4)


@pytest.mark.parametrize("wrong", [-1, 2.0, torch.tensor(3)])
def test_visible_rows_are_a_number_of_the_host(wrong: object) -> None:
    rows = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be an int of at least 0, known on the host"):
        build_layout(rows, rows, num_ctx=4, block_size=4, visible_rows=wrong)  # type: ignore


def test_room_is_taken_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needed and at least, within the limit; a rehearsal takes what other batches may need."""
    monkeypatch.setattr("dflash_ext.ops.kept.ds_limit", lambda device: image_bytes(10))
    like = torch.empty(0, dtype=BF16)
    for total, least, taken in [(3, 0, 3), (3, 7, 7), (3, 99, 10), (10, 0, 10)]:
        room = take_room(like, ImageCounts(total, total, total), image_bytes(least))
        assert room is not None
        assert room.images.nbytes == image_bytes(taken)
    assert take_room(like, ImageCounts(11, 11, 11), 0) is None
    assert take_room(like, ImageCounts(11, 11, 11), image_bytes(7)) is None
    assert take_room(like, ImageCounts(3, 3, 3), None) is None

    class Full:
        device = like.device

        def element_size(self) -> int:
            return 2

        def new_empty(self, size: int) -> torch.Tensor:
            raise torch.OutOfMemoryError

    short = set[int | None]()
    monkeypatch.setattr("dflash_ext.ops.kept._short", short)
    with pytest.warns(UserWarning, match="has no memory to keep dS"):
        assert take_room(Full(), ImageCounts(3, 3, 3), 0) is None  # type: ignore[arg-type]
    assert short == {None}
    assert take_room(like, ImageCounts(3, 3, 3), 0) is None  # and never again: bits would change


def test_the_cpu_keeps_nothing() -> None:
    assert ds_limit(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("path", "D", "least", "expected"),
    [
        ("hopper", 128, 0, ["attention_bwd_delta", "hopper_bwd_dkv_keep", "attention_bwd_dq_kept"]),
        ("hopper", 128, None, ["hopper_bwd_dq_own16", "hopper_bwd_dkv"]),
        (
            "triton",
            128,
            0,
            [
                "attention_bwd_delta_pairs",
                "attention_tma_bwd_dkv_keep",
                "attention_tma_bwd_own_keep",
                "attention_bwd_dq_kept",
            ],
        ),
        ("triton", 128, None, [f"attention_tma_bwd_{k}" for k in ("dq", "dkv", "own")]),
        (
            "triton",
            256,
            0,
            [*(f"attention_tma_bwd_{k}" for k in ("dq", "dk", "dv")), "attention_bwd_own"],
        ),
    ],
)
def test_launches_are_what_the_launchers_take(
    path: str, D: int, least: int | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="pip install -e '.[kernels]' brings it")
    case = Case("launches", (70, 30), (3, 40, 90), B=16, G=4, D=D)
    t, layout, dout = make_inputs(case, BF16)
    layout = replace(layout, schedule=schedule_reference(layout))
    fake = Launchers()
    monkeypatch.setattr(attention_cuda, "_C", fake)
    monkeypatch.setattr(attention_call, "reads_by_maps", lambda device: True)
    monkeypatch.setattr("dflash_ext.ops.kept.ds_limit", lambda device: 1 << 30)
    monkeypatch.setattr(attention_cuda, "place", placed)
    out, lse = attention_cuda.forward(Tensors(*t), layout, 0.1, path)
    assert (out.shape, lse.shape) == (t[0].shape, (t[0].shape[1], t[0].shape[0]))
    assert fake.launched == [{"hopper": "hopper_fwd_own16", "triton": "attention_tma_fwd"}[path]]
    fake.launched.clear()
    made = attention_cuda.backward(Tensors(*t), t[0], lse, dout, layout, 0.1, path, least)
    assert [x.shape for x in made] == [x.shape for x in t]
    assert fake.launched == expected


# ---- on a GPU

SPREAD = tuple(range(5, 1290, 31))
SHAPES = [
    Case(f"B{B}_G{G}_D{D}", (517, 60, 3, 710), SPREAD, B=B, Hkv=2, G=G, D=D, padding=padding)
    for B, G, D, padding in [
        (16, 4, 128, 0),
        (16, 4, 64, 3),
        (8, 1, 128, 5),  # 64 tokens a group: one tile of rows sees own keys of four tiles
        (8, 2, 128, 0),
        (16, 3, 128, 0),  # a head a group
        (16, 6, 64, 2),
        (16, 12, 128, 0),
        (32, 4, 128, 1),
        (4, 16, 128, 0),
    ]
]


def gradients(t: tuple, layout: AttentionLayout, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in t]
    return torch.autograd.grad(dflash_attention(*leaves, layout), leaves, dout)


def assert_recomputing_agrees(t: tuple, layout: AttentionLayout, dout: torch.Tensor) -> None:
    kept = gradients(t, layout, dout)
    with room_for_ds(None):
        again = gradients(t, layout, dout)
    for a, b in zip(kept, again, strict=True):
        # delta is summed in another order: half a unit in the last place, here and there.
        assert (a.float() - b.float()).norm() <= 2e-3 * b.float().norm()


def needs_maps() -> None:
    if _C.device_images(0) != (90, False):
        pytest.skip("dS is kept on sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("path", [None, "triton"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_kept_and_recomputed_give_the_same_gradients(case: Case, path: str | None) -> None:
    needs_maps()
    t, layout, dout = make_inputs(case, BF16, "cuda")
    assert images_of_ds(Tensors(*t), layout) is not None
    if path is None and 128 % (case.B * case.G):
        pytest.skip("takes plain Triton anyway")
    with forced_path(path):
        assert_recomputing_agrees(t, layout, dout)


@pytest.mark.gpu
def test_a_layout_that_sees_more_than_promised_gives_nan() -> None:
    needs_maps()
    t, layout, dout = make_inputs(replace(SHAPES[0], padding=0), BF16, "cuda")
    for path in (None, "triton"):
        with forced_path(path):
            for x in gradients(t, replace(layout, visible_rows=0), dout)[:2]:
                assert x.isnan().any()


@pytest.mark.gpu
def test_where_memory_is_short_scores_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_maps()
    t, layout, dout = make_inputs(SHAPES[0], BF16, "cuda")
    with room_for_ds(None):
        truth = gradients(t, layout, dout)
    monkeypatch.setattr("dflash_ext.ops.kept.SHARE", 1e-9)
    assert all(map(torch.equal, gradients(t, layout, dout), truth))


@pytest.mark.gpu
def test_images_past_2_to_31_elements() -> None:
    """Shape D of the benchmark: 8.6 GB of dS; dQ comes from all of it."""
    needs_maps()
    problem = make_problem(CUDA_SHAPES[3], "cuda", BF16)
    layout = problem.build_layout()
    counts = images_of_ds(problem.leaves, layout)
    assert counts is not None
    if image_bytes(counts.total) > ds_limit(problem.leaves.q.device):
        pytest.skip("this device keeps less")
    assert image_bytes(counts.total) > 2**32
    assert_recomputing_agrees(problem.leaves, layout, torch.randn_like(problem.leaves.q))
