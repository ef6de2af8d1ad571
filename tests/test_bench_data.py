"""The data benchmark: its own arithmetic, and one small run of all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data_fixtures import CHATML, make_tokenizer

from dflash_ext.bench import conversations as conversations_module
from dflash_ext.bench import data
from dflash_ext.bench.conversations import conversations, write_conversations
from dflash_ext.bench.footprint import descendants, resident_bytes
from dflash_ext.data.store import TokenStore
from dflash_ext.errors import UserError

ROOT = Path(__file__).parents[1]


def test_conversations_are_distinct_and_of_the_size_promised(tmp_path):
    rows = list(conversations(300, seed=3))
    assert len({json.loads(row)["messages"][0]["content"] for row in rows}) > 290
    assert rows == list(conversations(300, seed=3))
    assert rows != list(conversations(300, seed=4))
    assert 5_500 < sum(map(len, rows)) / len(rows) < 8_000
    write_conversations(tmp_path / "d.jsonl", 300, seed=3)
    assert (tmp_path / "d.jsonl").read_text(encoding="utf-8") == "".join(r + "\n" for r in rows)


def test_a_written_store_is_a_real_one(tmp_path):
    data.write_store(tmp_path / "s", 3000)
    store = TokenStore.open(tmp_path / "s")
    assert 1300 < store.lengths.mean() < 1700
    ids, mask = store.sample(2500)
    assert mask.sum() == len(ids) - len(ids) // 5
    assert store.candidates[2500] == mask.sum() - 1


def test_footprint_counts_the_children():
    large = "x = bytearray(200 << 20); import time; print(flush=True); time.sleep(600)"
    # A parent that has this child alone: whom else this process has grows and shrinks meanwhile.
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, large], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert {parent.pid, child} <= set(descendants(os.getpid()))
        assert 200 << 20 < resident_bytes(parent.pid) < 300 << 20
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_the_whole_benchmark(tmp_path, monkeypatch, capsys):
    tokenizer = make_tokenizer(CHATML)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # restored behind the benchmark
    monkeypatch.setattr(data, "load_tokenizer", lambda *a, **k: tokenizer)
    monkeypatch.setattr(data, "ROUNDS", 1)
    monkeypatch.setitem(conversations_module.CHARACTERS, "assistant", 200)
    out = tmp_path / "data.json"
    began = time.perf_counter()
    data.main(["--rows", "600", "--store-rows", "2000", "--workers", "2", "--out", str(out)])
    seconds = time.perf_counter() - began
    result = json.loads(out.read_text())
    for found in result["rates"].values():
        for rows, tokens in found:
            assert rows > 256 / seconds
            assert tokens > rows
    assert result["reading"]["open_and_plan_s"] < seconds
    assert 50 < result["reading"]["peak_mib"] < 2000
    assert {"date", "commit", "cores"} <= result["environment"].keys()
    assert "library alone" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["data.json"]
    with pytest.raises(UserError, match="at least"):
        data.main(["--rows", "10"])
