"""Arithmetic of roles and hand-overs: everything exactly once, in one order, for any N and M."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ext.errors import UserError
from dflash_ext.topology import (
    Course,
    Handover,
    Topology,
    best_split,
    devices_of,
    handovers,
    validates,
)

SMALL = st.integers(1, 4)


def test_ranks_and_roles():
    five_three = Topology(5, 3, shared=False)
    roles = [five_three.role(rank) for rank in range(five_three.world_size)]
    assert roles == [*(f"drafter {i}" for i in range(3)), *(f"target {i}" for i in range(5))]
    for rank in range(8):
        drafter, target = five_three.drafter_of(rank), five_three.target_of(rank)
        assert (drafter is None) != (target is None)
        assert target is None or five_three.target_rank(target) == rank
    assert len(set(five_three.pairs())) == 15
    alone = Topology()
    assert (alone.world_size, alone.drafter_of(0), alone.target_of(0)) == (1, 0, 0)
    for targets, drafters in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(UserError, match="at least one of each"):
            Topology(targets, drafters, shared=False)


def test_every_rank_owns_devices_of_its_own():
    """3 drafters and 2 targets of 3 GPUs on one machine, and over two machines."""
    alone = [devices_of(rank, rank, ranks_here=5, drafters=3, per_target=3) for rank in range(5)]
    assert [list(own) for own, _ in alone] == [[0], [1], [2], [3, 4, 5], [6, 7, 8]]
    assert {wanted for _, wanted in alone} == {9}
    first = [devices_of(r, r, ranks_here=4, drafters=3, per_target=3) for r in range(4)]
    assert [(list(own), wanted) for own, wanted in first[2:]] == [([2], 6), ([3, 4, 5], 6)]
    own, wanted = devices_of(4, 0, ranks_here=1, drafters=3, per_target=3)
    assert (list(own), wanted) == ([0, 1, 2], 3)


def used(course: Course, steps: range) -> list[tuple[int, int]]:
    return [
        (micro.batch, micro.draw)
        for step in steps
        for drafter in range(course.drafters)
        for micro in course.micros(step, drafter)
    ]


@given(SMALL, SMALL, SMALL, st.integers(1, 30))
def test_every_draw_of_every_batch_is_used_once(drafters, accumulate, draws, end):
    course = Course(drafters, accumulate, draws, end)
    found = used(course, range(course.steps()))
    assert sorted(found) == list(itertools.product(range(end), range(draws)))
    assert used(course, range(course.steps(), course.steps() + 3)) == []
    assert any(course.micros(course.steps() - 1, d) for d in range(drafters))
    for step in range(course.steps() + 1):
        assert course.begun(step) == len({b for b, _ in used(course, range(step))})
        # What begun counts is a prefix: no batch is begun before all earlier ones.
        assert {b for b, _ in used(course, range(step))} == set(range(course.begun(step)))
    for drafter in range(drafters):
        own = [m.batch for s in range(course.steps()) for m in course.micros(s, drafter)]
        assert own == sorted(own)  # a batch's draws follow each other: one buffer in use
        assert all(course.drafter(batch) == drafter for batch in own)


@given(SMALL, SMALL, st.integers(1, 3), st.integers(0, 12), SMALL, SMALL, st.integers(1, 3))
def test_another_number_of_drafters_goes_on_where_the_last_stopped(M, A, D, step, M2, A2, D2):
    first = Course(M, A, D, 40)
    step = min(step, first.steps())
    if (step * A) % D and (M, A, D) != (M2, A2, D2):
        with pytest.raises(UserError, match=f"continue with {M} drafters"):
            first.continued(step, M2, A2, D2)
        return
    second = first.continued(step, M2, A2, D2)
    assert second.begun(step) == first.begun(step)
    found = used(first, range(step)) + used(second, range(step, second.steps()))
    assert sorted({b for b, _ in found}) == list(range(40))
    assert len(set(found)) == len(found)
    if D == D2:
        assert len(found) == 40 * D
    assert second.continued(step, M2, A2, D2) == second


@given(
    st.integers(1, 5), SMALL, SMALL, st.integers(1, 3), st.integers(0, 8), st.integers(0, 3),
    st.integers(0, 5), st.booleans(),
)  # fmt: skip
def test_both_sides_walk_the_same_list(N, M, A, D, begin, every, held_out, keep):
    topology, course, steps = Topology(N, M, shared=False), Course(M, A, D, 25), 8
    everything = list(
        handovers(topology, course, begin, steps, every=every, held_out=held_out, keep=keep)
    )
    for drafter in range(M):
        # What the drafter's loop takes, from the loop's own point of view.
        taken, captured, sent = [], None, False
        for step in range(begin, steps):
            for batch, _ in course.micros(step, drafter):
                if batch != captured:
                    captured = batch
                    taken.append(Handover("train", batch, batch % N, drafter))
            if validates(step + 1, steps, every) and not (keep and sent):
                sent = True
                own = range(drafter, held_out, M)
                taken += [Handover("held-out", v, v % N, drafter) for v in own]
        assert [h for h in everything if h.drafter == drafter] == taken
    for h in everything:
        assert 0 <= h.target < N


def test_nobody_waits_in_a_circle():
    """Simulated with one buffer a drafter: ranks that act only in their own order always finish."""
    for N, M, A, D in itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 2), (1, 3)):
        topology, course = Topology(N, M, shared=False), Course(M, A, D, 20)
        everything = list(
            handovers(topology, course, 0, course.steps(), every=2, held_out=4, keep=False)
        )
        targets = [[h for h in everything if h.target == t] for t in range(N)]
        drafters = [[h for h in everything if h.drafter == d] for d in range(M)]
        while any(targets):
            moved = False
            for waiting in targets:
                if waiting and drafters[waiting[0].drafter][0] == waiting[0]:
                    drafters[waiting.pop(0).drafter].pop(0)
                    moved = True
            assert moved
        assert not any(drafters)


def test_best_split():
    assert best_split(8, 1.0, 1.0) == (4, 4)
    assert best_split(8, 5.0, 3.0) == (5, 3)
    assert best_split(8, 100.0, 1.0) == (7, 1)
    assert best_split(2, 1.0, 50.0) == (1, 1)
    with pytest.raises(UserError, match="at least 2"):
        best_split(1, 1.0, 1.0)
