"""Parquet, Arrow and `datasets`: only the columns that matter, each row as JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_ext.data import blocks
from dflash_ext.data.blocks import Block, Numbered, Source, first_line, in_blocks, too_large
from dflash_ext.data.rows import FIELDS, LEADING, SkipRow
from dflash_ext.errors import UserError

Batches = Iterator[tuple[Any, float]]
"""(pyarrow batch, share of the source up to its end)."""
ReadColumns = Callable[[list[str]], Batches]


def column_blocks(source: str, names: Sequence[str], read: ReadColumns) -> Iterator[Block]:
    """Rows of pyarrow batches as JSON; `read(columns)` gives the batches."""
    columns = [name for name in names if name in FIELDS]
    if not set(columns) & set(LEADING):
        raise UserError(
            f"{source} has the columns {', '.join(names) or '(none)'}; expected one of "
            f"{', '.join(LEADING)}"
        )
    done = 0.0

    def rows() -> Iterator[Numbered]:
        nonlocal done
        number = 0
        try:
            for batch, share in read(columns):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
                done = share
        except _arrow_errors() as error:
            raise EOFError(first_line(error)) from None

    yield from in_blocks(source, rows(), lambda: done)


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
        try:
            text = json.dumps(value, ensure_ascii=False, default=_as_text)
        except TypeError as error:  # a date, a decimal: what it meant is not ours to guess
            yield SkipRow("a column is neither text, number, truth nor list", str(error))
            continue
        row = text.encode("utf-8", "surrogateescape")
        yield row if len(row) <= blocks.MAX_ROW_BYTES else too_large(len(row))


def _as_text(value: Any) -> str:
    """Bytes are how old writers say text; those that are none make their row "not UTF-8"."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    raise TypeError(f"a value of type {type(value).__name__}")


def _arrow_errors() -> tuple[type[BaseException], ...]:
    import pyarrow

    return (pyarrow.ArrowException, OSError)


def parquet(path: Path) -> tuple[Sequence[str], ReadColumns]:
    import pyarrow.parquet

    try:
        # With a buffer a column is read piece by piece, however large its row group is.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except _arrow_errors() as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None

    def read(columns: list[str]) -> Batches:
        batches = file.iter_batches(
            batch_size=blocks.BLOCK_ROWS, columns=columns, use_threads=False
        )
        return _with_share(batches, file.metadata.num_rows)

    return file.schema_arrow.names, read


def _with_share(batches: Iterator[Any], count: int) -> Batches:
    rows = 0
    for batch in batches:
        rows += batch.num_rows
        yield batch, rows / max(1, count)


def arrow(path: Path) -> tuple[Sequence[str], ReadColumns]:
    """The file format and the stream format share the suffix; `datasets` writes streams."""
    import pyarrow

    try:
        source = pyarrow.memory_map(str(path))
        size = max(1, source.size())
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
    except _arrow_errors() as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None

    def parts() -> Batches:
        if is_file:
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i), (i + 1) / reader.num_record_batches
        else:
            for batch in reader:
                yield batch, source.tell() / size

    def read(columns: list[str]) -> Batches:
        for part, share in parts():
            chosen = part.select(columns)
            for start in range(0, part.num_rows, blocks.BLOCK_ROWS):
                yield chosen.slice(start, blocks.BLOCK_ROWS), share

    return reader.schema.names, read


def dataset(
    name: str,
    load: Callable[[], Any],
    split: str,
    size: int,
    digest: Callable[[], str] | None = None,
) -> Source:
    """What `load` gives, or its `split` if it gives several; digest: none: as `datasets` says."""
    loaded: list[Any] = []

    def data() -> Any:
        if not loaded:
            try:
                found = load()
            # The hub, the cache and a data set's own files fail in every way there is.
            except Exception as error:
                raise UserError(f"cannot load {name}: {first_line(error)}") from None
            if hasattr(found, "keys"):  # splits by name
                if split not in found:
                    raise UserError(f"{name} has the splits {', '.join(found)}, not {split!r}")
                found = found[split]
            loaded.append(found)
        return loaded[0]

    def read(columns: list[str]) -> Batches:
        chosen = data().select_columns(columns).with_format("arrow")
        return _with_share(chosen.iter(batch_size=blocks.BLOCK_ROWS), len(data()))

    def rows() -> Iterator[Block]:
        return column_blocks(name, data().column_names, read)

    return Source(name, size, rows, digest or (lambda: str(data()._fingerprint)))
