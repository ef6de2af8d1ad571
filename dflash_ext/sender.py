"""A target's side of every hand-over, and its whole run: capture for credit, announce, send.

Over NCCL a send is a kernel that spins until the drafter's receive runs, and the first launch of
any other kernel may wait, inside the driver and with all other calls into it behind it, until the
device is idle (CUDA loads kernels lazily). So what lets a receive run, the header, goes out before
there is a send that spins: the device of a target is idle sooner or later whatever it loads, and so
is a drafter's, whose receives all have a send behind their header.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from dflash_ext.batch import PackedBatch
from dflash_ext.config import BatchOptions
from dflash_ext.errors import FeatureError
from dflash_ext.pipeline import CREDIT, DATA, HEADER, STOP, Book
from dflash_ext.ranks import Ranks
from dflash_ext.stopwatch import Stopwatch
from dflash_ext.target import Target
from dflash_ext.topology import Handover
from dflash_ext.transfer import Announcement, FeatureBatch

_BUFFERS = 2  # one in flight while the next is filled


class Sender:
    """A target's side of every hand-over."""

    def __init__(self, ranks: Ranks, target: Target, options: BatchOptions) -> None:
        self._ranks, taps = ranks, len(target.handed_taps)
        self._header_size = Announcement.size(options.max_documents, taps)
        self._buffers = [
            torch.empty(
                options.token_budget,
                taps * target.hidden_size,
                dtype=target.dtype,
                device="cpu" if ranks.staged else ranks.device,
                pin_memory=ranks.staged,
            )
            for _ in range(_BUFFERS)
        ]
        self._in_flight: list[list[Any]] = [[] for _ in self._buffers]
        self._announcer = ranks.helper("announcer") if ranks.nccl else None
        self._side = torch.cuda.Stream(ranks.device) if ranks.nccl else None
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
        dist.recv(credit, src=handover.drafter, group=control, tag=CREDIT)
        self._watch.waited(asked, self._watch.mark())
        if int(credit) == STOP:
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
        self._next = (self._next + 1) % _BUFFERS
        _wait(works)
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
        header, rank = told.encode(self._header_size), handover.drafter
        if self._announcer is None:
            works.append(dist.isend(header, dst=rank, group=control, tag=HEADER))
            works.append(dist.isend(place, dst=rank, group=data, tag=DATA))
            return
        captured = torch.cuda.Event(blocking=True)
        captured.record()

        def once_captured() -> Any:
            try:
                captured.synchronize()
                dist.send(header, dst=rank, group=control, tag=HEADER)
                # On a stream of its own: in the main thread's it would wait for what comes there.
                with torch.cuda.stream(self._side):
                    return dist.isend(place, dst=rank, group=data, tag=DATA)
            except BaseException as error:  # nobody looks at this thread for two captures
                self._ranks.fail(error)
                raise

        works.append(self._announcer.submit(once_captured))

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for works in self._in_flight:
            _wait(works)
        if self._ranks.nccl:
            torch.cuda.synchronize(self._ranks.device)


def _wait(works: list[Any]) -> None:
    for work in works:
        (work.result() if isinstance(work, Future) else work).wait()
    works.clear()


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
