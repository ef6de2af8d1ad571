"""The pipeline's benchmark: its arithmetic against numbers by hand, and a small run of it."""

from __future__ import annotations

import json

import pytest

from dflash_ext.bench import pipeline
from dflash_ext.bench.__main__ import BENCHMARKS
from dflash_ext.bench.pipeline_table import pipeline_table
from dflash_ext.errors import UserError
from dflash_ext.watch import INTERRUPTED


def step(number: int, seconds: float, **more: float) -> dict:
    """A record of a step that took so long, of 2,000 tokens."""
    return {"time": 100 + number * seconds, "seconds": seconds, "ktok_s": 2 / seconds, **more}


def test_the_pace_is_that_of_the_same_batches():
    """5 steps warm up; batches 5 to 9 take the drafter 4 s alone and the pipeline 5 s."""
    steps = [step(i, 1.0, reserved_gib=10.0 + (i == 12) * 0.5) for i in range(20)]
    alone = {"target": 3.0, "drafter": 4.0, "ktok": 10.0}
    found = pipeline.pace_of(steps, alone, 5, 5)
    assert found["slower_side"] == "drafter"
    assert found["same_batches_seconds"] == pytest.approx(5.0)
    assert found["share_of_slower_side"] == pytest.approx(0.8)
    assert found["ktok_s"] == pytest.approx(2.0)
    assert found["share_over_all_steps"] == pytest.approx(0.8)
    memory = found["reserved_gib"]
    assert (memory["steps"], memory["spread"]) == (15, pytest.approx(0.05))


def test_both_parts_are_shown():
    steps = [step(i, 1.0, reserved_gib=10.0 + (i == 12) * 0.5) for i in range(20)]
    pace = pipeline.pace_of(steps, {"target": 3.0, "drafter": 4.0, "ktok": 10.0}, 5, 5)
    pair = {"shape": "tiny", "token_budget": 4096, "exit_code": 0} | pace
    text = pipeline_table({"one_to_one": pair})
    assert "One target, one drafter, tiny, batches of 4,096." in text
    assert "| 20 | 2.0 | 0.800 | 0.800 | drafter | – |" in text
    assert "| 5.00% | – |" in text
    used = {"seconds": 9.0, "steps": 21, "uses_of_each_sample": [2], "exit_code": 0}
    used |= {"first_loss": 6.25, "last_loss": 6.0}
    eight = {"samples": 90, "exit_code": 0, "cuda": used, "cpu": used, "accounting_equal": True}
    text = pipeline_table({"five_to_three": eight})
    assert (
        "90 samples of a tiny target. Batches, blocks and uses on both devices: the same." in text
    )
    assert "| cuda | 21 | 9 | [2] | 6.250 | 6.000 |" in text


def test_a_run_that_ended_early_says_what_it_can():
    alone = {"target": 3.0, "drafter": 4.0, "ktok": 10.0}
    assert pipeline.pace_of([step(i, 1.0) for i in range(3)], alone, 5, 5) == {"steps": 3}
    found = pipeline.pace_of([step(i, 1.0) for i in range(8)], alone, 5, 5)
    assert found["ktok_s"] == pytest.approx(2.0)
    assert "share_of_slower_side" not in found


def arguments(tmp_path, *more: str) -> list[str]:
    return ["--json", str(tmp_path / "found.json"), "--work", str(tmp_path / "work"), *more]


def test_a_part_that_fails_costs_the_exit_code_only(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(pipeline, "one_to_one", broken)
    monkeypatch.setattr(pipeline, "five_to_three", lambda *_: {"exit_code": 0, "samples": 7})
    assert pipeline.main(arguments(tmp_path)) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["one_to_one"] == {"exit_code": 1, "error": "RuntimeError: out of luck"}
    assert found["five_to_three"]["samples"] == 7
    assert "commit" in found["environment"]
    assert "pipeline" in BENCHMARKS


def test_an_interrupted_part_is_the_last_one(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "one_to_one", lambda *_: {"exit_code": INTERRUPTED})
    monkeypatch.setattr(pipeline, "five_to_three", lambda *_: pytest.fail("it was begun"))
    assert pipeline.main(arguments(tmp_path)) == INTERRUPTED
    assert json.loads((tmp_path / "found.json").read_text())["one_to_one"]["exit_code"] == 130


def test_too_few_steps_are_told_before_anything_runs(tmp_path):
    options = pipeline.Options(json=tmp_path / "found.json", steps=30)
    with pytest.raises(UserError, match=r"--steps 30 are too few: 20 warm up, then --alone-ba"):
        pipeline.one_to_one(options, tmp_path)


def test_one_to_one(tmp_path):
    """As on a machine with GPUs, but for the sizes."""
    small = ["--parts", "one_to_one", "--shape", "tiny", "--device", "cpu", "--layers", "1"]
    small += ["--token-budget", "192", "--anchors-per-sequence", "4", "--anchor-budget", "16"]
    small += ["--block-size", "4", "--steps", "26", "--alone-batches", "4"]
    assert pipeline.main(arguments(tmp_path, *small)) == 0
    found = json.loads((tmp_path / "found.json").read_text())["one_to_one"]
    assert (found["exit_code"], found["steps"]) == (0, 26)
    assert found["share_of_slower_side"] > 0
    assert len(found["seconds_of_steps"]) == 25
    assert found["alone_seconds"]["ktok"] <= 4 * 0.192
