"""Files and data sets to blocks of rows, each row one JSON text: nothing is parsed twice.

JSON lines and arrays (plain, .gz, .zst), Parquet, Arrow, `hf:NAME[@SPLIT]` for `datasets`, folders
and globs. Memory is bounded by a block, whatever the size of the file. What is wrong with one row
is that row's `SkipRow`; what makes the rest of a file unreadable is a `UserError`.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ext.data.registry import sha256_file
from dflash_ext.data.rows import FIELDS, LEADING, SkipRow
from dflash_ext.errors import UserError

BLOCK_ROWS = 256
BLOCK_BYTES = 4 << 20
MAX_ROW_BYTES = 16 << 20
"""A longer row is skipped unread. A million tokens of text are about 4 MiB."""

_LINES = (".jsonl", ".ndjson", ".json")
_COLUMNS = (".parquet", ".arrow", ".feather")
_PACKED = (".gz", ".zst")
_SUPPORTED = "expected .jsonl, .ndjson or .json (also .gz, .zst), .parquet, .arrow or .feather"
_DAMAGE = (EOFError, OSError, zlib.error)


@dataclass(frozen=True)
class Block:
    """Some consecutive rows of one source."""

    source: str
    rows: list[tuple[int, bytes | SkipRow]]
    """(line or row number from 1, the row's JSON without white space around it)."""
    done: float
    """Share of the source read so far."""


@dataclass(frozen=True)
class Source:
    """One file, or one data set."""

    name: str
    size: int
    """Bytes on disk, as a measure of progress."""
    read: Callable[[], Iterator[Block]]
    digest: Callable[[], str]
    """Hash of the content, for cache keys."""


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
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and _suffix(p)[0]]
        if not found:
            raise UserError(f"{name} holds no data file; {_SUPPORTED}")
        return found
    if path.exists():
        if not _suffix(path)[0]:
            raise UserError(f"{name}: unknown kind of file; {_SUPPORTED}")
        return [path]
    if glob.has_magic(name):
        matches = sorted(glob.glob(str(path), recursive=True))
        found = [p for p in map(Path, matches) if p.is_dir() or _suffix(p)[0]]
        if not found:
            raise UserError(f"{name} matches no data file; {_SUPPORTED}")
        return [inner for p in found for inner in _paths(str(p))] if found else []
    raise UserError(
        f"cannot read {name}: No such file; a data set of the hub is written hf:owner/name[@split]"
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
        read = lambda: _column_blocks(str(path), *_parquet(path))  # noqa: E731
    else:
        read = lambda: _column_blocks(str(path), *_arrow(path))  # noqa: E731
    return Source(str(path), path.stat().st_size, read, lambda: _digest(path))


def _digest(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _text_blocks(path: Path, kind: str, packed: str) -> Iterator[Block]:
    try:
        with open(path, "rb") as file:
            size = max(1, path.stat().st_size)
            stream = _unpacked(file, packed)
            start = stream.peek(4096) if isinstance(stream, io.BufferedReader) else b""
            is_array = kind == ".json" and start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
            rows = _array_rows(stream, path) if is_array else _line_rows(stream)
            yield from _blocks(str(path), rows, lambda: min(1.0, file.tell() / size))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read {path}: {reason}") from None


def _unpacked(file: Any, packed: str) -> io.BufferedReader:
    if packed == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), 1 << 20)
    if packed == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), 1 << 20)
    return io.BufferedReader(file, 1 << 20)


def _blocks(
    source: str, rows: Iterator[tuple[int, bytes | SkipRow]], done: Callable[[], float]
) -> Iterator[Block]:
    """Rows in blocks; damage in the stream becomes a UserError behind the rows before it."""
    block: list[tuple[int, bytes | SkipRow]] = []
    size, number = 0, 0
    damage: UserError | None = None
    while True:
        try:
            number, row = next(rows)
        except StopIteration:
            break
        except _DAMAGE as error:
            damage = UserError(
                f"{source} is damaged or cut short after line {number} ({_first_line(error)}); "
                "mend it and run again: the rows before it are kept"
            )
            break
        except UserError as error:
            damage = error
            break
        block.append((number, row))
        size += len(row) if isinstance(row, bytes) else 0
        if len(block) >= BLOCK_ROWS or size >= BLOCK_BYTES:
            yield Block(source, block, done())
            block, size = [], 0
    if block:
        yield Block(source, block, done())
    if damage is not None:
        raise damage


def _line_rows(stream: io.BufferedReader) -> Iterator[tuple[int, bytes | SkipRow]]:
    """(line number, row) of JSON lines. Blank lines are no rows."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            length = len(line)
            while not line.endswith(b"\n") and (line := stream.readline(MAX_ROW_BYTES)):
                length += len(line)
            yield number, too_large(length)
            continue
        row = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
        if row:
            yield number, row


def too_large(length: int) -> SkipRow:
    return SkipRow("row is too large", f"{length} bytes, at most {MAX_ROW_BYTES}")


def _array_rows(stream: io.BufferedReader, path: Path) -> Iterator[tuple[int, bytes | SkipRow]]:
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
            if finished or len(text) - at > MAX_ROW_BYTES:
                what = "is larger than 16 MiB or damaged" if not finished else _first_line(error)
                raise UserError(
                    f"{path}: row {number + 1} of the JSON array: {what}; nothing behind it can be "
                    "read, JSON lines do not have this limit"
                ) from None
            more()
            continue
        number += 1
        yield number, text[at:end].encode("utf-8", "surrogateescape")
        at = end


Batches = Iterator[Any]


def _column_blocks(source: str, names: Sequence[str], count: int, read: Any) -> Iterator[Block]:
    """Rows of pyarrow batches as JSON; `read(columns)` gives the batches."""
    columns = [name for name in names if name in FIELDS]
    if not set(columns) & set(LEADING):
        raise UserError(
            f"{source} has the columns {', '.join(names) or '(none)'}; expected one of "
            f"{', '.join(LEADING)}"
        )
    number = 0

    def rows() -> Iterator[tuple[int, bytes | SkipRow]]:
        nonlocal number
        for batch in read(columns):
            for row in _batch_rows(batch):
                number += 1
                yield number, row

    def pieces() -> Iterator[tuple[int, bytes | SkipRow]]:
        try:
            yield from rows()
        except _arrow_errors() as error:
            raise EOFError(_first_line(error)) from None

    yield from _blocks(source, pieces(), lambda: number / max(1, count))


def _batch_rows(batch: Any) -> Iterator[bytes | SkipRow]:
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            yield SkipRow("text is not UTF-8")
            return
        for i in range(batch.num_rows):
            yield from _batch_rows(batch.slice(i, 1))
        return
    for value in values:
        row = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "surrogateescape")
        yield row if len(row) <= MAX_ROW_BYTES else too_large(len(row))


def _arrow_errors() -> tuple[type[BaseException], ...]:
    import pyarrow

    return (pyarrow.ArrowException, OSError)


def _parquet(path: Path) -> tuple[Sequence[str], int, Callable[[list[str]], Batches]]:
    import pyarrow.parquet

    try:
        # With a buffer a column is read piece by piece, however large its row group is.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except _arrow_errors() as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None

    def read(columns: list[str]) -> Batches:
        return iter(file.iter_batches(batch_size=BLOCK_ROWS, columns=columns, use_threads=False))

    return file.schema_arrow.names, file.metadata.num_rows, read


def _arrow(path: Path) -> tuple[Sequence[str], int, Callable[[list[str]], Batches]]:
    """The file format and the stream format share the suffix; `datasets` writes streams."""
    import pyarrow

    def opened() -> Any:
        with pyarrow.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
        source = pyarrow.memory_map(str(path))
        return pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)

    try:
        reader = opened()
        names = reader.schema.names
        if hasattr(reader, "num_record_batches"):
            parts: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            parts = iter(reader)
    except _arrow_errors() as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None

    def read(columns: list[str]) -> Batches:
        for part in parts:
            chosen = part.select(columns)
            for start in range(0, part.num_rows, BLOCK_ROWS):
                yield chosen.slice(start, BLOCK_ROWS)

    return names, 0, read


def _is_saved(path: Path) -> bool:
    """Is it a folder that `datasets` saved?"""
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _saved(path: Path) -> Source:
    def load() -> Any:
        import datasets

        return datasets.load_from_disk(str(path))

    size = sum(p.stat().st_size for p in path.rglob("*.arrow"))
    return _dataset(str(path), load, "train", size)


def _hub(name: str) -> Source:
    identifier, _, split = name.removeprefix("hf:").partition("@")

    def load() -> Any:
        import datasets

        return datasets.load_dataset(identifier)

    return _dataset(name, load, split or "train", 1 << 20)


def _dataset(name: str, load: Callable[[], Any], split: str, size: int) -> Source:
    loaded: list[Any] = []

    def data() -> Any:
        if not loaded:
            try:
                found = load()
            # The hub, the cache and a data set's own files fail in every way there is.
            except Exception as error:
                raise UserError(f"cannot load {name}: {_first_line(error)}") from None
            if hasattr(found, "keys"):  # splits by name
                if split not in found:
                    raise UserError(f"{name} has the splits {', '.join(found)}, not {split!r}")
                found = found[split]
            loaded.append(found)
        return loaded[0]

    def read(columns: list[str]) -> Batches:
        chosen = data().select_columns(columns).with_format("arrow")
        return iter(chosen.iter(batch_size=BLOCK_ROWS))

    def blocks() -> Iterator[Block]:
        return _column_blocks(name, data().column_names, len(data()), read)

    return Source(name, size, blocks, lambda: str(data()._fingerprint))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
