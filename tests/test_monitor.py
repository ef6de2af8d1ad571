"""The display without a terminal, and what it records."""

from __future__ import annotations

import io
import json

import pytest

from dflash_ext import monitor as monitor_module
from dflash_ext.monitor import Monitor


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [100.0]
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_without_a_terminal(tmp_path, clock):
    stream = io.StringIO()
    monitor = Monitor(tmp_path, stream=stream)
    with monitor.stage("train") as stage:
        for done in range(1, 101):
            clock[0] += 0.5
            stage.update(done, 100, f"loss {done}")
    lines = stream.getvalue().splitlines()
    assert 5 <= len(lines) <= 7  # one at once, one every ten seconds, the last
    assert lines[0] == "train  1/100  2.00/s  loss 1  ETA 0:49"
    assert lines[-1] == "train  100/100  2.00/s  loss 100"


def test_rate_of_a_resumed_and_of_a_repeated_stage(tmp_path, clock):
    stream = io.StringIO()
    monitor = Monitor(tmp_path, stream=stream)
    with monitor.stage("s") as stage:
        clock[0] += 4
        stage.update(51, 52)
        clock[0] += 4
        stage.update(52, 52)
        stage.update(1, 2)
        clock[0] += 20
        stage.update(2, 2)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "s  51/52  0.25/s    ETA 0:04"
    assert lines[1].startswith("s  52/52  0.25/s")
    assert lines[-1].startswith("s  2/2  0.10/s")


def test_metrics_file_and_tensorboard(tmp_path):
    monitor = Monitor(tmp_path, tensorboard=True, stream=io.StringIO())
    monitor.log("train", 3, {"loss": 1.5, "skipped": "zero weight"})
    monitor.log("validation", 3, {"accept_len": 1.25})
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["kind"], first["step"], first["loss"]) == ("train", 3, 1.5)
    assert first["skipped"] == "zero weight"
    assert second["accept_len"] == 1.25
    monitor.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    again = Monitor(tmp_path, stream=io.StringIO())  # a resumed run appends
    again.log("train", 4, {})
    again.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_messages_and_table(tmp_path):
    stream = io.StringIO()
    monitor = Monitor(tmp_path, stream=stream)
    monitor.say("[not markup] " + "x" * 200)
    monitor.table("T", ["prompts", "after"], [["a" * 60, "1.25"]])
    shown = stream.getvalue()
    assert "[not markup] " + "x" * 200 in shown
    assert "a" * 60 in shown
    assert "1.25" in shown
