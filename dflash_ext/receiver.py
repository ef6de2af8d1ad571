"""A drafter's side of every hand-over: buffers, credits, and the proof of what arrives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.errors import FeatureError
from dflash_ext.pipeline import CREDIT, DATA, HEADER, STOP, Book, Waits, refused, reserved
from dflash_ext.ranks import Ranks
from dflash_ext.stopwatch import Stopwatch
from dflash_ext.topology import Handover
from dflash_ext.trainer import Trainer
from dflash_ext.transfer import Announcement, FeatureBatch

_POLL_SECONDS = 2e-4


@dataclass
class _Arrival:
    """A feature batch that has room here and is somewhere between its capture and its use."""

    handover: Handover
    batch: PackedBatch
    buffer: int
    place: Tensor
    """Where it arrives: its rows of the buffer or, staged, of pinned memory."""
    credit: Tensor
    header: Tensor
    header_work: Any
    data_work: Any = None
    """gloo: waits from the beginning."""
    fetched: Future[_Fetched] | None = None
    """NCCL: done once the batch is announced and on its way."""
    credit_work: Any = None

    def announced(self) -> None:
        """Return when the header is here."""
        self.header_work.wait() if self.fetched is None else self.fetched.result()


@dataclass(frozen=True)
class _Fetched:
    """Over NCCL: a batch that is on its way, in the order of a stream."""

    flags: Tensor
    """`content_flags` in pinned memory, valid once `ready` has happened."""
    ready: torch.cuda.Event


class Receiver:
    """A drafter's side of every hand-over.

    Over gloo a receive stands ready before its credit is given. An NCCL receive that waits is a
    kernel that spins, and keeps multiprocessors from the drafter for as long as a capture takes; so
    a thread for each target waits for the header instead, and then asks for the features.
    """

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
        self._ranks, self._expected, self._book = ranks, expected, book
        self._taps, self._tap_width = trainer.handed_taps, config.target_hidden_size
        self._dtype = trainer.embedding.dtype
        self._header_size = Announcement.size(options.max_documents, len(trainer.handed_taps))
        shape = (options.token_budget, trainer.handed_width)
        self._buffers = [
            torch.empty(shape, dtype=self._dtype, device=ranks.device) for _ in range(buffers)
        ]
        self._stages = [
            torch.empty(shape, dtype=self._dtype, pin_memory=True) if ranks.staged else buffer
            for buffer in self._buffers
        ]
        targets = range(ranks.topology.targets if ranks.nccl else 0)
        self._fetchers = [ranks.helper(f"from target {target}") for target in targets]
        # One for each target: what comes from one waits for no other.
        self._sides = [torch.cuda.Stream(ranks.device) for _ in targets]
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
        header_work = dist.irecv(header, src=source, group=control, tag=HEADER)
        place = self._stages[buffer][: batch.num_tokens]
        credit = torch.tensor([handover.batch])
        arrival = _Arrival(handover, batch, buffer, place, credit, header, header_work)
        if not self._ranks.nccl:
            arrival.data_work = dist.irecv(place, src=source, group=data, tag=DATA)
        else:
            free = torch.cuda.Event()
            free.record()  # when the stream has done what was asked so far: the buffer's last use
            fetcher = self._fetchers[handover.target]
            arrival.fetched = fetcher.submit(self._fetch, arrival, source, data, free)
        arrival.credit_work = dist.isend(credit, dst=source, group=control, tag=CREDIT)
        self._arrivals.append(arrival)

    def _fetch(self, arrival: _Arrival, source: int, data: Any, free: torch.cuda.Event) -> _Fetched:
        """In a thread, over NCCL: ask for a batch once it is announced, and look at what comes."""
        arrival.header_work.wait()
        flags, ready = torch.empty(2, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        with torch.cuda.stream(self._sides[arrival.handover.target]):
            free.wait()
            work: Any = dist.irecv(arrival.place, src=source, group=data, tag=DATA)
            work.wait()  # the stream's, not this thread's
            found = _content_flags(arrival.place, len(self._taps))
            flags.copy_(found, non_blocking=True)
            ready.record()
        return _Fetched(flags, ready)

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
        arrival.announced()
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
        batch = arrival.batch
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
        features.verify_origin(batch, self._taps, self._tap_width)
        place = self._buffers[arrival.buffer][: batch.num_tokens]
        if arrival.fetched is not None:
            fetched = arrival.fetched.result()
            while not fetched.ready.query():
                time.sleep(_POLL_SECONDS)
            fetched.ready.wait()  # the stream's own word that it may read
            flags = fetched.flags
        else:
            arrival.data_work.wait()
            if self._ranks.staged:
                place.copy_(arrival.place)
            flags = _content_flags(place, len(told.tap_ids))
        features = FeatureBatch(place, told.tap_ids, told.sample_ids, told.token_hash, told.rows)
        features.verify_content(batch, flags.tolist())
        arrival.credit_work.wait()
        return features

    def waits(self) -> Waits:
        waits, self._reported = self._reported, Waits()
        waits.target, waits.transfer = self._target_watch.take(), self._transfer_watch.take()
        return waits

    def stop(self) -> None:
        """End every target, and take in what was already promised room."""
        watch, word, sent = self._ranks.watch, torch.tensor([STOP]), []
        for (target, _), (control, _) in self._ranks.pairs.items():
            rank = self._ranks.topology.target_rank(target)
            try:
                sent.append(dist.isend(word, dst=rank, group=control, tag=CREDIT))
            except RuntimeError:
                if not watch.published(f"ended/{target}"):  # it had nothing more to do, and left
                    raise
        for arrival in self._arrivals:
            watch.doing(f"draining {arrival.handover}", patience=2)
            arrival.announced()
            if arrival.data_work is not None:
                arrival.data_work.wait()
        # A target that had nothing more to do never reads the word, so its end is what counts.
        for target, _ in self._ranks.pairs:
            watch.wait_for(f"ended/{target}", f"waiting for target {target} to end")
        del sent


def _content_flags(features: Tensor, taps: int) -> Tensor:
    rows = features.shape[0]
    return FeatureBatch(features, tuple(range(taps)), (), "", rows).content_flags()
