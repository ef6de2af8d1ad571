"""Sources to a token store: new rows are read, encoded, noted in the report and committed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ext.data import blocks, columns, encode, ledger, pool, readers, store_files
from dflash_ext.data import store as stores
from dflash_ext.data.ledger import KNOWN, NEW, Ledger
from dflash_ext.data.pool import Encoded, encode_blocks
from dflash_ext.data.readers import Source, expand
from dflash_ext.data.report import PrepareReport
from dflash_ext.data.rows import LEADING, ChatOptions, SkipRow
from dflash_ext.data.store import StoreWriter, TokenStore, cached_store
from dflash_ext.data.store_files import code_version
from dflash_ext.errors import UserError

COMMIT_SECONDS = 20.0
"""At most this much work is lost by a kill."""
DUPLICATE_REASON = "duplicate of an earlier row"


@dataclass(frozen=True)
class State:
    """Of a preparation in progress."""

    done: float
    """Bytes of the sources read."""
    total: float
    rows: int
    """Rows encoded or skipped by this call."""
    tokens: int
    """Tokens of the samples written by this call."""
    seconds: float


Progress = Callable[[State], None]


@dataclass
class _Batch:
    """Rows of one block that the store does not hold yet."""

    source: str
    numbers: list[int]
    keys: np.ndarray
    fates: list[SkipRow | int]
    """A row's NEW or DUPLICATE, or what its reader had against it."""
    done: float


def prepare(
    sources: Sequence[str],
    tokenizer: Any,
    path: Path | str,
    options: ChatOptions,
    *,
    workers: int = 0,
    progress: Progress | None = None,
    commit_seconds: float = COMMIT_SECONDS,
) -> PrepareReport:
    """Add every row of the sources that the store at `path` does not hold yet; the store's report.

    A store that does not exist is made, an unfinished one is continued. What was done before an
    error, Ctrl-C or a kill is kept. `workers`: processes that tokenise, 0: one for each core.
    Raises UserError if nothing of it can be trained.
    """
    workers = workers or len(os.sched_getaffinity(0))
    found = expand(sources)
    settings = encode.identity(tokenizer, options)
    writer = StoreWriter(path, settings=settings, extend=True)
    try:
        run = _Run(writer, found, progress, commit_seconds)
        for batch, encoded in encode_blocks(run.work(), tokenizer, options, workers=workers):
            run.write(batch, encoded)
        report = run.report
        if report.trained == 0:
            raise UserError(
                f"0 trainable rows of {report.rows} in {', '.join(sources)}"
                + (f" (skipped: {_reasons(report)})" if report.skipped else "")
                + f"; expected rows with one of {', '.join(LEADING)}"
            )
        writer.close(run.info())
        return report
    except BaseException as error:
        # Kept is what can be continued from: nothing, if no row was any good.
        if writer.samples == 0:
            writer.discard()
        elif run.whole:
            with suppress(OSError):
                writer.commit(run.info())
        writer.release()
        if isinstance(error, OSError) and error.filename is None:  # of a write: a full disk
            raise UserError(
                f"cannot write {path}: {error.strerror}; what was committed is kept, run it again"
            ) from None
        raise


def _reasons(report: PrepareReport) -> str:
    ordered = sorted(report.skipped.items(), key=lambda item: -item[1])
    return "; ".join(f"{count} {reason}" for reason, count in ordered)


class _Run:
    """One call's way through the sources."""

    def __init__(
        self,
        writer: StoreWriter,
        sources: list[Source],
        progress: Progress | None,
        commit_seconds: float,
    ) -> None:
        self._writer, self._sources, self._progress = writer, sources, progress
        self._commit_seconds = commit_seconds
        self.report = PrepareReport(**writer.info.get("report", {}))
        self._reasons: list[str] = list(writer.info.get("reasons", []))
        self._ledger = Ledger(writer.logged()[0], writer.keys())
        self._began = self._committed = time.monotonic()
        self._rows = self._tokens = 0
        self.whole = True
        """Do the samples, the log and the report tell of the same rows? Not in the middle of one
        batch, which an interruption may hit."""
        self._total = float(sum(source.size for source in sources))

    def info(self) -> dict[str, Any]:
        """What the store keeps beside its samples."""
        return {"report": asdict(self.report), "reasons": self._reasons}

    def work(self) -> Iterator[tuple[_Batch, list[bytes]]]:
        """Blocks of rows with those to encode; rows the store has read before are left out."""
        before = 0.0
        for source in self._sources:
            for block in source.read():
                done = before + block.done * source.size
                rows = [row for _, row in block.rows]
                # An unread row has no text to be known by: its place and fault have to do.
                texts = [
                    row
                    if isinstance(row, bytes)
                    else f"{Path(block.source).name}:{n} {row}".encode()
                    for n, row in block.rows
                ]
                keys = ledger.row_keys(texts)
                classes = self._ledger.classify(keys)
                kept = [i for i, c in enumerate(classes) if c != KNOWN]
                if not kept:
                    self._tell(done)
                    continue
                fates = [
                    row if isinstance(row, SkipRow) else classes[i]
                    for i, row in ((i, rows[i]) for i in kept)
                ]
                numbers = [block.rows[i][0] for i in kept]
                encode_now = [texts[i] for i, fate in zip(kept, fates) if fate == NEW]
                yield _Batch(block.source, numbers, keys[kept], fates, done), encode_now
            before += source.size

    def write(self, batch: _Batch, encoded: Encoded) -> None:
        """Note what became of a batch's rows and write the samples."""
        self.whole = False
        outcomes = np.zeros(len(batch.numbers), dtype=np.uint16)
        ordinals = np.zeros(len(encoded.outcomes), dtype=np.int64)
        fresh = np.zeros(len(encoded.outcomes), dtype=np.bool_)
        # A row's samples stand together and share their key: the first tells it.
        key_of = dict(zip(encoded.rows.tolist()[::-1], encoded.keys.tolist()[::-1]))
        index = 0
        for i, (number, fate) in enumerate(zip(batch.numbers, batch.fates)):
            skipped: tuple[str, str] | None
            if fate == NEW:
                skipped = encoded.outcomes[index]
                if skipped is None and not self._ledger.is_new_content(key_of[index]):
                    skipped = (DUPLICATE_REASON, "the same tokens")
                fresh[index] = skipped is None
                ordinals[index] = self._writer.rows + i + 1
                index += 1
            elif isinstance(fate, SkipRow):
                skipped = (fate.reason, fate.detail)
            else:
                skipped = (DUPLICATE_REASON, "the same text")
            if skipped is not None:
                self.report.skip(skipped[0], f"{batch.source} row {number}", skipped[1])
                outcomes[i] = self._code(skipped[0])
        self._append(encoded, fresh, ordinals)
        self._writer.log_rows(batch.keys, outcomes)
        self.report.rows += len(batch.numbers)
        self.report.trained += int(fresh.sum())
        self.report.add_sampling(encoded.sampling)
        self._rows += len(batch.numbers)
        self.whole = True
        self._tell(batch.done)
        if time.monotonic() - self._committed >= self._commit_seconds:
            self._writer.commit(self.info())
            self._committed = time.monotonic()

    def _append(self, encoded: Encoded, fresh: np.ndarray, ordinals: np.ndarray) -> None:
        """Write the samples of fresh rows: bool [r]; `ordinals` int64 [r] are the rows' numbers."""
        if len(encoded.lengths) == 0:
            return
        ids, mask = encoded.ids, encoded.mask
        keep = fresh[encoded.rows]
        if not keep.all():
            tokens = np.repeat(keep, encoded.lengths)
            ids, mask = ids[tokens], mask[tokens]
        self._writer.append_many(
            ids,
            mask,
            encoded.lengths[keep],
            rows=ordinals[encoded.rows[keep]],
            keys=encoded.keys[keep],
        )
        report = self.report
        report.samples += int(keep.sum())
        report.tokens += len(ids)
        report.supervised_tokens += int(encoded.supervised[keep].sum())
        self._tokens += len(ids)
        for row, what, cut_tokens, cut_turns in encoded.cuts:
            if fresh[row]:
                report.cut[what] = report.cut.get(what, 0) + 1
                report.cut_tokens += cut_tokens
                report.cut_turns += cut_turns

    def _code(self, reason: str) -> int:
        """A skipped row's outcome in the log; 0 is a trained row's."""
        if reason not in self._reasons:
            self._reasons.append(reason)
        return self._reasons.index(reason) + 1

    def _tell(self, done: float) -> None:
        if self._progress:
            seconds = time.monotonic() - self._began
            self._progress(State(done, self._total, self._rows, self._tokens, seconds))


def prepared_store(
    source: str, tokenizer: Any, *, max_length: int, root: Path | None = None
) -> tuple[TokenStore, PrepareReport]:
    """The store prepared from the file, folder, glob or data set `source`, kept in the cache.

    The cache's key covers the data's bytes, tokenizer, template, options and this code
    (requirement 4). UserError if no row can be trained.
    """
    options = ChatOptions(max_length=max_length)
    parts = {
        "data": [found.digest() for found in expand([source])],
        "prepare": _version(),
        "rows": encode.identity(tokenizer, options),
    }

    def build(target: Path) -> None:
        prepare([source], tokenizer, target, options)

    store = cached_store(parts, build, root=root)
    return store, PrepareReport(**store.info["report"])


def _version() -> str:
    """Of the code that decides which rows are read, which are kept, and how they are stored."""
    modules = (blocks, columns, ledger, pool, readers, stores, store_files)
    return code_version(__file__, *(str(module.__file__) for module in modules))


def finished_store(
    path: Path | str, tokenizer: Callable[[], Any] | None, *, max_length: int
) -> TokenStore:
    """The store at `path`, if it fits a run. UserError if it does not.

    tokenizer: gives the target's, with which `python -m dflash_ext.prepare` must have made the
    store; none: the target has none. A store written by other means says nothing of a tokenizer.
    """
    store = TokenStore.open(path)
    if tokenizer is not None and "tokenizer" in store.settings:
        made, wanted = store.settings, encode.identity(tokenizer(), ChatOptions())
        for name in ("tokenizer", "template"):
            if made[name] != wanted[name]:
                raise UserError(
                    f"{path} was prepared with another {name} than the target's: prepare it again "
                    "with the --target you train with"
                )
    longest = int(store.lengths.max())
    if longest > max_length:
        raise UserError(
            f"{path} holds a sample of {longest} tokens, max_length is {max_length}: raise it, or "
            "prepare the store with it"
        )
    return store
