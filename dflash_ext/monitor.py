"""What a run shows and records: one progress display, metrics.jsonl, optionally tensorboard."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

METRICS_FILE = "metrics.jsonl"
LINE_SECONDS = 10.0
"""Between two progress lines where there is no terminal."""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a file with one a line; of a line cut off by a kill nothing.

    FileNotFoundError, NotADirectoryError without one.
    """
    records = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """`read_records` of a run folder's metrics.jsonl."""
    return read_records(folder / METRICS_FILE)


class Stage:
    """One stage in progress. On a terminal a live bar, elsewhere a plain line now and then."""

    def __init__(self, name: str, stream: TextIO, bar: Progress | None) -> None:
        self.name, self.stream, self.bar = name, stream, bar
        self.task = bar.add_task(name, total=None, note="") if bar else None
        self.began, self.first, self.last = time.monotonic(), 0, 0
        self.printed: float | None = None

    def update(self, done: int, total: int, note: str = "") -> None:
        """`done` of `total` units; the note is shown beside rate and time left."""
        if self.last == 0 or done < self.last:
            # A resumed stage starts in the middle and a repeated one anew: rates count from here.
            self.began, self.first = time.monotonic() if self.last else self.began, done - 1
        self.last = done
        elapsed = time.monotonic() - self.began
        rate = (done - self.first) / elapsed if elapsed > 0 else 0.0
        shown = f"{rate:.2f}/s  {note}" if rate else note
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=done, total=total, note=shown)
            return
        now = time.monotonic()
        if self.printed is None or done >= total or now - self.printed >= LINE_SECONDS:
            self.printed = now
            left = f"  ETA {_clock((total - done) / rate)}" if rate and done < total else ""
            print(f"{self.name}  {done}/{total}  {shown}{left}", file=self.stream, flush=True)


class Monitor:
    """Progress, metrics and messages of one run folder, which exists."""

    def __init__(
        self, folder: Path | None, *, tensorboard: bool = False, stream: TextIO | None = None
    ) -> None:
        """Without a folder it shows and records nothing: for all ranks but the first."""
        self.folder = folder
        silent = Path(os.devnull).open("w") if folder is None else None  # noqa: SIM115
        self.stream = stream or silent or sys.stdout
        width = None if self.stream.isatty() else 120  # a log file has no width to fit into
        self.console = Console(file=self.stream, width=width, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._metrics = None if folder is None else (folder / METRICS_FILE).open("a")
        self._writer: Any = None
        if tensorboard and folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"))

    def say(self, message: str) -> None:
        """One line for the user."""
        console = self._bar.console if self._bar is not None else self.console
        console.print(message, markup=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Show a stage while the block runs."""
        if not self.console.is_terminal:
            yield Stage(name, self.stream, None)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as bar:
            self._bar = bar
            try:
                yield Stage(name, self.stream, bar)
            finally:
                self._bar = None

    def log(self, kind: str, step: int, metrics: Mapping[str, float | str]) -> None:
        """Append one record to metrics.jsonl (and tensorboard); a kill loses nothing."""
        if self._metrics is None:
            return
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **metrics}
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._writer is not None:
            for name, value in metrics.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """A small table; the first column is text, the others numbers."""
        table = Table(title=title)
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._writer is not None:
            self._writer.close()
