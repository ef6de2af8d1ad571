"""`python -m dflash_ext.bench data`: preparing and reading a million conversations.

Preparing is measured on `--rows` synthetic conversations against the tokenizer library alone, which
gets the same rendered texts in the same batches: with its own threads, and (faster) in as many
processes as `prepare` uses. Rounds are interleaved and short, and ratios are medians of those of a
round: a shared machine changes its speed by a fifth from one minute to the next. Opening, planning
and reading are measured on a store of `--store-rows` samples that is written directly and removed.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ext.bench.conversations import write_conversations
from dflash_ext.bench.footprint import PeakMemory
from dflash_ext.data.blocks import BLOCK_ROWS
from dflash_ext.data.pool import forkserver
from dflash_ext.data.prepared import State, prepare
from dflash_ext.data.rows import ChatOptions
from dflash_ext.data.store import StoreWriter
from dflash_ext.data.templates import load_tokenizer
from dflash_ext.errors import UserError
from dflash_ext.record import save

ROUNDS = 9
ALONE_ROWS = 10 * BLOCK_ROWS
"""Rows of one round of the library alone."""

Batches = list[list[str]]


def rendered(tokenizer: Any, path: Path, rows: int) -> Batches:
    """The templates' texts of the file's first rows, in `prepare`'s batches."""
    with open(path, encoding="utf-8") as file:
        lines = [line for _, line in zip(range(rows), file)]
    texts = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        for line in lines
    ]
    return [texts[i : i + BLOCK_ROWS] for i in range(0, len(texts), BLOCK_ROWS)]


def threads_rate(tokenizer: Any, batches: Batches, method: str) -> tuple[float, float]:
    """(rows, tokens) a second of the library's own threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encode = getattr(tokenizer.backend_tokenizer, method)
    began, tokens = time.perf_counter(), 0
    for batch in batches:
        tokens += sum(len(e.ids) for e in encode(batch, add_special_tokens=False))
    seconds = time.perf_counter() - began
    return sum(map(len, batches)) / seconds, tokens / seconds


_alone: Any = None


def _start_alone(tokenizer: bytes) -> None:
    global _alone
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _alone = pickle.loads(tokenizer).backend_tokenizer


def _tokens_alone(batch: list[str]) -> int:
    return sum(len(e.ids) for e in _alone.encode_batch_fast(batch, add_special_tokens=False))


def _warm(_: int) -> None:
    _tokens_alone(["warm"])
    time.sleep(0.3)  # so that no worker takes another's turn


def pool_rate(tokenizer: Any, batches: Batches, workers: int) -> tuple[float, float]:
    """(rows, tokens) a second of the library alone in processes that give back but a count."""
    pool = ProcessPoolExecutor(
        workers, forkserver(), initializer=_start_alone, initargs=(pickle.dumps(tokenizer),)
    )
    with pool:
        list(pool.map(_warm, range(workers)))
        began = time.perf_counter()
        tokens = sum(pool.map(_tokens_alone, batches))
        seconds = time.perf_counter() - began
    return sum(map(len, batches)) / seconds, tokens / seconds


class Steady:
    """Rates from the first finished block to the last: without the workers' start."""

    def __init__(self) -> None:
        self._first: State | None = None
        self._last: State | None = None

    def __call__(self, state: State) -> None:
        self._first = self._first or (state if state.rows else None)
        self._last = state

    def rates(self) -> tuple[float, float]:
        """(rows, tokens) a second."""
        first, last = self._first, self._last
        assert first is not None
        assert last is not None
        seconds = last.seconds - first.seconds
        return (last.rows - first.rows) / seconds, (last.tokens - first.tokens) / seconds


Rates = dict[str, list[tuple[float, float]]]


def measure_prepare(folder: Path, rows: int, workers: int) -> tuple[Rates, dict[str, float]]:
    """Rates of `prepare` and of the library alone, by round; and what else there is to know.

    Every round writes new conversations, gives some of them to the library and extends one store
    with all of them.
    """
    tokenizer, options = load_tokenizer(None, trust_remote_code=False), ChatOptions()
    store, sources, peak = folder / "prepared", [folder / f"{i}.jsonl" for i in range(ROUNDS)], 0
    rates: Rates = {"prepare": [], "threads": [], "fast threads": [], "processes": []}
    for i, source in enumerate(sources):
        write_conversations(source, rows // ROUNDS, seed=i)
        batches = rendered(tokenizer, source, min(rows // ROUNDS, ALONE_ROWS))
        rates["threads"].append(threads_rate(tokenizer, batches, "encode_batch"))
        rates["fast threads"].append(threads_rate(tokenizer, batches, "encode_batch_fast"))
        rates["processes"].append(pool_rate(tokenizer, batches, workers))
        del batches
        steady = Steady()
        with PeakMemory() as memory:
            prepare([str(source)], tokenizer, store, options, workers=workers, progress=steady)
        rates["prepare"].append(steady.rates())
        peak = max(peak, memory.peak)
    began = time.perf_counter()
    report = prepare([str(folder / "*.jsonl")], tokenizer, store, options, workers=workers)
    seconds = time.perf_counter() - began
    assert report.rows == rows // ROUNDS * ROUNDS  # each of them once
    return rates, {
        "peak_mib": peak / 2**20,
        "known_rows_per_s": report.rows / seconds,
        "tokens_per_row": report.tokens / report.rows,
    }


def write_store(path: Path, samples: int) -> None:
    """A store of lognormal sample lengths, about 1,500 tokens each, the last 4/5 supervised."""
    draw = np.random.Generator(np.random.Philox(0))
    lengths = (1500 * 0.78 * draw.lognormal(0, 0.7, samples)).clip(16, 4096).astype(np.int64)
    pool = draw.integers(0, 49152, 1 << 23, dtype=np.int32)
    with StoreWriter(path) as writer:
        for start in range(0, samples, 2048):
            part = lengths[start : start + 2048]
            ends = np.cumsum(part)
            position = np.arange(ends[-1]) - np.repeat(ends - part, part)
            writer.append_many(
                pool[: ends[-1]],
                position >= np.repeat(part // 5, part),
                part,
                rows=np.arange(start, start + len(part)),
                keys=draw.integers(0, 2**64, len(part), dtype=np.uint64),
            )


# VmHWM, because what getrusage calls the peak begins with that of the process that forked.
READER = """
import sys, time
import numpy as np
from dflash_ext.data.store import TokenStore
from dflash_ext.plan import Schedule
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
imported, began = peak(), time.perf_counter()
store = TokenStore.open(sys.argv[1])
opened = time.perf_counter() - began
schedule = Schedule(store.lengths, np.minimum(store.candidates, 512), seed=0,
                    token_budget=16384, max_documents=64, anchor_budget=8192)
planned, planned_peak = time.perf_counter() - began, peak()
began, tokens, batches = time.perf_counter(), 0, schedule.epoch(0)
for batch in batches[:: max(1, len(batches) // 2000)]:
    tokens += store.batch(batch).num_tokens
seconds = time.perf_counter() - began
print(imported, opened, planned, planned_peak, tokens / seconds, len(batches))
"""


def measure_reading(folder: Path, samples: int) -> dict[str, float]:
    """Seconds to open and to plan, MiB, tokens a second read in the plan's random order."""
    store = folder / "large"
    began = time.perf_counter()
    write_store(store, samples)
    written = time.perf_counter() - began
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", READER, str(store)],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UserError(f"reading the store failed: {done.stderr.strip().splitlines()[-1]}")
    imported, opened, planned, peak, rate, batches = map(float, done.stdout.split())
    size = sum(file.stat().st_size for file in store.iterdir())
    shutil.rmtree(store)
    return {
        "store_gb": size / 1e9,
        "write_s": written,
        "open_s": opened,
        "open_and_plan_s": planned,
        "imports_mib": imported,
        "peak_mib": peak,
        "read_tokens_per_s": rate,
        "batches": batches,
    }


def medians(rates: Rates) -> dict[str, tuple[float, float]]:
    """name -> median (rows, tokens) a second over the rounds."""
    return {
        name: (statistics.median(r for r, _ in found), statistics.median(t for _, t in found))
        for name, found in rates.items()
    }


def table(rates: Rates, more: dict[str, float], reading: dict[str, float]) -> list[dict[str, str]]:
    """The rows of the result: what, measured, required."""
    rows, tokens = medians(rates)["prepare"]

    def ratio(name: str) -> str:
        found = [own[0] / alone[0] for own, alone in zip(rates["prepare"], rates[name])]
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    lines = [
        ("prepare", f"{rows:.0f} rows/s, {tokens / 1e6:.2f} M tokens/s", ""),
        *(
            (f"prepare / library alone, {how}", ratio(name), limit)
            for name, how, limit in (
                ("processes", "as many processes, without offsets", "0.9"),
                ("fast threads", "its threads, without offsets", "0.9"),
                ("threads", "its threads, with offsets", "0.9"),
            )
        ),
        ("prepare: peak memory, all processes", f"{more['peak_mib']:.0f} MiB", "2048 MiB"),
        ("rows known from before", f"{more['known_rows_per_s']:.0f} rows/s", ""),
        ("open the store", f"{reading['open_s']:.2f} s", ""),
        ("open and plan an epoch", f"{reading['open_and_plan_s']:.2f} s", "5 s"),
        (
            "open and plan: peak memory",
            f"{reading['peak_mib']:.0f} MiB, of which imports {reading['imports_mib']:.0f} MiB",
            "500 MiB",
        ),
        ("read batches", f"{reading['read_tokens_per_s'] / 1e6:.0f} M tokens/s", "20 M tokens/s"),
    ]
    return [{"what": what, "measured": value, "required": limit} for what, value, limit in lines]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_ext.bench data", description=__doc__)
    parser.add_argument("--rows", type=int, default=54_000, help="conversations to prepare")
    parser.add_argument("--store-rows", type=int, default=1_100_000, help="samples to read")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="where files may lie (about 10 GB)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/data_cpu.json"))
    args = parser.parse_args(argv)
    if min(args.rows // ROUNDS // BLOCK_ROWS, args.store_rows // 100, args.workers) < 1:
        raise UserError(f"at least {ROUNDS * BLOCK_ROWS} rows, 100 store rows and 1 worker")
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        rates, more = measure_prepare(Path(scratch), args.rows, args.workers)
        reading = measure_reading(Path(scratch), args.store_rows)
    middle = medians(rates)
    rows = table(rates, more, reading)
    million = 1.1e6 / middle["prepare"][0] / 60
    note = (
        f"{args.rows} conversations of {more['tokens_per_row']:.0f} tokens prepared (1.1 M would "
        f"take {million:.0f} min), {args.store_rows} samples read out of the page cache"
    )
    result = {"benchmark": "data", "note": note, "rates": rates, "prepare": more}
    save(args.out, {**result, "reading": reading, "rows": rows})
    for row in rows:
        limit = f"  (required: {row['required']})" if row["required"] else ""
        print(f"{row['what']}: {row['measured']}{limit}")
    print(note)
