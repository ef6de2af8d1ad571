"""A drafter's side of every hand-over: buffers, credits, and the proof of what arrives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
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
        header_work = dist.irecv(header, src=source, group=control, tag=HEADER)
        place = self._stages[buffer][: batch.num_tokens]
        # Over NCCL it begins when the stream has done what was asked so far: the buffer's last use.
        data_work: Any = dist.irecv(place, src=source, group=data, tag=DATA)
        credit = torch.tensor([handover.batch])
        credit_work = dist.isend(credit, dst=source, group=control, tag=CREDIT)
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
            arrival.header_work.wait()
            arrival.data_work.wait()
        # A target that had nothing more to do never reads the word, so its end is what counts.
        for target, _ in self._ranks.pairs:
            watch.wait_for(f"ended/{target}", f"waiting for target {target} to end")
        del sent


def _content_flags(features: Tensor, taps: int) -> Tensor:
    rows = features.shape[0]
    return FeatureBatch(features, tuple(range(taps)), (), "", rows).content_flags()
