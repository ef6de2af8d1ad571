"""What a long command has finished, so that running it again after a kill repeats nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

from dflash_ext.errors import UserError


class Journal:
    """One JSON line per finished piece of work, in any order, in a file only its user can read.

    settings: what the work is done with; a journal of other settings is an error, and so is one
    that another process writes. A last line that a kill cut short is dropped. Threads may share
    one.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not truncated before the lock is held: it may be another process's.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file = os.fdopen(descriptor, "r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(f"another process is writing {path}; wait for it") from None
        self._places: dict[str, int] = {}
        self._lock = threading.Lock()
        header = json.dumps({"settings": settings}, sort_keys=True).encode() + b"\n"
        first, begun = self._file.readline(), self._file.readline()
        if first != header and not begun:  # nothing is in it yet
            self._file.seek(0)
            self._file.truncate()
            self._file.write(header)
            self._file.flush()
        elif first != header:
            self._file.close()
            raise UserError(
                f"{path} was begun with other settings; remove it, or name another output"
            )
        self._load(len(header))

    def _load(self, end: int) -> None:
        self._file.seek(end)
        while (line := self._file.readline()).endswith(b"\n"):
            # A line that a disk damaged is work to be done again; those behind it are not.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._places[json.loads(line)["key"]] = end
            end = self._file.tell()
        self._file.seek(end)
        self._file.truncate()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def add(self, key: str, **entry: Any) -> None:
        """Note a finished piece of work. What was added survives a kill of this process."""
        line = json.dumps({"key": key, **entry}).encode() + b"\n"
        with self._lock:
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
            self._places[key] = place

    def __getitem__(self, key: str) -> dict[str, Any]:
        with self._lock:
            self._file.seek(self._places[key])
            entry: dict[str, Any] = json.loads(self._file.readline())
        return entry

    def close(self, *, remove: bool = False) -> None:
        """Let go of the file; `remove` it once its content is elsewhere."""
        if remove:
            self.path.unlink(missing_ok=True)
        with self._lock:
            self._file.close()
