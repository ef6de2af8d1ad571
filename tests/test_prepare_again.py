"""Preparing again, after more data or an interruption: nothing is done twice, nothing is lost."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from busy_machine import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_cases import GOOD, chat, make, prepare_and_hang, texts, write

from dflash_ext.data import blocks, encode, pool
from dflash_ext.data.ledger import DUPLICATE, KNOWN, NEW, Ledger
from dflash_ext.data.prepared import DUPLICATE_REASON
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.data.store_files import FILES
from dflash_ext.errors import UserError


def test_extending_encodes_only_what_is_new(tmp_path, monkeypatch):
    source = write(tmp_path / "d.jsonl", [*GOOD[:5], b"{", GOOD[0]])
    first, _ = make(tmp_path / "s", source)
    identity = first.identity
    encoded = []
    real = encode.RowEncoder.encode
    monkeypatch.setattr(
        encode.RowEncoder, "encode", lambda self, rows: encoded.extend(rows) or real(self, rows)
    )
    again, report = make(tmp_path / "s", source)
    assert (encoded, report.rows, again.identity) == ([], 7, identity)
    # The file grew, a second one came: in front, with rows that are known, and one of another kind.
    write(tmp_path / "d.jsonl", [*GOOD[:5], b"{", GOOD[0], *GOOD[5:7]])
    pq.write_table(pa.Table.from_pylist([GOOD[7], GOOD[8]]), tmp_path / "a.parquet")
    more, report = make(tmp_path / "s", str(tmp_path / "a.parquet"), source)
    assert [row["messages"] for row in encoded] == [GOOD[i]["messages"] for i in (7, 8, 5, 6)]
    assert (report.rows, report.trained) == (11, 9)
    assert more.prefix(identity) == 5
    assert texts(more)[:5] == texts(first)
    spaced = json.dumps(GOOD[8], indent=None, separators=(" ,", " :")).encode()
    _, report = make(tmp_path / "s", write(tmp_path / "new.jsonl", [spaced, chat("x", "yes")]))
    assert (report.rows, report.trained) == (13, 10)  # a lone new file is enough
    assert report.skipped[DUPLICATE_REASON] == 2  # GOOD[0], and now other text of the same tokens


def test_order_and_place_of_rows_do_not_matter_for_what_is_known(tmp_path):
    make(tmp_path / "s", write(tmp_path / "a.jsonl", GOOD))
    _, report = make(tmp_path / "s", write(tmp_path / "b.jsonl", GOOD[::-1]))
    assert (report.rows, report.trained) == (9, 9)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 12), st.integers(1, 4))
def test_a_ledger_finds_exactly_the_occurrences_it_has_not_seen(keys, before, step):
    """However reading is cut into calls, a row is new once and a duplicate after that."""
    logged = np.array(keys[:before], dtype=np.uint64)
    ledger = Ledger(logged, np.zeros(0, dtype=np.uint64))
    found = []
    for i in range(0, len(keys), step):
        found += ledger.classify(np.array(keys[i : i + step], dtype=np.uint64))
    expected = [KNOWN] * min(before, len(keys))
    for i in range(before, len(keys)):
        expected.append(DUPLICATE if keys[i] in keys[:i] else NEW)
    assert found == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_prepare_continues(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 4)
    rows = [chat(f"q {i}", f"a {i}") for i in range(40)] + [GOOD[0], GOOD[0], b"{"]
    rows[7] = rows[3]
    source = write(tmp_path / "d.jsonl", rows)
    whole, report = make(tmp_path / "whole", source)

    def stop(state):
        if state.rows >= 12:
            raise KeyboardInterrupt

    interruptions = 0
    while True:
        try:
            store, continued = make(tmp_path / "s", source, workers=workers, progress=stop)
            break
        except KeyboardInterrupt:
            interruptions += 1
            with pytest.raises(UserError, match=r"was never finished \(\d+ rows are done\)"):
                TokenStore.open(tmp_path / "s")
    assert interruptions == 3  # 12 rows each time, and then the last 7
    assert continued == report
    assert store.identity == whole.identity


@pytest.mark.parametrize("method", ["append_many", "log_rows", "commit"])
@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_interruption_in_the_middle_of_a_batch(tmp_path, method, when, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 3)
    source = write(tmp_path / "d.jsonl", [*GOOD, b"{", GOOD[0], chat("x", "y")])
    whole, report = make(tmp_path / "whole", source)
    real, calls = getattr(StoreWriter, method), 0

    def stop(self, *args, **options):
        nonlocal calls
        calls += 1
        if calls == when + (method == "commit"):  # the first makes the store
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(StoreWriter, method, stop)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "s", source, commit_seconds=0.0)
    store, continued = make(tmp_path / "s", source)
    assert (store.identity, continued) == (whole.identity, report)


@pytest.mark.parametrize("workers", [1, 2])
def test_damage_keeps_the_rows_before_it(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 100)
    rows = [chat(f"q {i}", os.urandom(20).hex()) for i in range(800)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(data)[:-5000])
    with pytest.raises(UserError, match=r"gz is damaged or cut short after row \d+") as caught:
        make(tmp_path / "s", str(path), workers=workers)
    read = int(str(caught.value).split("after row ")[1].split()[0])
    with pytest.raises(UserError, match=rf"was never finished \({read} rows are done\)"):
        TokenStore.open(tmp_path / "s")
    path.write_bytes(gzip.compress(data))
    store, report = make(tmp_path / "s", str(path))
    assert (len(store), report.rows) == (800, 800)


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 3)
    source = write(tmp_path / "d.jsonl", GOOD)
    real, calls = os.fsync, 0

    def full(descriptor):
        nonlocal calls
        calls += 1
        if calls > 24:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
        make(tmp_path / "s", source, commit_seconds=0.0)
    monkeypatch.setattr(os, "fsync", real)
    with pytest.raises(UserError, match=r"was never finished \([36] rows are done\)"):
        TokenStore.open(tmp_path / "s")
    store, report = make(tmp_path / "s", source)
    assert (len(store), report.rows) == (9, 9)


def test_an_unfinished_store_of_another_writer_is_not_taken_over(tmp_path):
    writer = StoreWriter(tmp_path / "s")
    writer.append([1, 2], [True, True])
    writer.commit()
    writer.release()
    with pytest.raises(UserError, match="was prepared otherwise"):
        make(tmp_path / "s", write(tmp_path / "d.jsonl", GOOD))


def session_of(leader):
    """Living processes of a session, told by its leader's id."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
                session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
            except (OSError, IndexError):
                continue
            if int(session) == leader and "State:\tZ" not in status:
                found.append(int(entry.name))
    return found


def test_killed_and_run_again(tmp_path, monkeypatch):
    """kill -9 loses at most what was not committed, leaves no process behind, and goes on."""
    count = 6 * blocks.BLOCK_ROWS
    source = write(tmp_path / "d.jsonl", [chat(f"q {i}", f"answer {i}") for i in range(count)])
    whole, report = make(tmp_path / "whole", source)
    store, reached = tmp_path / "s", tmp_path / "reached"
    # Out of the tests' warm server: a process that has imported everything already.
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=prepare_and_hang, args=(source, store, reached))
    process.start()
    wait_until(lambda: reached.exists() or not process.is_alive())
    assert process.is_alive()
    assert len(session_of(process.pid)) >= 4  # itself, its own server, two workers
    process.kill()
    process.join()
    done = json.loads((store / "index.json").read_text())["committed"]["rows"]
    assert done == 2 * blocks.BLOCK_ROWS
    wait_until(lambda: not session_of(process.pid))  # nobody outlives its parent
    encoded = []
    _, continued = make(store, source, progress=lambda state: encoded.append(state.rows))
    assert encoded[-1] == count - done
    assert continued == report
    for name in (*FILES, "index.json"):
        assert (store / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_dead_worker_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 4)
    source = write(tmp_path / "d.jsonl", [chat(f"q {i}", f"answer {i}") for i in range(100)])
    begun, Worker = [], pool._Worker
    monkeypatch.setattr(pool, "_Worker", lambda *args: begun.append(Worker(*args)) or begun[-1])

    def kill(state):
        os.kill(begun[0]._process.pid, signal.SIGKILL)

    with pytest.raises(UserError, match=r"^a worker process died \(exit code -9.*continues"):
        make(tmp_path / "s", source, workers=2, progress=kill)
    assert not any(worker._process.is_alive() for worker in begun)
    store, report = make(tmp_path / "s", source)
    assert (len(store), report.rows) == (100, 100)
