"""The files of a token store: which there are, how much of them counts, whether they are whole.

`index.json` holds two states: *committed*, where the next writer goes on, and *complete*, what
readers see. A state is the number of samples, tokens and rows, and a checksum of each file's first
bytes up to there.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ext.errors import UserError

_FORMAT = 4
# name -> (dtype, what it has one value of); offsets have one value more.
FILES: dict[str, tuple[Any, str]] = {
    "tokens.i32": (np.dtype("<i4"), "tokens"),
    "mask.u8": (np.dtype("u1"), "tokens"),
    "offsets.i64": (np.dtype("<i8"), "samples"),
    "rows.i64": (np.dtype("<i8"), "samples"),
    "keys.u64": (np.dtype("<u8"), "samples"),
    "candidates.i32": (np.dtype("<i4"), "samples"),
    # Every source row that was read, trained or not: its key, and what became of it.
    "log.u64": (np.dtype("<u8"), "rows"),
    "outcomes.u16": (np.dtype("<u2"), "rows"),
}
LOCK, _SCRATCH = "writer.lock", ".*.json.*"
_LARGE = ("tokens.i32", "mask.u8")
_ALWAYS_VERIFIED = 64 << 20
"""Bytes up to which even the large files are checked at every open."""


def is_store(path: Path | str) -> bool:
    """Is it the folder of a store, whole or damaged? Its arrays tell: anything has an index."""
    return any((Path(path) / name).exists() for name in FILES)


def is_barely_begun(path: Path) -> bool:
    """Does the folder hold nothing, or only what a writer killed before its first commit left?"""
    return all(
        fnmatch.fnmatch(file.name, _SCRATCH)
        or (file.name in (*FILES, LOCK) and file.stat().st_size <= 8)  # the first offset
        for file in path.iterdir()
    )


def content_key(samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> int:
    """64-bit hash of a row's (ids int32 [n], mask bool [n]) samples: equal content, equal key."""
    digest = hashlib.blake2b(digest_size=8)
    for ids, mask in samples:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, dtype="<i4").data)
        digest.update(np.ascontiguousarray(mask, dtype=np.uint8).data)
    return int.from_bytes(digest.digest(), "little")


def new_index(settings: dict[str, Any]) -> dict[str, Any]:
    crc = dict.fromkeys(FILES, 0)
    state = {"samples": 0, "tokens": 0, "rows": 0, "crc32": crc, "info": {}}
    return {
        "format": _FORMAT,
        "settings": settings,
        "committed": state,
        "complete": None,
        "prefixes": [],
    }


def read_index(path: Path) -> dict[str, Any] | None:
    """The checked index, or none where there is no index file."""
    try:
        index: dict[str, Any] = json.loads((path / "index.json").read_text())
        if index["format"] == _FORMAT and index.pop("crc32") != _checksum(index):
            raise ValueError("it fails its checksum")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}/index.json is damaged ({error!r}); remove {path} and prepare it again"
        ) from None
    if index["format"] != _FORMAT:
        raise UserError(
            f"{path} has store format {index['format']}, expected {_FORMAT}; remove it and prepare "
            "it again"
        )
    return index


def write_index(path: Path, index: dict[str, Any]) -> None:
    """Replace the index, with a checksum of its own: a changed digit is no other index."""
    replace_json(path / "index.json", {**index, "crc32": _checksum(index)})


def _checksum(index: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


def identity_of(state: dict[str, Any]) -> str:
    """Of the samples alone: rows that were skipped, and commits on the way, do not count."""
    names = ("tokens.i32", "mask.u8", "offsets.i64", "rows.i64")
    parts = {name: state["crc32"][name] for name in names}
    return cache_key({"samples": state["samples"], "tokens": state["tokens"], "crc32": parts})


def bytes_of(name: str, state: dict[str, Any]) -> int:
    dtype, unit = FILES[name]
    count = int(state[unit])
    if name == "offsets.i64":
        count += 1
    return count * int(dtype.itemsize)


def damaged(path: Path, expected: int) -> UserError:
    found = path.stat().st_size if path.exists() else 0
    return UserError(
        f"{path} has {found} bytes, its index says {expected}: the store is damaged; remove "
        f"{path.parent} and prepare it again"
    )


def map_file(path: Path, state: dict[str, Any], known: list[int] | None) -> np.ndarray:
    """One file's array, verified; a large one only if `known`, its stamp, is not of today."""
    dtype, _ = FILES[path.name]
    expected = bytes_of(path.name, state)
    if not path.exists() or path.stat().st_size < expected or state["samples"] == 0:
        raise damaged(path, expected)
    if expected == 0:  # a store without a log of rows
        return np.zeros(0, dtype=dtype)
    array = np.memmap(path, dtype=dtype, mode="r", shape=(expected // dtype.itemsize,))
    if path.name in _LARGE and expected > _ALWAYS_VERIFIED and known == _times(path):
        return array
    crc, step = 0, (1 << 24) // dtype.itemsize
    for start in range(0, len(array), step):
        crc = zlib.crc32(array[start : start + step].data, crc)
    if crc != state["crc32"][path.name]:
        raise UserError(f"{path} fails its checksum; remove {path.parent} and prepare it again")
    return array


def _times(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def stamp(path: Path) -> None:
    """Note that the large files are right as they are now. It only saves time: best effort."""
    now = {name: _times(path / name) for name in _LARGE}
    if read_stamp(path) != now:
        try:
            replace_json(path / "verified.json", now)
        except OSError:  # a store on a read-only medium is verified at every open
            return


def read_stamp(path: Path) -> dict[str, list[int]]:
    try:
        return dict(json.loads((path / "verified.json").read_text()))
    except (OSError, TypeError, ValueError):
        return {}


def replace_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, then give it its own: it is never seen half."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(scratch, "w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def remove_scratch(path: Path) -> None:
    """Delete what processes killed inside of `replace_json` left in the folder of a store."""
    for scratch in path.glob(_SCRATCH):
        scratch.unlink(missing_ok=True)


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


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs, with values where they are short."""
    found: list[str] = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b)
        elif a != b:
            short = max(len(str(a)), len(str(b))) <= 20
            found.append(f"{name} {a}, now {b}" if short else f"another {name}")
    return found
