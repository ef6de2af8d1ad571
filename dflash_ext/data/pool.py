"""Rows to samples in worker processes: every core tokenises, the results come back in order."""

from __future__ import annotations

import gc
import json
import multiprocessing
import multiprocessing.context
import os
import pickle
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

import numpy as np

from dflash_ext.data.formats import parse_json
from dflash_ext.data.rows import ChatOptions, Row, SkipRow
from dflash_ext.data.store_files import content_key
from dflash_ext.errors import UserError

_AHEAD = 2
"""Blocks that a worker has at a time: the one it encodes and the next."""
_PRELOAD = ["dflash_ext.data.encode", "dflash_ext.data.pool", "transformers"]


@dataclass(frozen=True)
class Encoded:
    """What became of r rows: s samples of t tokens, one after the other."""

    outcomes: list[tuple[str, str] | None]
    """Of each row: (reason, detail) of a skipped one, none for the others."""
    ids: np.ndarray
    """int32 [t]."""
    mask: np.ndarray
    """bool [t]."""
    lengths: np.ndarray
    """int64 [s]: tokens of each sample."""
    rows: np.ndarray
    """int64 [s]: which of the r rows each sample is of; rises."""
    keys: np.ndarray
    """uint64 [s]: content key of the sample's row."""
    supervised: np.ndarray
    """int64 [s]: supervised tokens of each sample."""
    cuts: list[tuple[int, str, int, int]]
    """(row, what was cut, tokens cut, turns cut) of each row that `max_length` cost something."""
    sampling: list[str]
    """What the rows say of the sampling of their answers, distinct JSON texts."""


def encode_rows(encoder: Any, rows: Sequence[bytes]) -> Encoded:
    """Encode rows of JSON text with a `RowEncoder`; a bad row is an outcome, never an error."""
    values = [_parse(row) for row in rows]
    good = [value for value in values if not isinstance(value, SkipRow)]
    results = iter(_encode(encoder, good))
    found = [v if isinstance(v, SkipRow) else next(results) for v in values]
    samples: list[Row] = []
    owner: list[int] = []
    keys: list[int] = []
    cuts: list[tuple[int, str, int, int]] = []
    outcomes: list[tuple[str, str] | None] = []
    for number, result in enumerate(found):
        if isinstance(result, SkipRow):
            outcomes.append((result.reason, result.detail))
            continue
        outcomes.append(None)
        samples += result
        owner += [number] * len(result)
        keys += [content_key([(s.ids, s.mask) for s in result])] * len(result)
        if any(s.cut for s in result):
            what = next(s.cut for s in result if s.cut)
            tokens, turns = sum(s.cut_tokens for s in result), sum(s.cut_turns for s in result)
            cuts.append((number, what, tokens, turns))
    return Encoded(
        outcomes=outcomes,
        ids=_joined([s.ids for s in samples], np.int32),
        mask=_joined([s.mask for s in samples], np.bool_),
        lengths=np.array([len(s.ids) for s in samples], dtype=np.int64),
        rows=np.array(owner, dtype=np.int64),
        keys=np.array(keys, dtype=np.uint64),
        supervised=np.array([np.count_nonzero(s.mask) for s in samples], dtype=np.int64),
        cuts=cuts,
        sampling=_sampling(values),
    )


def _joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=dtype), *parts]).astype(dtype, copy=False)


def _parse(row: bytes) -> Any:
    try:
        return parse_json(row)
    except SkipRow as skip:
        return skip


def _sampling(values: list[Any]) -> list[str]:
    """The distinct settings, as JSON, that rows say their answers were sampled with."""
    found = [v["sampling"] for v in values if isinstance(v, dict) and v.get("sampling")]
    return sorted({json.dumps(settings, sort_keys=True) for settings in found})


def _encode(encoder: Any, rows: list[Any]) -> list[list[Row] | SkipRow]:
    try:
        return list(encoder.encode(rows))
    except UserError:
        raise
    # Whatever a row manages to trip over is that row's fault: find it, keep the others.
    except Exception as error:
        if len(rows) == 1:
            return [SkipRow("row cannot be encoded", f"{type(error).__name__}: {error}")]
        half = len(rows) // 2
        return _encode(encoder, rows[:half]) + _encode(encoder, rows[half:])


Tag = TypeVar("Tag")
Work = tuple[Tag, list[bytes]]


def encode_blocks(
    blocks: Iterator[Work[Tag]], tokenizer: Any, options: ChatOptions, *, workers: int
) -> Iterator[tuple[Tag, Encoded]]:
    """Encode blocks of rows; (tag, result) of each in the order given.

    Work that fits into one block, and one worker, need no process of their own. An error of
    `blocks` is raised behind the results of the blocks before it. Raises UserError for a tokenizer
    that cannot be used, or when a worker dies.
    """
    from dflash_ext.data.encode import RowEncoder

    encoder = RowEncoder(tokenizer, options)  # what is wrong with the tokenizer is found here
    first = next(blocks, None)
    if first is None:
        return
    if workers > 1:
        try:
            second = next(blocks, None)
        except UserError:
            yield first[0], encode_rows(encoder, first[1])
            raise
        if second is not None:
            del encoder
            crew = [_Worker(pickle.dumps(tokenizer), options) for _ in range(workers)]
            try:
                yield from _in_order(chain([first, second], blocks), crew)
            finally:
                for worker in crew:
                    worker.stop()
            return
    for tag, rows in chain([first], blocks):
        yield tag, encode_rows(encoder, rows)


def _in_order(blocks: Iterator[Work[Tag]], crew: list[_Worker]) -> Iterator[tuple[Tag, Encoded]]:
    by_connection = {worker.connection: worker for worker in crew}
    tags: dict[int, Tag] = {}
    done: dict[int, Encoded] = {}
    sent = given = 0
    failure: UserError | None = None

    def read() -> Work[Tag] | None:
        nonlocal failure
        try:
            return next(blocks, None)
        except UserError as error:
            failure = error
            return None

    upcoming = read()
    while True:
        # What is done out of order is bounded, so memory is.
        while upcoming is not None and sent - given < (_AHEAD + 2) * len(crew):
            worker = min(crew, key=lambda worker: len(worker.tasks))
            if len(worker.tasks) == _AHEAD:
                break
            tags[sent], rows = upcoming
            worker.send(sent, rows)
            sent += 1
            upcoming = read()
        if given in done:
            yield tags.pop(given), done.pop(given)
            given += 1
        busy = [worker.connection for worker in crew if worker.tasks]
        if not busy and given not in done:
            break
        # There is nothing to wait for if all came back while the first held up the others, and
        # who is done meanwhile gets work before the next result is written.
        waits = bool(busy) and given not in done
        for connection in wait(busy, None if waits else 0):
            index, encoded = by_connection[cast(Connection, connection)].receive()
            done[index] = encoded
    if failure is not None:
        raise failure


class _Worker:
    """One process with a pipe of its own: nothing is shared that a dying worker could hold."""

    def __init__(self, tokenizer: bytes, options: ChatOptions) -> None:
        context = forkserver()
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, tokenizer, options), daemon=True
        )
        self._process.start()
        theirs.close()
        self.tasks: deque[int] = deque()
        """Blocks sent and not come back, in order: at most _AHEAD."""

    def send(self, index: int, rows: list[bytes]) -> None:
        self.tasks.append(index)
        try:
            self.connection.send(rows)
        except OSError:
            raise self._died() from None

    def receive(self) -> tuple[int, Encoded]:
        """(index, result) of the first block sent. Raises what the worker raised, UserError if it
        died."""
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, Encoded)
        return self.tasks.popleft(), result

    def _died(self) -> UserError:
        self._process.join(5)
        return UserError(
            f"a worker process died (exit code {self._process.exitcode}; -9 is often for lack of "
            "memory): run it again, it continues; fewer --workers need less memory"
        )

    def stop(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join()


def forkserver() -> multiprocessing.context.ForkServerContext:
    """A server process imports once and forks the workers; this one has threads and must not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _serve(connection: Connection, tokenizer: bytes, options: ChatOptions) -> None:
    """Encode what comes until the other end closes, as it also does when the parent is killed."""
    from dflash_ext.data.encode import RowEncoder

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    encoder = RowEncoder(pickle.loads(tokenizer), options)
    waiting: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()

    def read() -> None:
        # Reads whenever something comes, so a parent that sends never waits for one that it should
        # be reading from; and the next block is here when this one is done.
        try:
            while True:
                waiting.put(connection.recv())
        except (EOFError, OSError):
            waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    # Python would search all that transformers imported for garbage again and again; what there is
    # comes from the rows, and is collected when they are done.
    gc.freeze()
    gc.disable()
    try:
        while (rows := waiting.get()) is not None:
            try:
                result: Encoded | BaseException = encode_rows(encoder, rows)
            except Exception as error:
                result = error
            connection.send(result)
            del rows, result
            gc.collect()
    except OSError:
        return
