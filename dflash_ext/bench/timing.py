"""Clocks of the benchmarks: device time without the host in it, and host time without the device.

Contestants are timed in bursts, in interleaved rounds of balanced order, and medians are reported:
a power-limited card runs faster or slower with what ran before.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], Any]

MIN_REPEATS, MAX_REPEATS = (
    3,
    150,
)  # 150 calls of a few launches each stay below CUDA's queue of 1,024
HEAD_START = 2_000_000  # cycles, about 1 ms
LONGEST_HEAD_START = 2_000_000_000


@dataclass
class Contestant:
    """`run`, timed over `repeats` back-to-back calls on `device`."""

    run: Run
    device: str
    repeats: int = 1
    head_start: int = HEAD_START

    def seconds(self) -> float:
        """Mean seconds of one call in one burst.

        On CUDA this is device time: the device spins until the whole burst is in its queue, so the
        events around the burst cannot see the host. That it still spun when the last call was
        queued is checked; if not, the burst is repeated with twice the head start. Torch's events
        time a burst rather than a call because an event costs a few microseconds itself.
        """
        if self.device != "cuda":
            started = time.perf_counter()
            for _ in range(self.repeats):
                self.run()
            return (time.perf_counter() - started) / self.repeats
        while self.head_start <= LONGEST_HEAD_START:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self.head_start)
            begin.record()
            for _ in range(self.repeats):
                self.run()
            host_was_ahead = not begin.query()
            end.record()
            end.synchronize()
            if host_was_ahead:
                return begin.elapsed_time(end) / 1e3 / self.repeats
            self.head_start *= 2
        raise RuntimeError("this call waits for the device: its device time cannot be told apart")


def warmed_up(run: Run, device: str, burst: float) -> Contestant:
    """A contestant that has run, with as many repeats as fill `burst` seconds (CPU: one)."""
    run()
    contestant = Contestant(run, device)
    if device == "cuda":
        contestant.repeats = MIN_REPEATS
        wanted = math.ceil(burst / contestant.seconds())
        contestant.repeats = min(max(wanted, MIN_REPEATS), MAX_REPEATS)
    return contestant


def interleaved(
    runs: Mapping[str, Run], device: str, rounds: int, burst: float = 0.0
) -> dict[str, float]:
    """Median seconds of one call of each contestant over `rounds` interleaved rounds."""
    contestants = {name: warmed_up(run, device, burst) for name, run in runs.items()}
    return medians({name: x.seconds for name, x in contestants.items()}, rounds)


def balanced_orders(names: Sequence[str], rounds: int) -> list[list[str]]:
    """An order of the names for each round, such that nobody keeps following the same one.

    A burst inherits the clock that the one before it left. Over n rounds of n names (2 n, if n is
    odd) everybody directly follows everybody else equally often: Williams' design of 1949, a zigzag
    that is shifted round by round.
    """
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]
    orders = []
    for shift in range(rounds):
        order = [names[(i + shift) % n] for i in zigzag]
        orders.append(order if n % 2 == 0 or shift // n % 2 == 0 else order[::-1])
    return orders


def medians(timers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of what each timer returns over `rounds` rounds, in `balanced_orders`."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for order in balanced_orders(list(timers), rounds):
        for name in order:
            times[name].append(timers[name]())
    return {name: statistics.median(t) for name, t in times.items()}


def synchronise(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Marks on the device's time line, or on the host's where there is no other device."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Between two marks that are both behind the device."""
        return begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3


def timer(run: Run, device: str, prepare: Run = lambda: None) -> Callable[[], float]:
    """ms of one call, long enough to be a burst; `prepare` runs before each, untimed."""
    clock = Clock(device)

    def timed() -> float:
        prepare()
        synchronise(device)
        begin = clock.mark()
        run()
        end = clock.mark()
        synchronise(device)
        return clock.ms(begin, end)

    return timed


def host_seconds(run: Run, device: str, repeats: int) -> float:
    """Mean seconds the host spends in one call; on CUDA the queue is emptied outside the timing."""
    synchronise(device)
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    took = time.perf_counter() - started
    synchronise(device)
    return took / repeats


def rounded(x: float) -> float:
    """Four significant digits: what a kept result needs, and no more."""
    return float(f"{x:.4g}")


def tidy(row: Mapping[str, Any]) -> dict[str, Any]:
    """A result's row with its numbers rounded."""
    return {k: rounded(v) if isinstance(v, float) else v for k, v in row.items()}
