"""The headline's benchmark: its arithmetic against numbers by hand, and a small run of it all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_bench_pipeline import arguments, step

from dflash_ext.bench import headline, pipeline
from dflash_ext.bench.headline import (
    account,
    balance,
    blows_for,
    difference,
    expected,
    steps_to_kill,
)
from dflash_ext.bench.headline_table import headline_table
from dflash_ext.bench.pipeline_problem import Options, pace_of
from dflash_ext.bench.tables import DOCS
from dflash_ext.bench.witness import Blow, Launch, memory_of, span, start_of
from dflash_ext.config import TopologyOptions, eight_gpu_recipe
from dflash_ext.errors import UserError
from dflash_ext.plan import Schedule
from dflash_ext.topology import Topology
from dflash_ext.watch import INTERRUPTED

# A run of every piece in seconds.
SMALL = [
    *("--parts", "headline", "--shape", "tiny", "--device", "cpu", "--layers", "1"),
    *("--token-budget", "192", "--anchors-per-sequence", "4", "--anchor-budget", "64"),
    *("--block-size", "4", "--steps", "12", "--alone-batches", "4", "--loss-steps", "3"),
]


def test_a_step_of_n_to_m_is_m_batches_over_n_targets():
    """12 batches: 12 s of one target, 48 s of one drafter; 5:3 does 4 steps of 3 with them."""
    alone = {"target": 12.0, "drafter": 48.0, "ktok": 24.0}
    pace = expected(alone, 5, 3)
    assert pace == {"target": pytest.approx(2.4), "drafter": pytest.approx(16.0), "ktok": 24.0}
    # 20 s for the steps that should take 16.
    found = pace_of([step(i, 5.0) for i in range(12)], pace, 8, 4)
    assert found["slower_side"] == "drafter"
    assert found["share_of_slower_side"] == pytest.approx(0.8)


def test_one_step_is_as_long_as_its_largest_batch():
    assert balance([2.0, 2.0, 2.0, 3.0, 3.0, 3.0], 3) == pytest.approx(1.0)
    assert balance([1.0, 3.0, 4.0, 2.0], 2) == pytest.approx((2 + 3) / (3 + 4))
    assert balance([1.0, 3.0], 1) == pytest.approx(1.0)


def test_the_largest_difference_is_relative():
    assert difference([2.0, 4.04], [2.0, 4.0]) == pytest.approx(0.01)


@pytest.mark.parametrize(("N", "M"), [(5, 3), (2, 2), (3, 1), (1, 1), (7, 1), (2, 6)])
def test_nobody_is_done_when_the_target_is_killed(N, M):
    """Whatever is in the buffers by then, every target has a batch left to capture."""
    options = TopologyOptions(targets=N, drafters=M)
    drafter, target = blows_for(N, M)
    topology = Topology(N, M, shared=False)
    assert topology.role(drafter.rank) == f"drafter {M - 1}"
    batch = int(target.at.split()[-1])
    assert topology.role(target.rank) == f"target {batch % N}"
    assert batch == target.saved * M  # it follows the steps whose checkpoint is waited for
    given = batch + options.buffers * M
    left = range(given, steps_to_kill(options) * M)
    assert {i % N for i in left} == set(range(N))


def test_an_activity_is_meant_by_its_whole_number():
    blow = Blow(0, "step 3", 2)
    assert blow.meant("step 3: summing over the drafters")
    assert not blow.meant("step 30: summing over the drafters")
    assert not blow.meant("saving step 3")


def said(*notes: tuple[float, str], **more: list[float]) -> list[dict]:
    found = [{"time": 0.5, "pid": 1}, *({"time": t, "activity": what} for t, what in notes)]
    for note, value in zip(found[1:], more.get("reserved", [])):
        note["reserved_gib"] = value
    return found


def test_loaded_is_when_the_last_rank_that_counts_was():
    """Rank 2, a target that the first step does not need, loads for another minute."""
    loading, rehearsing = "loading the target", "rehearsing the largest batch"
    notes = {
        0: said((2, loading), (5, "making data"), (6, rehearsing), (9, "waiting for batch 0")),
        1: said((2, loading), (7, "making data"), (8, rehearsing), (10, "capturing batch 0")),
        2: said((2, loading), (67, "making data")),
    }
    assert span(notes[0], loading) == (2, 5)
    assert span(notes[2], rehearsing) is None
    assert start_of(notes, 1.0, 12.0, [0, 1]) == {
        "from_launch_to_first_step": 11.0,
        "from_launch_to_loaded": 6.0,
        "from_loaded_to_first_step": 5.0,
        "rehearsal": 3,
    }


def test_memory_is_each_rank_s_own_after_the_warm_up():
    """Two drafters, so the batches of steps 1 and 2 are 0 to 3."""
    steps = [(i, f"step {i}: summing over the drafters") for i in range(1, 5)]
    captures = [(i, f"capturing batch {i}") for i in range(6)]
    notes = {
        0: said(*steps, reserved=[5.0, 6.0, 10.0, 10.1]),
        1: said(*steps),  # without a device of its own
        2: said(*captures, reserved=[1.0, 2.0, 3.0, 3.5, 4.0, 4.0]),
    }
    found = memory_of(notes, 2, 2)
    assert [(row["rank"], row["role"]) for row in found] == [(0, "drafter"), (2, "target")]
    assert found[0]["spread"] == pytest.approx(0.01)
    assert (found[1]["spread"], found[1]["steps"]) == (0.0, 2)


def test_who_left_in_peace_is_told_from_who_failed():
    notes = {0: [{"pid": 1, "ended": 0}], 1: [{"pid": 1}, {"ended": 130}], 2: [{"pid": 1}], 3: []}
    launch = Launch(code=1, began=0.0, ended=1.0, struck=None, notes=notes)
    assert launch.left == [0]


@pytest.mark.parametrize("wrong", ["nothing", "uses", "position", "a step"])
def test_the_account_is_exact(tmp_path, wrong):
    """Six samples in three batches, two of them in the first step; step 1 was done again."""
    schedule = Schedule(
        np.full(6, 10), np.ones(6), seed=0, token_budget=20, max_documents=4, anchor_budget=9
    )
    uses, position, steps = torch.ones(6, dtype=torch.int32), 2, [1, 1, 2]
    if wrong == "uses":
        uses[3] = 2
    if wrong == "position":
        position = 3
    if wrong == "a step":
        steps = [1, 1]
    last = tmp_path / f"step-{position}"
    last.mkdir()
    torch.save({"uses": uses}, last / "optimizer.pt")
    (last / "progress.json").write_text(json.dumps({"position": position}))
    found = account(tmp_path, schedule, 2, steps)
    assert found["as_planned"] == (wrong == "nothing")
    assert (found["planned_steps"], found["steps_done_again"]) == (2, 1)


def test_the_recipe_is_taken_as_it_is(tmp_path):
    config, recipe = (
        headline.headline_config(Options(json=tmp_path / "j", targets=3, drafters=1), tmp_path),
        eight_gpu_recipe(),
    )
    for part in ("batch", "drafter", "loss", "optim"):
        assert getattr(config, part) == getattr(recipe, part)
    assert config.data.max_length == recipe.data.max_length
    assert (config.topology.targets, config.topology.drafters) == (3, 1)
    assert config.target.random_weights


def test_numbers_that_do_not_suffice_are_told_before_anything_runs(tmp_path):
    for changes, message in (
        ({"steps": 13}, r"--steps 13 are too few: 8 warm up, then the batches of 6 are compared"),
        ({"alone_batches": 2}, r"--alone-batches 2 are less than a step of --drafters 3"),
    ):
        with pytest.raises(UserError, match=message):
            headline.check_steps(Options(json=tmp_path / "j", **changes))


def test_pieces_are_kept_as_they_come_and_over_calls(tmp_path, monkeypatch):
    """A piece that fails costs the exit code and not what it had found, nor the others."""

    def pace(job, piece):
        piece["ktok_s"] = 7.0
        job.save()
        assert json.loads(file.read_text())["headline"]["pace"]["ktok_s"] == 7.0
        raise RuntimeError("out of luck")

    def call(*pieces: str, drafters: str = "3") -> tuple[int, dict]:
        more = [*SMALL[:-4], "--drafters", drafters, "--headline-pieces", *pieces]
        code = pipeline.main(arguments(tmp_path, *more, "--steps", "14"))
        return code, json.loads(file.read_text())["headline"]

    file = tmp_path / "found.json"
    monkeypatch.setitem(headline.PIECES, "pace", pace)
    monkeypatch.setitem(headline.PIECES, "losses", lambda job, piece: 0)
    monkeypatch.setitem(headline.PIECES, "kills", lambda job, piece: INTERRUPTED)
    code, found = call("pace", "losses")
    assert code == 1
    assert found["pace"]["error"] == "RuntimeError: out of luck"
    assert found["pace"]["ktok_s"] == 7.0
    assert found["losses"]["exit_code"] == 0
    assert "RuntimeError: out of luck" in headline_table(found)
    code, found = call("losses")
    assert (code, found["pace"]["ktok_s"]) == (0, 7.0)  # of the call before
    assert call("kills", "losses")[0] == INTERRUPTED
    code, found = call(drafters="2")  # another run: nothing of the former ones
    assert code == 0
    assert not {"alone", "pace", "kills", "losses"} & set(found)
    assert (tmp_path / "work" / "headline" / "store").exists()


def test_what_was_wanted_stands_beside_what_was_measured():
    alone = {"target_seconds_a_step": 0.66, "target_seconds_a_batch": 1.1, "best_split": "2:6"}
    alone |= {"drafter_seconds_a_step": 4.8, "drafter_seconds_a_batch": 4.8}
    pace = {"share_of_slower_side": 0.93, "slower_side": "drafter", "ktok_s": 28.5}
    pace |= {"seconds": {"from_launch_to_first_step": 41.0, "from_loaded_to_first_step": 4.5}}
    pace["seconds"] |= {"rehearsal": 1.25, "first_step": 3.0}
    pace["memory"] = [
        {"role": "target", "spread": 0.002},
        {"role": "drafter", "spread": 0.02},
        {"role": "drafter", "spread": 0.0},
    ]
    losses = {"split_losses": [6.0, 5.5], "same_blocks": True, "largest_relative_difference": 2e-4}
    launches = [
        {"killed": "drafter, rank 2", "at": "step 3", "seconds_until_all_ended": 4.0}
        | {"exit_code": 1, "exited_with_0": [], "resumed_from": 0},
        {"exit_code": 0, "resumed_from": 4},
    ]
    kills = {"samples": 90, "launches": launches, "as_planned": True, "planned_steps": 10}
    run = {"targets": 5, "drafters": 3, "shape": "qwen3-8b", "token_budget": 49152}
    run |= {"anchors_per_sequence": 512, "alone": alone | {"drafters_balance": 0.92}, "pace": pace}
    text = headline_table(run | {"kills": kills | {"uses_of_each_sample": [1]}, "losses": losses})
    assert text.startswith("5 targets and 3 drafters, qwen3-8b, batches of 49,152 tokens, up to 51")
    for line in (
        "| a step of the targets alone, s (a batch) | 0.660 (1.100) |  |",
        "| of their pace the drafters' unequal batches allow | 0.920 |  |",
        "| pace, of the drafters' alone | 0.930 (missed) | at least 0.950 |",
        "| reserved memory varies, targets | 0.20% (reached) | at most 1.00% |",
        "| reserved memory varies, drafters | 2.00% (missed) | at most 1.00% |",
        "| models loaded to first step, s | 4.5 (reached) | at most 5.0 |",
        "| the first step itself, s | 3.0 |  |",
        "largest relative difference from 1:1 (blocks: the same) | 2.0e-04 |  |",
        "90 samples, an epoch of 10 steps with two kills: uses of each [1], as planned.",
        "| drafter, rank 2 | step 3 | 4.0 | 1 | [] | 0 | – |",
    ):
        assert line in text
    assert "pipeline_h200x8_headline.json" in [name for name, *_ in DOCS]


def test_all_of_it_two_to_two(tmp_path):
    """As on a machine with GPUs, but for the sizes: nothing is left but the hardware."""
    assert pipeline.main(arguments(tmp_path, *SMALL, "--targets", "2", "--drafters", "2")) == 0
    found = json.loads((tmp_path / "found.json").read_text())["headline"]

    alone, pace, kills, losses = (found[name] for name in headline.PIECES)
    assert len(alone["drafter_tera"]) == alone["batches"] == 4
    assert alone["drafter_seconds_a_step"] == pytest.approx(alone["seconds"]["drafter"] / 4)
    assert 0.5 < alone["drafters_balance"] <= 1

    assert (pace["steps"], pace["data_over"]) == (12, "gloo")
    assert pace["share_of_slower_side"] > 0
    assert pace["bytes_a_token"] == 5 * 128 * 4  # five taps, in fp32
    assert pace["handed_over_gb_s"] == pytest.approx(pace["ktok_s"] * 2560 / 1e6)
    start = pace["seconds"]
    assert start["rehearsal"] > 0
    assert start["first_step"] > 0
    assert 0 < start["from_loaded_to_first_step"] < start["from_launch_to_first_step"]

    drafter, target, rest = kills["launches"]
    assert (drafter["killed"], drafter["at"]) == ("drafter, rank 1", "step 3")
    assert (target["killed"], target["at"]) == ("target, rank 2", "capturing batch 8")
    for row in (drafter, target):
        assert row["exit_code"] != 0
        assert row["seconds_until_all_ended"] < 60
        assert row["exited_with_0"] == row["still_there"] == []
    assert [row["resumed_from"] for row in kills["launches"]] == [0, 2, 4]
    assert rest["exit_code"] == 0
    assert kills["uses_of_each_sample"] == [1]
    assert kills["as_planned"]
    assert kills["steps"] == kills["planned_steps"] >= 8

    assert losses["same_blocks"]
    assert len(losses["split_losses"]) == 3
    assert losses["largest_relative_difference"] < 1e-5
    assert not list((tmp_path / "work").rglob("checkpoints"))  # gigabytes, on a GPU
    assert "two kills: uses of each [1], as planned" in headline_table(found)
    assert Path(tmp_path / "work/headline/run-notes/rank-3.jsonl").exists()
