"""Rows, sources and short ways to prepare them, for the tests of `dflash_ext.prepare`."""

from __future__ import annotations

import json
import os
import time

from data_fixtures import CHATML, make_tokenizer

from dflash_ext.data.blocks import BLOCK_ROWS
from dflash_ext.data.prepared import prepare
from dflash_ext.data.rows import ChatOptions
from dflash_ext.data.store import TokenStore

TOKENIZER = make_tokenizer(CHATML)


OPTIONS = ChatOptions(max_length=128)


def chat(*turns, **more):
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, turns)], **more}


def write(path, rows):
    """JSON lines; a bytes row is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def make(path, *sources, tokenizer=TOKENIZER, options=OPTIONS, workers=1, **more):
    report = prepare(sources, tokenizer, path, options, workers=workers, **more)
    assert report.rows == report.trained + sum(report.skipped.values())
    assert set(report.skipped) == set(report.examples)
    return TokenStore.open(path), report


def texts(store):
    return [TOKENIZER.decode(store.sample(i)[0][store.sample(i)[1]]) for i in range(len(store))]


GOOD = [chat(f"question {i}", f"answer {i}") for i in range(9)]


def save_target(folder):
    """The name of a target with TOKENIZER and nothing else."""
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def prepare_and_hang(source, path, reached):
    """Prepare in a session of its own, commit every block, hang in the third; `reached` exists."""
    os.setsid()

    def hang(state):
        if state.rows == 3 * BLOCK_ROWS:
            reached.touch()
            time.sleep(900)

    prepare([source], TOKENIZER, path, OPTIONS, workers=2, progress=hang, commit_seconds=0.0)
