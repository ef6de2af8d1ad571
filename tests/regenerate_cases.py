"""Prompts and short ways to have them answered, for the tests of `dflash_ext.regenerate`."""

from __future__ import annotations

import json

import pytest

from dflash_ext.data import endpoint as endpoint_module
from dflash_ext.data.from_endpoint import KEY_VARIABLE
from dflash_ext.regenerate import Options, regenerate


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(endpoint_module, "_FIRST_PAUSE", 0.01)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(folder, count=20):
    return write(folder / "p.jsonl", [{"messages": [user(f"w{i}")]} for i in range(count)])


def run(source, out, **options):
    options = {"model": "tiny" if "endpoint" in options else None, "max_tokens": 16, **options}
    return regenerate(Options(sources=(str(source),), out=out, **options), lambda *_: None)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers_of(path):
    return [row["messages"][-1]["content"] for row in rows_of(path)]
