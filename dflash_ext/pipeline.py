"""Feature batches on their way from targets to drafters.

A drafter owns a ring of buffers, each as large as a batch can be, and gives a credit for every one
that is free; a target captures a batch only for a credit. So memory is fixed, a fast side waits for
a slow one by construction, and a send always meets a receive that is already there. Credits and
headers are small and go between the hosts (gloo); the features go between the devices.

Nothing says which batch comes next: both sides walk the same list (`topology.handovers`). It is one
order for all ranks, each doing its own part of it, so the earliest batch not yet handed over can
always move and nobody waits in a circle. Ids and masks do not travel either: every rank has the
token store mapped, and the header proves by a hash that target and drafter read the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from dflash_ext.batch import PackedBatch
from dflash_ext.checkpoint import Progress
from dflash_ext.config import TrainConfig
from dflash_ext.errors import FeatureError
from dflash_ext.plan import Schedule
from dflash_ext.ranks import Ranks
from dflash_ext.samples import Samples
from dflash_ext.target import Target
from dflash_ext.topology import Handover, handovers
from dflash_ext.trainer import Trainer, Validation
from dflash_ext.transfer import FeatureBatch

STOP = -1
"""Instead of a credit: the drafter wants no more."""
HEADER, DATA, CREDIT = 1, 2, 3
"""Tags of the three messages of a hand-over."""


@dataclass(frozen=True)
class Book:
    """The tokens of every feature batch, on any rank."""

    samples: Samples
    schedule: Schedule
    validation: Validation

    def batch(self, handover: Handover) -> PackedBatch:
        if handover.kind == "held-out":
            return self.validation.batch(handover.batch)
        chosen = self.samples.indices[self.schedule.batch(handover.batch)]
        return self.samples.store.batch(chosen.tolist())


@dataclass
class Waits:
    """Seconds since the last report, of one drafter and the targets whose batches it took."""

    target: float = 0.0
    """The drafter stood still because no target had captured its batch yet."""
    transfer: float = 0.0
    """The drafter stood still because its batch was on the way."""
    room: float = 0.0
    """Targets stood still because no drafter had room."""
    elapsed: float = 0.0
    """Time of those targets in all."""
    capture: float = 0.0
    """Time of a target that shares the drafter's process."""

    def values(self) -> list[float]:
        return [getattr(self, f.name) for f in fields(self)]


class Source(Protocol):
    """Where a drafter's feature batches come from."""

    def take(self, handover: Handover) -> tuple[PackedBatch, FeatureBatch]:
        """The batch and its verified features.

        A training batch stays valid until the next one is taken, a held-out one until any is.
        """

    def waits(self) -> Waits:
        """What was waited for since the last call."""

    def start(self) -> None:
        """From now on batches may come."""

    def stop(self) -> None:
        """No more batches are needed: let the targets end."""

    def memory(self) -> dict[str, float]:
        """GiB of device memory that this process, and the target last heard of, hold."""


def refused(handover: Handover, error: Exception) -> FeatureError:
    """The error of a hostile batch: which, from whom, of which documents."""
    return FeatureError(f"{handover} of target {handover.target}: {error}")


class InProcess:
    """The target is in the drafter's own process: nothing travels."""

    def __init__(self, target: Target, trainer: Trainer, book: Book) -> None:
        self._target, self._book = target, book
        self._taps = trainer.handed_taps
        self._capture = 0.0

    def take(self, handover: Handover) -> tuple[PackedBatch, FeatureBatch]:
        began, batch = time.perf_counter(), self._book.batch(handover)
        features = self._target.features(batch)
        try:
            features.verify(batch, self._taps, self._target.hidden_size)
        except FeatureError as error:
            raise refused(handover, error) from None
        self._capture += time.perf_counter() - began
        return batch, features

    def waits(self) -> Waits:
        capture, self._capture = self._capture, 0.0
        return Waits(capture=capture)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def memory(self) -> dict[str, float]:
        return reserved(self._target.device)


def reserved(device: torch.device) -> dict[str, float]:
    """For the log: GiB that this process holds on its GPU."""
    if device.type != "cuda":
        return {}
    return {"reserved_gib": torch.cuda.memory_reserved(device) / 2**30}


def own_handovers(
    config: TrainConfig, ranks: Ranks, progress: Progress, steps: int, validation: Validation
) -> Iterator[Handover]:
    """This rank's part of everything handed over from `progress` to the end of the run."""
    assert progress.course is not None
    everything = handovers(
        ranks.topology,
        progress.course,
        progress.position,
        steps,
        every=config.eval.every,
        held_out=len(validation),
        keep=validation.keep,
    )
    if ranks.drafter is not None:
        return (handover for handover in everything if handover.drafter == ranks.drafter)
    return (handover for handover in everything if handover.target == ranks.target)
