"""Append-only token store in memory-mapped files: ids, loss mask and bounds of every sample.

A store is a directory: `tokens.i32` [tokens], `mask.u8` [tokens], `offsets.i64` [samples + 1],
`rows.i64` [samples] and `index.json`, which holds sizes and checksums. It appears under its name as
a whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_ext.batch import PackedBatch
from dflash_ext.data.registry import cache_dir, locked, private_dir
from dflash_ext.errors import UserError

_FORMAT = 2
_FILES: dict[str, Any] = {
    "tokens.i32": np.dtype("<i4"),
    "mask.u8": np.dtype("u1"),
    "offsets.i64": np.dtype("<i8"),
    "rows.i64": np.dtype("<i8"),
}


class StoreWriter:
    """Writes a store at `path`. As a context manager it closes on success and discards on error."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if self.path.exists():
            raise UserError(f"{self.path} exists already; a store is never overwritten, remove it")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Readable by the user alone (mkdtemp), like the texts in it should be, and beside the final
        # place: a rename is atomic inside one file system only.
        self._scratch = Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent))
        self._files = {name: open(self._scratch / name, "wb") for name in _FILES}  # noqa: SIM115
        self._checksums = dict.fromkeys(_FILES, 0)
        self._bytes = dict.fromkeys(_FILES, 0)
        self._tokens = 0
        self.samples = 0
        self._write("offsets.i64", [0])

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
        self._write("tokens.i32", ids)
        self._write("mask.u8", mask)
        self._write("rows.i64", [self.samples if row is None else row])
        self._tokens += len(ids)
        self.samples += 1
        self._write("offsets.i64", [self._tokens])

    def _write(self, name: str, values: Sequence[int] | Sequence[bool]) -> None:
        data = np.asarray(values).astype(_FILES[name]).tobytes()
        self._files[name].write(data)
        self._checksums[name] = zlib.crc32(data, self._checksums[name])
        self._bytes[name] += len(data)

    def close(self, info: dict[str, Any] | None = None) -> Path:
        """Finish the store and give it its name; `info` is kept beside it as `info.json`."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if info is not None:
            (self._scratch / "info.json").write_text(json.dumps(info, indent=2))
        index = {
            "format": _FORMAT,
            "samples": self.samples,
            "tokens": self._tokens,
            "bytes": self._bytes,
            "crc32": self._checksums,
        }
        (self._scratch / "index.json").write_text(json.dumps(index, indent=2))
        os.replace(self._scratch, self.path)
        return self.path

    def discard(self) -> None:
        """Drop what was written; the final name stays free."""
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.discard()
        elif self._scratch.exists():  # not closed explicitly
            self.close()


class TokenStore:
    """A finished store, mapped read-only. Open it with `TokenStore.open(path)`."""

    def __init__(
        self,
        path: Path,
        tokens: np.ndarray,
        mask: np.ndarray,
        offsets: np.ndarray,
        rows: np.ndarray,
        info: dict[str, Any],
        identity: str,
    ) -> None:
        self.path = path
        self.rows = rows
        """int64 [n]: the source's row of each sample; a long row makes several samples."""
        self.identity = identity
        """Hash of the content, wherever the store lies."""
        self.info = info
        """What the writer noted about the store's making."""
        self._tokens, self._mask, self._offsets = tokens, mask, offsets
        self.lengths: np.ndarray = np.diff(offsets)
        """int64 [n]: tokens of each sample."""
        # An anchor needs itself and its successor supervised, both inside one sample.
        pairs = np.zeros_like(mask, dtype=np.uint8)
        pairs[:-1] = mask[:-1] & mask[1:]
        pairs[offsets[1:] - 1] = 0
        self.candidates: np.ndarray = np.add.reduceat(pairs, offsets[:-1], dtype=np.int64)
        """int64 [n]: anchor candidates, positions a with mask[a] and mask[a + 1]."""

    @classmethod
    def open(cls, path: Path | str) -> TokenStore:
        """Map the store; sizes, checksums and bounds are verified. UserError if anything is off."""
        path = Path(path)
        try:
            index = json.loads((path / "index.json").read_text())
            info_file = path / "info.json"
            info = json.loads(info_file.read_text()) if info_file.exists() else {}
            counts = {
                "tokens.i32": index["tokens"],
                "mask.u8": index["tokens"],
                "offsets.i64": index["samples"] + 1,
                "rows.i64": index["samples"],
            }
            identity = cache_key({"counts": counts, "crc32": index["crc32"]})
            found_format, checksums = index["format"], index["crc32"]
        except FileNotFoundError:
            raise UserError(f"no token store at {path}: it has no index.json") from None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}/index.json is damaged ({error}); prepare it again") from None
        if found_format != _FORMAT:
            raise UserError(
                f"{path} has store format {found_format}, expected {_FORMAT}; prepare it again"
            )
        arrays = [_map(path / name, counts[name], checksums[name]) for name in _FILES]
        tokens, mask, offsets, rows = arrays
        if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) <= 0).any():
            raise UserError(f"{path}/offsets.i64 does not rise from 0 to {len(tokens)}; remove it")
        return cls(path, tokens, mask, np.asarray(offsets), np.asarray(rows), info, identity)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """(ids int64 [n], mask bool [n]) of one sample, copied out of the map."""
        if not 0 <= index < len(self):
            raise UserError(f"sample {index} of {self.path}: it holds samples 0 to {len(self) - 1}")
        rows = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        ids = torch.from_numpy(self._tokens[rows].astype(np.int64))
        return ids, torch.from_numpy(self._mask[rows].astype(np.bool_))

    def prompt(self, index: int) -> list[int]:
        """Token ids before the sample's first supervised token: what the assistant answered to."""
        ids, mask = self.sample(index)
        return ids[: int(mask.int().argmax())].tolist()

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Samples packed in the order given; their sample ids are their indices here."""
        return PackedBatch.from_documents([self.sample(i) for i in indices], indices)


def _map(path: Path, count: int, checksum: int) -> np.ndarray:
    dtype = _FILES[path.name]
    expected = count * dtype.itemsize
    found = path.stat().st_size if path.exists() else 0
    if found != expected or count < 1:
        raise UserError(
            f"{path} has {found} bytes, its index says {expected}: the store is damaged; remove "
            f"{path.parent} and prepare it again"
        )
    array = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    crc, step = 0, 1 << 24
    for start in range(0, count, step):
        crc = zlib.crc32(array[start : start + step].data, crc)
    if crc != checksum:
        raise UserError(f"{path} fails its checksum; remove {path.parent} and prepare it again")
    return array


def cache_key(parts: dict[str, Any]) -> str:
    """Name of a derived store: a hash of everything its content depends on (requirement 4)."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def code_version(*files: str) -> str:
    """Hash of source files: changing the code that wrote a store makes its key another."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def cached_store(
    parts: dict[str, Any], build: Callable[[Path], None], *, root: Path | None = None
) -> TokenStore:
    """The store keyed by `parts`, written by `build(path)` if this cache does not hold it yet.

    `root` defaults to `cache_dir()/stores`. Processes that race for one key build it once.
    """
    folder = private_dir(root or cache_dir() / "stores")
    path = folder / cache_key(parts)
    with locked(path):
        if not path.exists():
            # We hold this key's lock: a half-written directory of it was left by a killed process.
            for abandoned in folder.glob(f".{path.name}-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            build(path)
    return TokenStore.open(path)


def split_indices(rows: np.ndarray, held_out: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) sample indices, each sorted int64; a function of its arguments alone.

    rows: int64 [n], the source row of each sample. `held_out` whole rows are held out: samples of
    one row share text, so none of them may be trained on.
    """
    sources = np.unique(rows)
    count = len(sources)
    if not 0 <= held_out < count:
        raise UserError(f"{held_out} held-out rows of {count}: expected 0 to {count - 1}")
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed]))).permutation(count)
    is_held = np.isin(rows, sources[order[:held_out]])
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)
