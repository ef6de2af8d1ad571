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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.checkpoint import Progress
from dflash_ext.config import BatchOptions, TrainConfig
from dflash_ext.drafter import DrafterConfig
from dflash_ext.errors import FeatureError
from dflash_ext.plan import Schedule
from dflash_ext.ranks import Ranks
from dflash_ext.samples import Samples
from dflash_ext.stopwatch import Stopwatch
from dflash_ext.target import Target
from dflash_ext.topology import Handover, handovers
from dflash_ext.trainer import Trainer, Validation
from dflash_ext.transfer import Announcement, FeatureBatch

_STOP = -1
_SEND_BUFFERS = 2  # one in flight while the next is filled
_POLL_SECONDS = 2e-4


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

    def __init__(self, target: Target, config: DrafterConfig, book: Book) -> None:
        self._target, self._config, self._book = target, config, book
        self._capture = 0.0

    def take(self, handover: Handover) -> tuple[PackedBatch, FeatureBatch]:
        began, batch = time.perf_counter(), self._book.batch(handover)
        features = self._target.features(batch)
        try:
            features.verify(batch, self._config.target_layer_ids, self._config.target_hidden_size)
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


@dataclass
class _Arrival:
    """A feature batch that has room here and is somewhere between its capture and its use."""

    handover: Handover
    batch: PackedBatch
    buffer: int
    header: Tensor
    header_work: Any
    data_work: Any
    credit: tuple[Tensor, Any]
    flags: Tensor | None = None
    """NCCL: `content_flags` in pinned memory, valid once `ready` has happened."""
    ready: torch.cuda.Event | None = None


class Receiver:
    """A drafter's side of every hand-over."""

    def __init__(
        self,
        ranks: Ranks,
        expected: Iterator[Handover],
        book: Book,
        trainer: Trainer,
        *,
        buffers: int,
    ) -> None:
        """expected: this drafter's own hand-overs, in order. All memory is allocated here."""
        config, options = trainer.drafter.config, trainer.config.batch
        self._ranks, self._expected, self._book, self._config = ranks, expected, book, config
        self._dtype = trainer.embedding.dtype
        self._header_size = Announcement.size(options.max_documents, len(config.target_layer_ids))
        shape = (options.token_budget, config.feature_width)
        self._buffers = [
            torch.empty(shape, dtype=self._dtype, device=ranks.device) for _ in range(buffers)
        ]
        self._staged = ranks.device.type == "cuda" and not ranks.nccl
        self._stages = [
            torch.empty(shape, dtype=self._dtype, pin_memory=True) if self._staged else buffer
            for buffer in self._buffers
        ]
        self._side = torch.cuda.Stream(ranks.device) if ranks.nccl else None
        self._free, self._arrivals = deque(range(buffers)), deque[_Arrival]()
        self._used: dict[str, int] = {}
        self._target_watch, self._transfer_watch = Stopwatch(ranks.device), Stopwatch(ranks.device)
        self._reported = Waits()
        self._target_reserved = 0

    def start(self) -> None:
        for _ in self._buffers:
            self._expect_next()

    def memory(self) -> dict[str, float]:
        found = reserved(self._ranks.device)
        return found and found | {"target_reserved_gib": self._target_reserved / 2**30}

    def _expect_next(self) -> None:
        """Make a free buffer the place of the next batch, and tell its target."""
        handover = next(self._expected, None)
        if handover is None:
            return
        buffer, batch = self._free.popleft(), self._book.batch(handover)
        control, data = self._ranks.pairs[handover.target, handover.drafter]
        source = self._ranks.topology.target_rank(handover.target)
        header = torch.empty(self._header_size, dtype=torch.int64)
        header_work = dist.irecv(header, src=source, group=control, tag=1)
        place = self._stages[buffer][: batch.num_tokens]
        # Over NCCL it begins when the stream has done what was asked so far: the buffer's last use.
        data_work: Any = dist.irecv(place, src=source, group=data, tag=2)
        credit = torch.tensor([handover.batch])
        credit_work = dist.isend(credit, dst=source, group=control, tag=3)
        arrival = _Arrival(
            handover, batch, buffer, header, header_work, data_work, (credit, credit_work)
        )
        if self._side is not None:
            with torch.cuda.stream(self._side):
                data_work.wait()
                arrival.flags = torch.empty(2, dtype=torch.bool, pin_memory=True)
                flags = _content_flags(place, len(self._config.target_layer_ids))
                arrival.flags.copy_(flags, non_blocking=True)
                arrival.ready = torch.cuda.Event()
                arrival.ready.record()
        self._arrivals.append(arrival)

    def take(self, handover: Handover) -> tuple[PackedBatch, FeatureBatch]:
        # Validation may come amid the draws of a training batch, which is needed afterwards.
        for kind in ("train", "held-out") if handover.kind == "train" else ("held-out",):
            if kind in self._used:
                self._free.append(self._used.pop(kind))
                self._expect_next()
        arrival = self._arrivals.popleft()
        batch, target = arrival.batch, handover.target
        assert arrival.handover == handover, (arrival.handover, handover)
        self._ranks.watch.doing(
            f"waiting for {handover} of target {target}", batch.sample_ids, patience=2
        )
        asked = self._target_watch.mark()
        arrival.header_work.wait()
        announced = self._target_watch.mark()
        self._target_watch.waited(asked, announced)
        try:
            features = self._verified(arrival)
        except FeatureError as error:
            raise refused(handover, error) from None
        self._transfer_watch.waited(announced, self._transfer_watch.mark())
        self._used[handover.kind] = arrival.buffer
        self._ranks.watch.doing(f"training on {handover}", batch.sample_ids)
        return batch, features

    def _verified(self, arrival: _Arrival) -> FeatureBatch:
        batch, config = arrival.batch, self._config
        told = Announcement.decode(arrival.header)
        self._reported.room += told.waited
        self._reported.elapsed += told.elapsed
        self._target_reserved = told.reserved
        if (told.kind, told.index) != arrival.handover[:2]:
            raise FeatureError(
                f"expected samples {list(batch.sample_ids)}, got those of {told.kind} batch "
                f"{told.index}: target and drafter are out of step"
            )
        if told.dtype != self._dtype:
            raise FeatureError(f"expected {self._dtype}, got {told.dtype}")
        # What is announced is looked at before the data, which may never come in its full size.
        announced = torch.empty(told.shape, dtype=told.dtype, device="meta")
        features = FeatureBatch(
            announced, told.tap_ids, told.sample_ids, told.token_hash, told.rows
        )
        features.verify_origin(batch, config.target_layer_ids, config.target_hidden_size)
        place = self._buffers[arrival.buffer][: batch.num_tokens]
        if arrival.ready is not None and arrival.flags is not None:
            while not arrival.ready.query():
                time.sleep(_POLL_SECONDS)
            torch.cuda.current_stream().wait_event(arrival.ready)
            flags = arrival.flags
        else:
            arrival.data_work.wait()
            if self._staged:
                place.copy_(self._stages[arrival.buffer][: batch.num_tokens])
            flags = _content_flags(place, len(told.tap_ids))
        features = FeatureBatch(place, told.tap_ids, told.sample_ids, told.token_hash, told.rows)
        features.verify_content(batch, flags.tolist())
        arrival.credit[1].wait()
        return features

    def waits(self) -> Waits:
        waits, self._reported = self._reported, Waits()
        waits.target, waits.transfer = self._target_watch.take(), self._transfer_watch.take()
        return waits

    def stop(self) -> None:
        """End every target, and take in what was already promised room."""
        word, sent = torch.tensor([_STOP]), []
        for (target, _), (control, _) in self._ranks.pairs.items():
            rank = self._ranks.topology.target_rank(target)
            sent.append(dist.isend(word, dst=rank, group=control, tag=3))
        for arrival in self._arrivals:
            self._ranks.watch.doing(f"draining {arrival.handover}", patience=2)
            arrival.header_work.wait()
            arrival.data_work.wait()
        # A target that had nothing more to do never reads the word, so its end is what counts.
        for target, _ in self._ranks.pairs:
            self._ranks.watch.wait_for(f"ended/{target}", f"waiting for target {target} to end")
        del sent


def _content_flags(features: Tensor, taps: int) -> Tensor:
    rows = features.shape[0]
    return FeatureBatch(features, tuple(range(taps)), (), "", rows).content_flags()


class Sender:
    """A target's side of every hand-over."""

    def __init__(self, ranks: Ranks, target: Target, options: BatchOptions) -> None:
        self._ranks, taps = ranks, len(target.tap_ids)
        self._header_size = Announcement.size(options.max_documents, taps)
        self._staged = ranks.device.type == "cuda" and not ranks.nccl
        self._buffers = [
            torch.empty(
                options.token_budget,
                taps * target.hidden_size,
                dtype=target.dtype,
                device="cpu" if self._staged else ranks.device,
                pin_memory=self._staged,
            )
            for _ in range(_SEND_BUFFERS)
        ]
        self._in_flight: list[list[Any]] = [[] for _ in self._buffers]
        self._next = 0
        self._stopped: set[int] = set()
        self._watch, self._announced = Stopwatch(ranks.device), time.perf_counter()

    @property
    def stopped(self) -> bool:
        """Does no drafter want anything more?"""
        return len(self._stopped) == self._ranks.topology.drafters

    def room(self, handover: Handover) -> bool:
        """Wait until the drafter has room for the batch; False if it wants no more."""
        if handover.drafter in self._stopped:
            return False
        control, _ = self._ranks.pairs[handover.target, handover.drafter]
        asked, credit = self._watch.mark(), torch.empty(1, dtype=torch.int64)
        dist.recv(credit, src=handover.drafter, group=control, tag=3)
        self._watch.waited(asked, self._watch.mark())
        if int(credit) == _STOP:
            self._stopped.add(handover.drafter)
            return False
        if int(credit) != handover.batch:
            raise FeatureError(
                f"{handover}: drafter {handover.drafter} has room for batch {int(credit)} instead: "
                "target and drafter are out of step"
            )
        return True

    def send(self, handover: Handover, batch: PackedBatch, features: FeatureBatch) -> None:
        """Hand a captured batch over; `features` may be overwritten afterwards."""
        control, data = self._ranks.pairs[handover.target, handover.drafter]
        buffer, works = self._buffers[self._next], self._in_flight[self._next]
        self._next = (self._next + 1) % _SEND_BUFFERS
        for _, work in works:
            work.wait()
        values, device = features.features, self._ranks.device
        told = Announcement(
            kind=handover.kind,
            index=handover.batch,
            shape=(values.shape[0], values.shape[1]),
            dtype=values.dtype,
            tap_ids=features.tap_ids,
            sample_ids=features.sample_ids,
            token_hash=features.token_hash,
            rows=features.rows,
            waited=self._watch.take(),
            elapsed=time.perf_counter() - self._announced,
            reserved=torch.cuda.memory_reserved(device) if device.type == "cuda" else 0,
        )
        self._announced = time.perf_counter()
        # The size is the plan's whatever the target made: a wrong one is the header's to tell.
        place = buffer[: batch.num_tokens]
        rows, columns = min(len(place), len(values)), min(place.shape[1], values.shape[1])
        place[:rows, :columns].copy_(values[:rows, :columns])
        header = told.encode(self._header_size)
        rank = handover.drafter
        works[:] = [
            (header, dist.isend(header, dst=rank, group=control, tag=1)),
            (place, dist.isend(place, dst=rank, group=data, tag=2)),
        ]

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for works in self._in_flight:
            for _, work in works:
                work.wait()
        if self._ranks.nccl:
            torch.cuda.synchronize(self._ranks.device)


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


def serve(ranks: Ranks, target: Target, sender: Sender, own: Iterator[Handover], book: Book) -> int:
    """A target's whole run: capture and hand over its batches; returns how many it handed over."""
    count = 0
    for handover in own:
        batch = book.batch(handover)
        ranks.watch.doing(
            f"waiting for room at drafter {handover.drafter} for {handover}",
            batch.sample_ids,
            patience=2,
        )
        if not sender.room(handover):
            if sender.stopped:
                break
            continue
        ranks.watch.doing(f"capturing {handover}", batch.sample_ids)
        sender.send(handover, batch, target.features(batch))
        count += 1
    ranks.watch.doing("handing over the last batches", patience=2)
    sender.finish()
    ranks.watch.publish(f"ended/{ranks.target}", count)
    return count
