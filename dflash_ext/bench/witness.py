"""What each rank of a run did and when, written down by the rank itself; on request, its death.

A rank tells its watch everything it begins (`Watch.doing`). Here it also notes that in a file, with
the time and the device memory it holds, a line each: nothing else says when a rank had loaded its
models or how much memory one that is not the first holds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dflash_ext.bench.markdown import Row
from dflash_ext.bench.pipeline_problem import flatness
from dflash_ext.checkpoint import checkpoints, read_progress
from dflash_ext.config import TrainConfig
from dflash_ext.launch import run_rank, start_local, world_size
from dflash_ext.monitor import read_records
from dflash_ext.train import LOADING, REHEARSING
from dflash_ext.watch import Watch, read_beat

Notes = Mapping[int, Sequence[Row]]
"""By rank, its notes in order of time."""
_NUMBERED = re.compile(r"(step|capturing batch) (\d+)")


@dataclass(frozen=True)
class Blow:
    """SIGKILL for a rank by its own hand, so that the place is the same on any machine."""

    rank: int
    at: str
    """The activity, without its details: "step 5" is behind the fifth step's gradients."""
    saved: int
    """The step whose checkpoint must be whole first: what the run then goes on from, at least."""

    def fall(self, watch: Watch, config: TrainConfig, struck: Path) -> None:
        """Does not return."""
        assert config.run.dir is not None
        folder = config.run.dir / "checkpoints"
        while not any(read_progress(path).position >= self.saved for path in checkpoints(folder)):
            time.sleep(0.05)
        # Its last words are what it has told so far: let it have come to say what it does.
        while (beat := read_beat(watch.store, self.rank)) is None or not self.meant(beat.activity):
            time.sleep(0.005)
        struck.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def meant(self, activity: str) -> bool:
        return re.match(rf"{self.at}\b", activity) is not None


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def _struck(folder: Path) -> Path:
    return folder / "struck"


def witnessed(folder: Path, blow: Blow | None, config: TrainConfig) -> int:
    """A rank of a run that notes in `folder` what it does, and that it came to its end."""
    rank, doing = int(os.environ["RANK"]), Watch.doing
    with _file(folder, rank).open("w") as file:

        def note(**values: Any) -> None:
            own: Row = {"time": time.time()}
            if torch.cuda.is_initialized():
                own["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
            file.write(json.dumps(own | values) + "\n")
            file.flush()

        def noting(
            watch: Watch,
            activity: str,
            documents: Sequence[int] | None = None,
            *,
            patience: float = 1.0,
        ) -> None:
            doing(watch, activity, documents, patience=patience)
            note(activity=activity)
            if blow is not None and blow.rank == rank and blow.meant(activity):
                blow.fall(watch, config, _struck(folder))

        note(pid=os.getpid())
        Watch.doing = noting  # type: ignore[method-assign, assignment]
        try:
            code = run_rank(config)
        finally:
            Watch.doing = doing  # type: ignore[method-assign]
        note(ended=code)
    return code


@dataclass(frozen=True)
class Launch:
    """A run of several ranks that has ended."""

    code: int
    began: float
    """Unix time, as all times here."""
    ended: float
    """When the launcher had seen every rank end."""
    struck: float | None
    """When the blow fell, if there was to be one and it did."""
    notes: Notes

    @property
    def left(self) -> list[int]:
        """Ranks that exited with 0; any other end is a failure's code or a signal."""
        return [rank for rank, own in self.notes.items() if own and own[-1].get("ended") == 0]

    @property
    def alive(self) -> list[int]:
        """Ranks whose process is still there."""
        pids = {rank: own[0]["pid"] for rank, own in self.notes.items() if own}
        return [rank for rank, pid in pids.items() if Path(f"/proc/{pid}").exists()]


def launch(config: TrainConfig, folder: Path, blow: Blow | None = None) -> Launch:
    """Run all ranks of `config` to their end; their notes go into `folder`, which is new."""
    folder.mkdir(parents=True)
    size, began = world_size(config), time.time()
    code = start_local(config, size, partial(witnessed, folder, blow))
    ended, struck = time.time(), _struck(folder)
    return Launch(
        code=code,
        began=began,
        ended=ended,
        struck=float(struck.read_text()) if struck.exists() else None,
        notes={rank: _notes(_file(folder, rank)) for rank in range(size)},
    )


def _notes(file: Path) -> list[Row]:
    return read_records(file) if file.exists() else []


def span(notes: Sequence[Row], activity: str) -> tuple[float, float] | None:
    """When a rank first began an activity, and when it began the next one."""
    said = [note for note in notes if "activity" in note]
    for note, after in pairwise(said):
        if note["activity"] == activity:
            return note["time"], after["time"]
    return None


def start_of(notes: Notes, began: float, first_step: float, needed: Iterable[int]) -> Row:
    """Seconds until the first optimizer step, whose end is `first_step`.

    needed: the ranks that the first step waits for; loaded is when the last of them was. The others
    may load longer and cost nothing yet.
    """
    found: Row = {"from_launch_to_first_step": first_step - began}
    loading = [span(notes[rank], LOADING) for rank in needed]
    if ends := [end for _, end in filter(None, loading)]:
        found["from_launch_to_loaded"] = max(ends) - began
        found["from_loaded_to_first_step"] = first_step - max(ends)
    rehearsing = [span(notes[rank], REHEARSING) for rank in needed]
    if spans := [end - begin for begin, end in filter(None, rehearsing)]:
        found["rehearsal"] = max(spans)
    return found


def memory_of(notes: Notes, drafters: int, skip: int) -> list[Row]:
    """`flatness` of each rank's device memory after `skip` steps of one batch for each drafter.

    A drafter's at the end of each step, a target's at the beginning of each capture; nothing for
    ranks without a device of their own.
    """
    found = []
    for rank, own in sorted(notes.items()):
        first = skip + 1 if rank < drafters else skip * drafters
        values = []
        for note in own:
            number = _NUMBERED.match(note.get("activity", ""))
            if number and int(number[2]) >= first and "reserved_gib" in note:
                values.append(note["reserved_gib"])
        if values:
            role = "drafter" if rank < drafters else "target"
            found.append({"rank": rank, "role": role} | flatness(values))
    return found
