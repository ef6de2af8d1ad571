"""Memory of a GPU, and of a process and everything it started."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch


def gib(size: int) -> float:
    return size / 2**30


def peak_of(device: str, run: Callable[[], object]) -> float | None:
    """GiB allocated at most while `run` runs; None without a GPU."""
    if device != "cuda":
        run()
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return gib(torch.cuda.max_memory_allocated())


def descendants(root: int) -> list[int]:
    """Living processes below `root`, itself included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it ended just now
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, grown = {root}, True
    while grown:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found |= new
        grown = bool(new)
    return sorted(found)


def resident_bytes(root: int) -> int:
    """Resident memory of `root` and its descendants; pages they share count once."""
    total = 0
    for pid in descendants(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


class PeakMemory:
    """`with PeakMemory() as memory: ...` and then `memory.peak`, bytes, sampled twice a second."""

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            self.peak = max(self.peak, resident_bytes(os.getpid()))

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, resident_bytes(os.getpid()))
