"""Rows to samples in worker processes: every core tokenises, the results come back in order."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dflash_ext.data.formats import parse_json
from dflash_ext.data.rows import ChatOptions, Row, SkipRow
from dflash_ext.data.store_files import content_key
from dflash_ext.errors import UserError

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

    Work that fits into one block, and one worker, need no process of their own. Raises UserError
    for a tokenizer that cannot be used, or when a worker dies.
    """
    from dflash_ext.data.encode import RowEncoder

    encoder = RowEncoder(tokenizer, options)  # what is wrong with the tokenizer is found here
    ahead = [block for _, block in zip(range(2), blocks)]
    if workers == 1 or len(ahead) < 2:
        for tag, rows in _chain(ahead, blocks):
            yield tag, encode_rows(encoder, rows)
        return
    del encoder
    setup = (pickle.dumps(tokenizer), options)
    pool = ProcessPoolExecutor(workers, forkserver(), initializer=_start, initargs=setup)
    pending: deque[tuple[Tag, Future[Encoded]]] = deque()
    try:
        for tag, rows in _chain(ahead, blocks):
            pending.append((tag, pool.submit(_work, rows)))
            # Enough that no worker waits, few enough that memory stays bounded.
            if len(pending) > 2 * workers + 1:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process died (out of memory?): run it again, it continues; fewer --workers "
            "need less memory"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def forkserver() -> multiprocessing.context.ForkServerContext:
    """A server process imports once and forks the workers; this one has threads and must not."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _chain(first: list[Work[Tag]], rest: Iterator[Work[Tag]]) -> Iterator[Work[Tag]]:
    yield from first
    yield from rest


_encoder: Any = None


def _start(tokenizer: bytes, options: ChatOptions) -> None:
    """Once in every worker."""
    global _encoder
    from dflash_ext.data.encode import RowEncoder

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _encoder = RowEncoder(pickle.loads(tokenizer), options)


def _leave_with_parent() -> None:
    """A worker of a killed parent would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(rows: list[bytes]) -> Encoded:
    return encode_rows(_encoder, rows)
