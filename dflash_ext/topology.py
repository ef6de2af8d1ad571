"""Who does what: ranks to roles, feature batches to targets and drafters. Pure arithmetic.

Every rank computes the same answers from the same few integers, so nothing is negotiated, no
message says what comes next, and a restart needs one integer.

Ranks 0 .. M-1 are the drafters (rank 0 keeps the run folder; neighbours share a host, where their
gradients meet), ranks M .. M+N-1 the targets. Feature batch i is captured by target i % N and
trained on by drafter (i - first_batch) % M. A drafter takes `draws` anchor draws from each of its
feature batches, one micro-batch each, and `accumulate` micro-batches make its share of an optimizer
step: M * accumulate micro-batches in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dflash_ext.errors import UserError


@dataclass(frozen=True)
class Topology:
    """N targets and M drafters, each a rank of its own; or one process that is both."""

    targets: int = 1
    drafters: int = 1
    shared: bool = True
    """Target and drafter are one process."""

    def __post_init__(self) -> None:
        if self.targets < 1 or self.drafters < 1:
            raise UserError(
                f"{self.targets} targets and {self.drafters} drafters: expected at least one of "
                "each (give both --targets and --drafters, or neither for one process)"
            )

    @property
    def world_size(self) -> int:
        return 1 if self.shared else self.targets + self.drafters

    def drafter_of(self, rank: int) -> int | None:
        """Number of the drafter that `rank` is, or None."""
        return rank if rank < self.drafters else None

    def target_of(self, rank: int) -> int | None:
        """Number of the target that `rank` is, or None."""
        if self.shared:
            return 0
        return rank - self.drafters if rank >= self.drafters else None

    def target_rank(self, target: int) -> int:
        return 0 if self.shared else self.drafters + target

    def role(self, rank: int) -> str:
        """For messages: "target 2", "drafter 0"."""
        drafter = self.drafter_of(rank)
        return f"target {self.target_of(rank)}" if drafter is None else f"drafter {drafter}"

    def pairs(self) -> list[tuple[int, int]]:
        """(target, drafter) that may ever meet, in one order for all ranks.

        All of them: a resumed run may begin at any feature batch, and validation has an order of
        its own.
        """
        return [(t, d) for t in range(self.targets) for d in range(self.drafters)]


def devices_of(
    rank: int, local: int, *, ranks_here: int, drafters: int, per_target: int
) -> tuple[range, int]:
    """(devices of its machine that a rank owns, how many the ranks of its machine own in all).

    A drafter owns one and a target `per_target`, one rank after the other. `local`: its number
    among the `ranks_here` of its machine, which are neighbours.
    """
    widths = [
        1 if other < drafters else per_target
        for other in range(rank - local, rank - local + ranks_here)
    ]
    begin = sum(widths[:local])
    return range(begin, begin + widths[local]), sum(widths)


class Micro(NamedTuple):
    """One micro-batch: the anchors of one draw over one feature batch."""

    batch: int
    draw: int


@dataclass(frozen=True)
class Course:
    """Which micro-batches an optimizer step consists of, from where this arrangement began.

    A run that continues with other numbers of drafters or draws begins a new course at its next
    untouched feature batch (`continued`); the number of targets never matters.
    """

    drafters: int
    accumulate: int
    draws: int
    end: int | None = None
    """Feature batches that exist, if the run is given in epochs; None: without end."""
    first_step: int = 0
    first_batch: int = 0

    def drafter(self, batch: int) -> int:
        """The drafter that trains on a feature batch."""
        return (batch - self.first_batch) % self.drafters

    def _batch(self, drafter: int, local: int) -> int:
        return self.first_batch + local * self.drafters + drafter

    def micros(self, step: int, drafter: int) -> list[Micro]:
        """A drafter's micro-batches of one step; fewer, or none, where the feature batches end."""
        first = (step - self.first_step) * self.accumulate
        found = []
        for count in range(first, first + self.accumulate):
            local, draw = divmod(count, self.draws)
            batch = self._batch(drafter, local)
            if self.end is None or batch < self.end:
                found.append(Micro(batch, draw))
        return found

    def begun(self, step: int) -> int:
        """Feature batches [0, n) of which a draw was used before `step`: the data position."""
        count = (step - self.first_step) * self.accumulate
        n = self.first_batch + -(-count // self.draws) * self.drafters
        return n if self.end is None else min(n, self.end)

    def arrivals(self, step: int) -> range:
        """Feature batches first needed in `step`, by all drafters together.

        In a step that begins amid a drafter's draws, its current batch is not among them.
        """
        return range(self.begun(step), self.begun(step + 1))

    def held(self, step: int, drafter: int) -> int | None:
        """The feature batch that a drafter is amid the draws of when `step` begins."""
        count = (step - self.first_step) * self.accumulate
        local, draw = divmod(count, self.draws)
        batch = self._batch(drafter, local)
        return batch if draw and (self.end is None or batch < self.end) else None

    def steps(self) -> int:
        """Optimizer steps until `end`, counted from step 0. Only for a course with an end."""
        assert self.end is not None
        rounds = -(-(self.end - self.first_batch) // self.drafters)
        return self.first_step + -(-rounds * self.draws // self.accumulate)

    def continued(self, step: int, drafters: int, accumulate: int, draws: int) -> Course:
        """The course from `step` on with other numbers. UserError amid the draws of a batch."""
        if (drafters, accumulate, draws) == (self.drafters, self.accumulate, self.draws):
            return self
        if (step - self.first_step) * self.accumulate % self.draws:
            raise UserError(
                f"step {step} is amid the {self.draws} draws of its feature batches, which "
                f"{self.drafters} drafters hold: continue with {self.drafters} drafters, "
                f"--batch.accumulate {self.accumulate} and --batch.draws {self.draws}"
            )
        return Course(drafters, accumulate, draws, self.end, step, self.begun(step))


class Handover(NamedTuple):
    """One feature batch that goes from a target to a drafter."""

    kind: str
    """"train" or "held-out"."""
    batch: int
    """Its number among the feature batches of all epochs, or among the held-out ones."""
    target: int
    drafter: int

    def __str__(self) -> str:
        return f"batch {self.batch}" if self.kind == "train" else f"held-out batch {self.batch}"


def validates(step: int, steps: int, every: int) -> bool:
    """Is there a validation after `step` steps of `steps`?"""
    return step == steps or (every > 0 and step % every == 0)


def handovers(
    topology: Topology, course: Course, begin: int, steps: int, *, every: int, held_out: int,
    keep: bool,
) -> Iterator[Handover]:  # fmt: skip
    """Everything handed over between step `begin` and step `steps`, in one order for all ranks.

    every: steps between validations (0: only the last). held_out: validation batches. keep: the
    drafters keep validation features, so these travel once.
    """
    N, M = topology.targets, course.drafters

    def train(batch: int) -> Handover:
        return Handover("train", batch, batch % N, course.drafter(batch))

    held = [course.held(begin, drafter) for drafter in range(M) if begin < steps]
    yield from (train(batch) for batch in held if batch is not None)
    sent = False
    for step in range(begin, steps):
        yield from map(train, course.arrivals(step))
        if validates(step + 1, steps, every) and not (keep and sent):
            yield from (Handover("held-out", v, v % N, v % M) for v in range(held_out))
            sent = True


def best_split(devices: int, target_seconds: float, drafter_seconds: float) -> tuple[int, int]:
    """(targets, drafters) of `devices` that moves the most feature batches per second.

    From the seconds one target and one drafter spend on one feature batch (its draws and its share
    of the optimizer step included).
    """
    if devices < 2:
        raise UserError(
            f"{devices} device: targets and drafters on ranks of their own need at least 2"
        )
    options = [(n, devices - n) for n in range(1, devices)]
    return max(options, key=lambda nm: min(nm[0] / target_seconds, nm[1] / drafter_seconds))
