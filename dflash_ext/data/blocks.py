"""Rows in blocks: the unit of reading, of encoding, and of what is known to be unreadable."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dflash_ext.data.rows import SkipRow
from dflash_ext.errors import UserError

BLOCK_ROWS = 256
BLOCK_BYTES = 4 << 20
MAX_ROW_BYTES = 16 << 20
"""A longer row is skipped unread. A million tokens of text are about 4 MiB."""

_DAMAGE = (EOFError, OSError, zlib.error)


Numbered = tuple[int, "bytes | SkipRow"]
"""(line or row number from 1, the row's JSON without white space around it)."""


@dataclass(frozen=True)
class Block:
    """Some consecutive rows of one source."""

    source: str
    rows: list[Numbered]
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


def in_blocks(source: str, rows: Iterator[Numbered], done: Callable[[], float]) -> Iterator[Block]:
    """Rows in blocks; damage in the stream becomes a UserError behind the rows before it."""
    block: list[Numbered] = []
    size, number = 0, 0
    damage: UserError | None = None
    while True:
        try:
            number, row = next(rows)
        except StopIteration:
            break
        except _DAMAGE as error:
            reason = error.strerror if isinstance(error, OSError) else None
            damage = UserError(
                f"cannot read {source}: {reason}"
                if reason
                else f"{source} is damaged or cut short after row {number} ({first_line(error)}); "
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


def too_large(length: int) -> SkipRow:
    return SkipRow("row is too large", f"{length} bytes, at most {MAX_ROW_BYTES}")


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
