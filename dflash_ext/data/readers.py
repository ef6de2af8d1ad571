"""Files and data sets to blocks of rows, each row one JSON text: nothing is parsed twice.

JSON lines and arrays (plain, .gz, .zst), Parquet, Arrow, `hf:NAME[:CONFIG][@SPLIT]` for `datasets`,
folders and globs. Memory is bounded by a block, whatever the size of the file. What is wrong with
one row is that row's `SkipRow`; what makes the rest of a file unreadable is a `UserError`.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_ext.data import blocks
from dflash_ext.data.blocks import Block, Numbered, Source, first_line, in_blocks, too_large
from dflash_ext.data.columns import arrow, column_blocks, dataset, parquet
from dflash_ext.data.registry import sha256_file
from dflash_ext.data.store_files import is_store
from dflash_ext.errors import UserError

_LINES = (".jsonl", ".ndjson", ".json")
_COLUMNS = (".parquet", ".arrow", ".feather")
_PACKED = (".gz", ".zst")
_SUPPORTED = "expected .jsonl, .ndjson or .json (also .gz, .zst), .parquet, .arrow or .feather"


def expand(names: Sequence[str]) -> list[Source]:
    """Every source the names stand for, each once, in the order given and by name inside a glob.

    UserError if a name stands for nothing, or for something that cannot be read.
    """
    sources: dict[str, Source] = {}
    for name in names:
        if name.startswith("hf:"):
            sources[name] = _hub(name)
            continue
        for path in _paths(name):
            sources.setdefault(str(path.resolve()), _saved(path) if path.is_dir() else _file(path))
    if not sources:
        raise UserError("no source was named; " + _SUPPORTED)
    return list(sources.values())


def _paths(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        if _is_saved(path):
            return [path]
        if is_store(path):
            raise UserError(f"{name} is a token store, not data to make one of")
        found = [p for p in sorted(path.rglob("*")) if _is_data(p)]
        if not found:
            raise UserError(f"{name} holds no data file; {_SUPPORTED}")
        return found
    if path.exists():
        if not _suffix(path)[0]:
            raise UserError(f"{name}: unknown kind of file; {_SUPPORTED}")
        return [path]
    if glob.has_magic(name):
        matches = sorted(glob.glob(str(path), recursive=True))
        found = [p for p in map(Path, matches) if _is_data(p)]
        if not found:
            raise UserError(f"{name} matches no data file; {_SUPPORTED}")
        return found
    raise UserError(
        f"cannot read {name}: No such file; a data set of the hub is written "
        "hf:owner/name[:config][@split]"
    )


def _is_data(path: Path) -> bool:
    """Is it a file of rows, and no part of a store or of what `datasets` keeps beside its files?"""
    about = ("dataset_info.json", "dataset_dict.json", "state.json")
    return (
        path.is_file()
        and bool(_suffix(path)[0])
        and path.name not in about
        and not path.name.startswith(".")
        and not is_store(path.parent)
    )


def _suffix(path: Path) -> tuple[str, str]:
    """(kind, compression), each "" if there is none known."""
    name = path.name.lower()
    packed = next((p for p in _PACKED if name.endswith(p)), "")
    name = name.removesuffix(packed)
    kinds = _LINES if packed else (*_LINES, *_COLUMNS)
    return next((kind for kind in kinds if name.endswith(kind)), ""), packed


def _file(path: Path) -> Source:
    kind, packed = _suffix(path)
    if kind in _LINES:
        read = lambda: _text_blocks(path, kind, packed)  # noqa: E731
    elif kind == ".parquet":
        read = lambda: column_blocks(str(path), *parquet(path))  # noqa: E731
    else:
        read = lambda: column_blocks(str(path), *arrow(path))  # noqa: E731
    # The same bytes are other rows in a file of another kind.
    return Source(str(path), path.stat().st_size, read, lambda: f"{kind}{packed} {_digest(path)}")


def _digest(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _text_blocks(path: Path, kind: str, packed: str) -> Iterator[Block]:
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed by the with below)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    with file:
        size = max(1, path.stat().st_size)
        stream = _unpacked(file, packed)  # held to the end: it closes the file when it is dropped
        rows = _text_rows(stream, path, kind)
        yield from in_blocks(str(path), rows, lambda: min(1.0, file.tell() / size))


def _text_rows(stream: Any, path: Path, kind: str) -> Iterator[Numbered]:
    start = stream.peek(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    is_array = kind == ".json" and start.startswith(b"[")
    yield from _array_rows(stream, path) if is_array else _line_rows(stream)


def _unpacked(file: Any, packed: str) -> io.BufferedReader | gzip.GzipFile:
    if packed == ".gz":
        return gzip.GzipFile(fileobj=file)
    if packed == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)
    return io.BufferedReader(file, 1 << 20)


def _line_rows(stream: Any) -> Iterator[Numbered]:
    """(line number, row) of JSON lines. Blank lines are no rows."""
    number = 0
    while line := stream.readline(blocks.MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > blocks.MAX_ROW_BYTES and not line.endswith(b"\n"):
            length = len(line)
            while not line.endswith(b"\n") and (line := stream.readline(blocks.MAX_ROW_BYTES)):
                length += len(line)
            yield number, too_large(length)
            continue
        row = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
        if row:
            yield number, row


def _array_rows(stream: Any, path: Path) -> Iterator[Numbered]:
    """(element number, element) of one JSON array, which is never in memory as a whole."""
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    scan = json.JSONDecoder().raw_decode
    text, at, number, finished = "", 0, 0, False

    def more() -> None:
        """At least as much again as is there: a long element is scanned a few times only."""
        nonlocal text, at, finished
        data = stream.read(max(1 << 20, len(text) - at))
        finished = not data
        text, at = text[at:] + decode(data, finished), 0

    def skip(characters: str) -> str:
        """Move behind them; the first other character, "" at the end of the file."""
        nonlocal at
        while True:
            while at < len(text) and text[at] in characters:
                at += 1
            if at < len(text) or finished:
                return text[at : at + 1]
            more()

    skip(" \t\r\n\ufeff")
    at += 1  # the bracket
    while (first := skip(" \t\r\n,")) != "]":
        try:
            if not first:
                raise ValueError("the array does not end")
            _, end = scan(text, at)
        except (ValueError, RecursionError) as error:
            if finished or len(text) - at > blocks.MAX_ROW_BYTES:
                what = "is larger than 16 MiB or damaged" if not finished else first_line(error)
                raise UserError(
                    f"{path}: row {number + 1} of the JSON array: {what}; nothing behind it can be "
                    "read, JSON lines do not have this limit"
                ) from None
            more()
            continue
        number += 1
        yield number, text[at:end].encode("utf-8", "surrogateescape")
        at = end
    at += 1
    if skip(" \t\r\n"):
        raise UserError(
            f"{path}: there is more behind the end of its JSON array, after row {number}, which is "
            "not read; expected one array, or JSON lines"
        )


def _is_saved(path: Path) -> bool:
    """Is it a folder that `datasets` saved?"""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _saved(path: Path) -> Source:
    def load() -> Any:
        import datasets

        return datasets.load_from_disk(str(path))

    files = sorted(path.rglob("*.arrow"))
    size = sum(file.stat().st_size for file in files)
    return dataset(str(path), load, "train", size, lambda: " ".join(map(_digest, files)))


def _hub(name: str) -> Source:
    """`hf:owner/name[:config][@split]`, or a folder in the place of owner/name."""
    whole, _, split = name.removeprefix("hf:").partition("@")
    identifier, _, config = whole.partition(":")

    def load() -> Any:
        import datasets

        return datasets.load_dataset(identifier, config or None)

    return dataset(name, load, split or "train", 1 << 20)
