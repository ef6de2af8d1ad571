"""Append-only token store in memory-mapped files: ids, loss mask and bounds of every sample.

A store is a directory of plain arrays that only ever grow (store_files.py) and `index.json`, which
is replaced as a whole and says how much of them counts. Bytes behind that are what an interrupted
writer left: nobody reads them, the next writer cuts them off. So a killed writer loses nothing it
had committed, and a reader sees the last *complete* state while the store is being extended.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.data.registry import cache_dir, locked, private_dir
from dflash_ext.data.store_files import (
    FILES,
    LOCK,
    bytes_of,
    cache_key,
    content_key,
    damaged,
    differences,
    identity_of,
    is_barely_begun,
    map_file,
    new_index,
    read_index,
    read_stamp,
    remove_scratch,
    stamp,
    write_index,
)
from dflash_ext.errors import UserError


class StoreWriter:
    """Writes or extends the store at `path`; one writer at a time.

    `settings`: what all its samples were made with; extending with other settings is an error.
    A store is readable once `close` was called; until then, and after a kill, its last complete
    state is. As a context manager it closes on success; on error a new store is removed and an
    extended one stays at its last commit.
    """

    def __init__(
        self, path: Path | str, *, settings: dict[str, Any] | None = None, extend: bool = False
    ) -> None:
        self.path = Path(path)
        self._extend = extend
        self._settings = json.loads(json.dumps(settings or {}))
        self._files: dict[str, Any] = {}
        self._unsynced: set[str] = set()
        exists = self.path.exists()
        index = read_index(self.path) if exists else None
        if exists and not extend and (index is None or index["complete"] is not None):
            raise UserError(f"{self.path} exists already; a store is never overwritten, remove it")
        if exists and index is None and not is_barely_begun(self.path):
            raise UserError(f"{self.path} is no token store and not empty; name another directory")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # texts are the user's alone
        self._lock = open(self.path / LOCK, "w")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{self.path} is being written by another process; wait") from None
        remove_scratch(self.path)
        is_new = index is None or not extend
        self._index = new_index(self._settings) if index is None or is_new else index
        self._check_settings()
        committed = self._index["committed"]
        self.samples, self._tokens = int(committed["samples"]), int(committed["tokens"])
        self.rows = int(committed["rows"])
        """Source rows logged so far."""
        self.info: dict[str, Any] = committed["info"]
        self._crc: dict[str, int] = dict(committed["crc32"])
        self._open_files(is_new)
        if is_new:
            self._write("offsets.i64", [0])
            self.commit()  # from now on the directory says that it is a store

    def _check_settings(self) -> None:
        if self._index["settings"] == self._settings:
            return
        self._lock.close()
        found = ", ".join(differences(self._index["settings"], self._settings))
        raise UserError(
            f"{self.path} was prepared otherwise ({found}): samples made in two ways do not "
            "mix; name another store, or remove this one"
        )

    def _open_files(self, is_new: bool) -> None:
        for name in FILES:
            size = 0 if is_new else bytes_of(name, self._index["committed"])
            file = open(self.path / name, "ab", buffering=1 << 20)  # noqa: SIM115
            self._files[name] = file
            if os.fstat(file.fileno()).st_size < size:
                self.release()
                raise damaged(self.path / name, size)
            file.truncate(size)

    def logged(self) -> tuple[np.ndarray, np.ndarray]:
        """(key uint64 [rows], outcome uint16 [rows]) of every row logged and committed."""
        count = self._index["committed"]["rows"]
        keys = np.fromfile(self.path / "log.u64", dtype="<u8", count=count)
        return keys, np.fromfile(self.path / "outcomes.u16", dtype="<u2", count=count)

    def keys(self) -> np.ndarray:
        """uint64 [samples]: content keys of every committed sample."""
        count = self._index["committed"]["samples"]
        return np.fromfile(self.path / "keys.u64", dtype="<u8", count=count)

    def append(self, ids: Sequence[int], mask: Sequence[bool], *, row: int | None = None) -> None:
        """Add one sample: n > 0 token ids and n mask values.

        `row` is the number of the source's row it comes from; none: a row of its own. One writer's
        samples all have it, or none has.
        """
        if len(ids) != len(mask):
            raise UserError(
                f"sample {self.samples}: {len(ids)} token ids but {len(mask)} mask values"
            )
        if len(ids) == 0:
            raise UserError(f"sample {self.samples}: no tokens, expected at least one")
        wide = np.asarray(ids, dtype=np.int64)
        if wide.min() < 0 or wide.max() > np.iinfo(np.int32).max:
            raise UserError(f"sample {self.samples}: token ids must be from 0 to 2**31 - 1")
        narrow, bits = wide.astype(np.int32), np.asarray(mask, dtype=np.bool_)
        self.append_many(
            narrow,
            bits,
            np.array([len(narrow)]),
            rows=np.array([self.samples if row is None else row]),
            keys=np.array([content_key([(narrow, bits)])], dtype=np.uint64),
        )

    def append_many(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        lengths: np.ndarray,
        *,
        rows: np.ndarray,
        keys: np.ndarray,
    ) -> None:
        """Add s samples: ids int32 [t], mask bool [t]; lengths, rows, keys [s], lengths sum to t.

        `rows` are source row numbers, `keys` the `content_key` of the rows.
        """
        assert len(ids) == len(mask) == lengths.sum()
        assert len(lengths) == len(rows) == len(keys)
        if len(lengths) == 0:
            return
        ends = np.cumsum(lengths)
        # An anchor needs itself and its successor supervised, both inside one sample.
        pairs = np.zeros(len(mask), dtype=np.uint8)
        pairs[:-1] = mask[:-1] & mask[1:]
        pairs[ends - 1] = 0
        self._write("tokens.i32", ids)
        self._write("mask.u8", mask)
        self._write("rows.i64", rows)
        self._write("keys.u64", keys)
        self._write("candidates.i32", np.add.reduceat(pairs, ends - lengths, dtype=np.int64))
        self._write("offsets.i64", self._tokens + ends)
        self._tokens += int(ends[-1])
        self.samples += len(lengths)

    def log_rows(self, keys: np.ndarray, outcomes: np.ndarray) -> None:
        """Note r source rows as read: keys uint64 [r], outcomes uint16 [r]."""
        self._write("log.u64", keys)
        self._write("outcomes.u16", outcomes)
        self.rows += len(keys)

    def _write(self, name: str, values: Sequence[int] | np.ndarray) -> None:
        data = np.ascontiguousarray(values, dtype=FILES[name][0])
        self._files[name].write(data.data)
        self._unsynced.add(name)
        self._crc[name] = zlib.crc32(data.data, self._crc[name])

    def commit(self, info: dict[str, Any] | None = None, *, complete: bool = False) -> None:
        """Make everything written so far survive a kill; `info` replaces what was noted before."""
        for name in sorted(self._unsynced):
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
        self._unsynced.clear()
        self.info = self.info if info is None else info
        state = {
            "samples": self.samples,
            "tokens": self._tokens,
            "rows": self.rows,
            "crc32": dict(self._crc),
            "info": self.info,
        }
        self._index["committed"] = state
        if complete:
            self._index["complete"] = state
            prefix = [self.samples, identity_of(state)]
            if prefix not in self._index["prefixes"]:
                self._index["prefixes"].append(prefix)
        write_index(self.path, self._index)
        if complete:
            stamp(self.path)

    def close(self, info: dict[str, Any] | None = None) -> Path:
        """Commit and complete the store; `info` is kept in it (`TokenStore.info`)."""
        self.commit(info, complete=True)
        self.release()
        return self.path

    def discard(self) -> None:
        """Give up: a store that holds nothing to continue from is removed."""
        self.release()
        begun = self._extend and self._index["committed"]["rows"] > 0
        if self._index["complete"] is None and not begun:
            shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        """Stop writing without a commit; what was committed stays, complete or not."""
        for file in self._files.values():
            with suppress(OSError):  # what a full disk did not take was not committed either
                file.close()
        self._files = {}
        self._lock.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._files:  # closed or discarded explicitly
            return
        if error is not None:
            self.discard()
        else:
            self.close()


class TokenStore:
    """A complete store, mapped read-only. Open it with `TokenStore.open(path)`."""

    def __init__(self, path: Path, index: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        state = index["complete"]
        self.path = path
        self.info: dict[str, Any] = state["info"]
        """What the writer noted about the store's making."""
        self.settings: dict[str, Any] = index["settings"]
        """What all samples were made with."""
        self.identity = identity_of(state)
        """Hash of the content, wherever the store lies and however often it was extended."""
        self._prefixes = {identity: int(samples) for samples, identity in index["prefixes"]}
        self._tokens, self._mask = arrays["tokens.i32"], arrays["mask.u8"]
        self._offsets = np.asarray(arrays["offsets.i64"])
        self.rows: np.ndarray = np.asarray(arrays["rows.i64"])
        """int64 [n]: the source's row of each sample; a long row makes several samples."""
        self.keys: np.ndarray = np.asarray(arrays["keys.u64"])
        """uint64 [n]: content hash of each sample's row."""
        self.lengths: np.ndarray = np.diff(self._offsets)
        """int64 [n]: tokens of each sample."""
        self.candidates: np.ndarray = arrays["candidates.i32"].astype(np.int64)
        """int64 [n]: anchor candidates, positions a with mask[a] and mask[a + 1]."""

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = False) -> TokenStore:
        """Map the store. Sizes, bounds and checksums are verified; UserError if anything is off.

        The checksum of a large file (tokens, mask) takes seconds a gigabyte: it is left out while
        size and time of change are those of the last time it was right. `verify`: never left out.
        """
        path = Path(path)
        index = read_index(path)
        if index is None:
            raise UserError(f"no token store at {path}: it has no index.json")
        state = index["complete"]
        if state is None:
            raise UserError(
                f"{path} was never finished ({index['committed']['rows']} rows are done): run the "
                "command that makes it again, it continues"
            )
        known = {} if verify else read_stamp(path)
        arrays = {name: map_file(path / name, state, known.get(name)) for name in FILES}
        offsets = arrays["offsets.i64"]
        if offsets[0] != 0 or offsets[-1] != state["tokens"] or (np.diff(offsets) <= 0).any():
            raise UserError(f"{path}/offsets.i64 does not rise from 0 to {state['tokens']}")
        stamp(path)
        return cls(path, index, arrays)

    def __len__(self) -> int:
        return len(self.lengths)

    def prefix(self, identity: str) -> int | None:
        """How many of the first samples were the whole store when it had that identity; or none.

        They are the same in the same places, so a run that began on them may continue.
        """
        return len(self) if identity == self.identity else self._prefixes.get(identity)

    def as_of(self, identity: str) -> TokenStore:
        """This store as it was when that was its `identity`. UserError if it never was."""
        samples = self.prefix(identity)
        if samples is None:
            raise UserError(f"{self.path} never was what the run began on: name the store it was")
        former = copy.copy(self)
        former.identity = identity
        former.rows, former.keys = self.rows[:samples], self.keys[:samples]
        former.lengths, former.candidates = self.lengths[:samples], self.candidates[:samples]
        return former

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """(ids int64 [n], mask bool [n]) of one sample, copied out of the map."""
        bounds = self._bounds(index)
        ids = torch.from_numpy(self._tokens[bounds].astype(np.int64))
        return ids, torch.from_numpy(self._mask[bounds].astype(np.bool_))

    def _bounds(self, index: int) -> slice:
        if not 0 <= index < len(self):
            raise UserError(f"sample {index} of {self.path}: it holds samples 0 to {len(self) - 1}")
        return slice(int(self._offsets[index]), int(self._offsets[index + 1]))

    def prompt(self, index: int) -> list[int]:
        """Token ids before the sample's first supervised token: what the assistant answered to."""
        ids, mask = self.sample(index)
        return ids[: int(mask.int().argmax())].tolist()

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Samples packed in the order given; their sample ids are their indices here."""
        bounds = [self._bounds(i) for i in indices]
        starts = np.cumsum([0] + [b.stop - b.start for b in bounds])
        ids = np.empty(starts[-1], dtype=np.int64)
        mask = np.empty(starts[-1], dtype=np.bool_)
        for bound, start, end in zip(bounds, starts, starts[1:]):
            ids[start:end] = self._tokens[bound]
            mask[start:end] = self._mask[bound]
        return PackedBatch(
            input_ids=torch.from_numpy(ids),
            loss_mask=torch.from_numpy(mask),
            doc_starts=torch.from_numpy(starts.astype(np.int64)),
            sample_ids=tuple(int(i) for i in indices),
        )


def cached_store(
    parts: dict[str, Any], build: Callable[[Path], None], *, root: Path | None = None
) -> TokenStore:
    """The store keyed by `parts`, written by `build(path)` if this cache does not hold it yet.

    `root` defaults to `cache_dir()/stores`. Processes that race for one key build it once.
    """
    folder = private_dir(root or cache_dir() / "stores")
    path = folder / cache_key(parts)
    with locked(path):
        index = read_index(path)
        if index is None or index["complete"] is None:
            build(path)
    return TokenStore.open(path)


def _mixed(values: np.ndarray, seed: int) -> np.ndarray:
    """uint64 [n]: splitmix64 of each value under a seed."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


def split_indices(keys: np.ndarray, held_out: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) sample indices, each sorted int64; a function of its arguments alone.

    keys: int [n], what row each sample is of (`TokenStore.keys`, a hash of content). Held out are
    the `held_out` rows whose key, hashed with `seed`, is smallest: samples of one row share text,
    so none of them may be trained on. When rows are added, none that was trained on before becomes
    held out.
    """
    sources = np.unique(keys)
    count = len(sources)
    if not 0 <= held_out < count:
        raise UserError(f"{held_out} held-out rows of {count}: expected 0 to {count - 1}")
    order = np.argsort(_mixed(sources, seed), kind="stable")
    is_held = np.isin(keys, sources[order[:held_out]])
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)
