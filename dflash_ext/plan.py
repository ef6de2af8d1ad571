"""Which samples form which batch: pure arithmetic on lengths, the same on every rank.

A batch is bounded in tokens, in documents and in anchors, so that the memory of a step is bounded
whatever the data look like. A restart needs one integer: the number of batches behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_ext.errors import UserError

# Batches being filled at the same time. A handful fills them to within a few per cent; many more
# would only make the plan slower and group short samples into the epoch's last batches.
_OPEN_BATCHES = 8
# `levelled`: batches sorted at a time, and those of a group, which are alike; 2, 3, 4, 6 and 12
# drafters share groups without a rest. With documents of a log-normal length and up to 512 anchors
# each, three drafters then reach 0.99 of their own pace instead of 0.92.
_LEVEL, _ALIKE = 192, 12
PLANNER = f"first fit into {_OPEN_BATCHES}, levelled {_LEVEL}/{_ALIKE}"
"""To be changed with what `plan_epoch` makes of the same data: a run goes on by its own only."""


@dataclass
class _Open:
    tokens: int = 0
    anchors: int = 0
    samples: list[int] = field(default_factory=list)


def epoch_order(count: int, *, seed: int, epoch: int) -> np.ndarray:
    """int64 [count]: the epoch's shuffle, a function of (seed, epoch) alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(
        count
    )


def plan_epoch(
    lengths: np.ndarray,
    anchors: np.ndarray,
    *,
    seed: int,
    epoch: int,
    token_budget: int,
    max_documents: int,
    anchor_budget: int,
) -> list[list[int]]:
    """Batches of sample indices; every sample of `lengths` appears exactly once.

    lengths, anchors: int [n], tokens and anchors each sample costs. In every batch the sums stay
    within token_budget and anchor_budget and there are at most max_documents samples. Samples come
    in shuffled order; first fit into a few open batches keeps the batches full; batches that follow
    each other cost about the same (`levelled`).
    Raises UserError when a sample does not fit into an empty batch.
    """
    _check(lengths, anchors, token_budget, max_documents, anchor_budget)
    tokens_of, anchors_of = lengths.tolist(), anchors.tolist()
    closed: list[_Open] = []
    open_batches: list[_Open] = []
    for sample in epoch_order(len(tokens_of), seed=seed, epoch=epoch).tolist():
        for batch in open_batches:
            if (
                batch.tokens + tokens_of[sample] <= token_budget
                and batch.anchors + anchors_of[sample] <= anchor_budget
                and len(batch.samples) < max_documents
            ):
                break
        else:
            if len(open_batches) == _OPEN_BATCHES:
                # The oldest one has been offered the most samples: little more will fit.
                closed.append(open_batches.pop(0))
            batch = _Open()
            open_batches.append(batch)
        batch.tokens += tokens_of[sample]
        batch.anchors += anchors_of[sample]
        batch.samples.append(sample)
    batches = closed + open_batches
    work = [batch.anchors for batch in batches]
    return levelled([batch.samples for batch in batches], work, seed=seed, epoch=epoch)


def levelled(
    batches: Sequence[list[int]], work: Sequence[int], *, seed: int, epoch: int
) -> list[list[int]]:
    """The batches such that neighbours are of about the same work.

    Drafters take neighbours in one step and wait for the largest. Each _LEVEL batches are sorted by
    their work and cut into groups of _ALIKE; the groups are shuffled, and each within itself. No
    batch moves by _LEVEL places. Steps of several drafters then differ in their anchors
    as those of one drafter do, instead of averaging over batches: a document's weight in its step's
    mean varies with them as much.
    """
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, 1])))
    found: list[list[int]] = []
    for begin in range(0, len(batches), _LEVEL):
        part = range(begin, min(begin + _LEVEL, len(batches)))
        order = sorted(part, key=lambda i: work[i])
        groups = [order[i : i + _ALIKE] for i in range(0, len(order), _ALIKE)]
        for group in generator.permutation(len(groups)):
            found += [batches[i] for i in generator.permutation(groups[group])]
    return found


def _check(
    lengths: np.ndarray,
    anchors: np.ndarray,
    token_budget: int,
    max_documents: int,
    anchor_budget: int,
) -> None:
    if lengths.shape != anchors.shape or lengths.ndim != 1:
        raise UserError(
            f"plan: lengths of shape {lengths.shape} and anchors of shape {anchors.shape}; "
            "expected one of each per sample"
        )
    if len(lengths) == 0:
        raise UserError("plan: no sample to plan; expected at least one")
    if max_documents < 1:
        raise UserError(f"max_documents {max_documents}: expected at least 1")
    for name, cost, budget in (
        ("tokens", lengths, token_budget),
        ("anchors", anchors, anchor_budget),
    ):
        worst = int(cost.argmax())
        if cost[worst] > budget:
            raise UserError(
                f"sample {worst} has {int(cost[worst])} {name} but a batch holds {budget}; raise "
                f"the budget of {name} or prepare the data with a smaller limit"
            )
        if cost.min() < 0:
            raise UserError(f"sample {int(cost.argmin())} has a negative number of {name}")


def plan_subbatches(lengths: Sequence[int], overhead: int) -> list[list[int]]:
    """Split documents into padded sub-batches at the least total cost.

    A sub-batch of n documents costs n * (its longest document) + `overhead` tokens. Sorted by
    length an optimal split is contiguous, so dynamic programming over the cut points is exact.
    The padded total never exceeds sum(lengths) + overhead * len(lengths), and no sub-batch exceeds
    sum(lengths): so the token budget bounds a forward's memory, padding and all.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cost = np.zeros(len(order) + 1, dtype=np.int64)
    cut = np.zeros(len(order) + 1, dtype=np.int64)
    longest = np.array([lengths[i] for i in order], dtype=np.int64)
    most = longest.sum()
    for end in range(1, len(order) + 1):
        padded = (end - np.arange(end)) * longest[:end]
        total = np.where(padded <= most, cost[:end] + padded + overhead, np.iinfo(np.int64).max)
        cut[end] = int(total.argmin())
        cost[end] = total[cut[end]]
    plan: list[list[int]] = []
    end = len(order)
    while end > 0:
        plan.append(order[cut[end] : end])
        end = int(cut[end])
    return plan[::-1]


def batch_at(step: int, batches_in: Callable[[int], int]) -> tuple[int, int]:
    """(epoch, index in the epoch) of a step counted from 0 over all epochs.

    `batches_in(epoch)` is the epoch's number of batches: the shuffle changes it a little.
    """
    if step < 0:
        raise UserError(f"step {step}: expected 0 or more")
    epoch = 0
    while step >= (batches := batches_in(epoch)):
        step -= batches
        epoch += 1
    return epoch, step


def samples_at(states: Sequence[tuple[int, int]], epoch: int) -> int:
    """Samples that an epoch trains on: the first so many of the data, which may grow in a run.

    states: (first epoch, samples), in order of time, the first one from epoch 0 on. The last state
    whose first epoch has come counts.
    """
    return [samples for first, samples in states if first <= epoch][-1]


class Schedule:
    """All epochs' plans of one data set: `schedule.batch(step)` for any step, in any order.

    Only the counts of passed epochs and the last two plans are kept, so memory does not grow.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        anchors: np.ndarray,
        *,
        seed: int,
        token_budget: int,
        max_documents: int,
        anchor_budget: int,
        states: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """lengths, anchors: int [n]. states: see `samples_at`; None: all samples in every epoch.

        Raises UserError when a sample does not fit into an empty batch, whenever its turn is.
        """
        _check(lengths, anchors, token_budget, max_documents, anchor_budget)
        self._states = ((0, len(lengths)),) if states is None else tuple(states)

        def plan(epoch: int) -> list[list[int]]:
            count = self.samples_in(epoch)
            return plan_epoch(
                lengths[:count],
                anchors[:count],
                seed=seed,
                epoch=epoch,
                token_budget=token_budget,
                max_documents=max_documents,
                anchor_budget=anchor_budget,
            )

        self.lengths = lengths
        """int [samples]: tokens of each sample."""
        self._plan = plan
        self._plans: dict[int, list[list[int]]] = {}
        self._counts: dict[int, int] = {}
        self.epoch(0)  # not only in the first step, which the other ranks wait for

    def samples_in(self, epoch: int) -> int:
        """Samples that the epoch trains on, each once."""
        return samples_at(self._states, epoch)

    def epoch(self, epoch: int) -> list[list[int]]:
        """The epoch's batches of sample indices."""
        if epoch not in self._plans:
            while len(self._plans) > 1:
                self._plans.pop(next(iter(self._plans)))
            self._plans[epoch] = self._plan(epoch)
            self._counts[epoch] = len(self._plans[epoch])
        return self._plans[epoch]

    def batches_in(self, epoch: int) -> int:
        return self._counts[epoch] if epoch in self._counts else len(self.epoch(epoch))

    def batches_of(self, epochs: int) -> int:
        """Feature batches of the first `epochs` epochs together."""
        return sum(self.batches_in(epoch) for epoch in range(epochs))

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, index) of a step."""
        return batch_at(step, self.batches_in)

    def untouched(self, batches: int) -> int:
        """The first epoch that the plan's first `batches` batches have not begun."""
        epoch, index = self.locate(batches)
        return epoch + (index > 0)

    def batch(self, step: int) -> list[int]:
        """Sample indices of the step's batch."""
        epoch, index = self.locate(step)
        return self.epoch(epoch)[index]
