"""How long a rank waited: on a GPU by its stream's clock, so that work in flight counts as work.

The host usually runs ahead of a GPU. Time that it waits while the device is busy costs nothing;
what counts is how long the device's stream stood still.
"""

from __future__ import annotations

import time
from collections import deque

import torch


class Stopwatch:
    """Collects the lengths of waits of one stream. Spans end later than they are noted."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def mark(self) -> float | torch.cuda.Event:
        """A point of time: now, or when the stream has done what it was given so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def waited(self, begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> None:
        """Count the time between two marks as waited."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float)
            assert isinstance(end, float)
            self._seconds += end - begin
        else:
            self._pending.append((begin, end))

    def take(self) -> float:
        """Seconds waited in spans that are over and not yet taken; does not wait for others."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        return seconds
