"""Runs of several ranks on the CPU: exact, the same as one process, and whole at every end."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from busy_machine import PATIENCE_SECONDS
from compared import assert_same_run, state_of
from ranks import (
    STEPS,
    as_if_nccl,
    as_if_staged,
    begin,
    command_line,
    deaf,
    hostile,
    make_world,
    odd_drafter,
    records,
    resumed,
    run_config,
    run_rank,
    start,
)
from safetensors.torch import load_file
from strike import Strike, rank_table
from tiny_targets import one_thread  # noqa: F401
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

from dflash_ext import launch
from dflash_ext.checkpoint import checkpoints, read_progress
from dflash_ext.config import EvalOptions, LossOptions
from dflash_ext.launch import start_local
from dflash_ext.train import train
from dflash_ext.watch import INTERRUPTED


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        root = make_world(tmp_path_factory.mktemp("world"))
        patch.setenv("DFLASH_CACHE", str(root / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield root


def test_two_targets_and_a_drafter_are_one_process_to_the_bit(world, tmp_path):
    """By the command line, as a user starts it."""
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    options = EvalOptions(
        prompts=(str(world / "prompts.txt"),),
        prompts_per_set=1,
        max_new_tokens=4,
        every=5,
        decode_every=6,
    )
    same = {
        "batch": {"draws": 2},
        "eval": options,
        "data": "chat.jsonl",
    }  # validation falls between two draws
    assert train(run_config(world, alone, **same)) == 0
    command = [sys.executable, "-m", "dflash_ext.train", "cpu"]
    command += command_line(run_config(world, ranks, 2, 1, **same))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert_same_run(alone, ranks)
    assert "2 targets and 1 drafters over gloo" in ended.stdout
    assert ended.stdout.count("rehearsed the largest batch") == 1
    assert "Warning" not in ended.stderr
    for name in ("resolved.json", "results.json"):
        a, b = (json.loads((f / name).read_text()) for f in (alone, ranks))
        assert a.get("rows") == b.get("rows")
        assert a.get("drafter") == b.get("drafter")
    decoded = [
        {r["step"]: r["accept_len"] for r in records(folder, "decoded")}
        for folder in (alone, ranks)
    ]
    assert list(decoded[0]) == [6, 12]
    assert decoded[1].items() <= decoded[0].items()  # target 0 may leave out a step, not the last
    assert decoded[1][12] == decoded[0][12]
    for record in records(ranks):
        assert record["limit"] in ("target", "drafter", "transfer")
        for share in ("wait_target", "wait_drafter", "wait_transfer"):
            assert 0 <= record[share] <= 1.01
        assert record["ktok_s"] > 0
    exported = [load_file(f / "export/model.safetensors") for f in (alone, ranks)]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


def test_the_last_layer_travels_for_losses_that_read_the_target(world, tmp_path):
    alone, ranks, labels = (tmp_path / name for name in ("alone", "ranks", "labels"))
    soft = {"loss": LossOptions(kind="lk", chunk_rows=64)}
    assert train(run_config(world, alone, **soft)) == 0
    assert start(run_config(world, ranks, 1, 1, **soft)) == 0
    assert_same_run(alone, ranks)
    assert train(run_config(world, labels)) == 0
    assert records(alone)[0]["loss"] != records(labels)[0]["loss"]
    for kind in ("train", "validation"):
        for record in records(alone, kind):
            assert record["loss"] > 0
            assert record["accept_len"] >= 1


def test_five_to_three_uses_each_sample_once(world, tmp_path):
    """Eight processes, one epoch, with a last step in which drafters have unequal work."""
    folder = tmp_path / "run"
    config = run_config(world, folder, 5, 3, epochs=1, batch={"token_budget": 48, "accumulate": 2})
    assert start(config) == 0
    last = checkpoints(folder / "checkpoints")[-1]
    progress = read_progress(last)
    assert progress.course.end % 6  # otherwise the last step is nothing special
    uses = torch.load(last / "optimizer.pt", weights_only=True)["uses"]
    assert set(uses.tolist()) == {1}
    assert progress.position == len(records(folder)) == -(-progress.course.end // 6)
    table = rank_table(folder)
    assert [row["role"] for row in table][::7] == ["drafter 0", "target 4"]
    assert len({row["pid"] for row in table}) == 8


REFUSALS = {
    "zeros": r"rows that are all zero",
    "short": r"expected \d+ rows, got \d+",
    "nan": "not finite",
    "swapped": "in that order",
    "other tokens": "computed from other tokens",
    "taps": r"expected taps \[0, 2\], got \[2, 0\]",
    "dtype": r"expected torch.float32, got torch.bfloat16",
    "error": r"capturing batch 3 \(documents \[.*\]\): an unlucky",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_hostile_features_are_refused(world, tmp_path, kind, monkeypatch, capfd):
    """Requirements 8, 19: by the drafter, before any training; batch and documents are named."""
    monkeypatch.setenv("HOSTILE", kind)
    folder = tmp_path / "run"
    began = time.monotonic()
    assert start(run_config(world, folder, 2, 1), hostile) == 1
    assert time.monotonic() - began < PATIENCE_SECONDS
    error = capfd.readouterr().err
    assert re.search(REFUSALS[kind], error), error
    assert len(re.findall("^error: ", error, re.M)) == 1
    if kind != "error":
        assert re.search(r"rank 0 \(drafter 0\): batch 3 of target 1: ", error), error
        assert re.search(r"samples \[\d+, ", error) or kind == "dtype"
    else:
        assert "rank 2 (target 1)" in error
    trained = [r["step"] for r in records(folder)]
    # Batch 3 never; of an error that ends all at once the drafter may hear before it is there.
    assert trained == [1, 2, 3] or (kind == "error" and trained == [1, 2, 3][: len(trained)])


@pytest.mark.parametrize(("rank", "role"), [(3, "target 0"), (2, "drafter 2"), (0, "drafter 0")])
def test_death_of_any_rank_ends_all_and_the_run_goes_on(world, tmp_path, rank, role, capfd):
    folder = tmp_path / "run"
    config = run_config(world, folder, 3, 3)
    began = time.monotonic()
    assert begin(config, strike=Strike("step 5:", victim=rank)) == 1
    assert time.monotonic() - began < PATIENCE_SECONDS
    error = capfd.readouterr().err
    assert f"error: rank {rank} ({role}, pid" in error
    assert re.search(r"last seen .*(batch \d+|step \d+).*: died without a word", error), error
    table = rank_table(folder)
    assert not [row for row in table if Path(f"/proc/{row['pid']}").exists()]
    assert start(resumed(config)) == 0
    assert [r["step"] for r in records(folder)] == [*range(1, STEPS + 1)]


EACH_STEP = {"steps": 4, "run": {"checkpoint_every": 1, "keep_checkpoints": 4}}


@pytest.fixture(scope="module")
def six_micro_batches(world, tmp_path_factory):
    """One process, six micro-batches a step, validation too: what other splits must equal."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert train(run_config(world, folder, batch={"accumulate": 6}, **EACH_STEP)) == 0
    return folder


@pytest.mark.parametrize(
    ("targets", "drafters", "accumulate", "entry"),
    [(1, 2, 3, as_if_staged), (2, 3, 2, as_if_nccl), (1, 1, 6, run_rank)],
)
def test_gradients_and_metrics_do_not_depend_on_the_split(
    world, tmp_path, six_micro_batches, targets, drafters, accumulate, entry
):
    """Requirement 11 in fp32, over 1, 2 and 3 drafters and accumulations: whole runs agree.

    And over every way in which features travel, as far as a CPU can tell.
    """
    folder = tmp_path / "run"
    config = run_config(
        world, folder, targets, drafters, batch={"accumulate": accumulate}, **EACH_STEP
    )
    assert start(config, entry) == 0
    a, b = (state_of(f, 1) for f in (six_micro_batches, folder))
    moments = [name for name in a if name.endswith("exp_avg")]  # the first gradient, scaled
    assert len(moments) == 14
    for name in moments:
        assert (a[name] - b[name]).norm() <= 1e-5 * a[name].norm(), name
    for kind in ("train", "validation"):
        pairs = zip(records(six_micro_batches, kind), records(folder, kind), strict=True)
        for step, (expected, found) in enumerate(pairs):
            names = [
                n for n in expected if n.startswith(("loss", "weight", "blocks", "acc", "rec"))
            ]
            for name in ["grad_norm"] * (kind == "train") + names:
                # What AdamW makes of rounding errors grows from step to step.
                rtol = 1e-5 if step == 0 and kind == "train" else 1e-3
                assert found[name] == pytest.approx(expected[name], rel=rtol), (step, name)
    a, b = (state_of(f, 4) for f in (six_micro_batches, folder))
    assert torch.equal(a["uses"], b["uses"])
    for name in a:
        if a[name].is_floating_point():
            assert (a[name] - b[name]).norm() <= 1e-3 * a[name].norm() + 1e-7, name


def test_other_numbers_of_targets_and_drafters_continue_a_run(world, tmp_path):
    """N:M changes at every stop; what follows equals one uninterrupted process."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train(run_config(world, whole, batch={"accumulate": 6})) == 0
    for stop, targets, drafters in ((2, 2, 3), (4, 1, 2), (7, 0, 0), (STEPS, 3, 1)):
        batch = {"accumulate": 6 // max(1, drafters)}
        config = resumed(run_config(world, pieces, targets, drafters, batch=batch))
        strike = Strike(f"step {stop}:", signal.SIGINT) if stop < STEPS else None
        entry = as_if_nccl if targets else run_rank
        assert begin(config, entry, strike) == (INTERRUPTED if stop < STEPS else 0)
    a, b = state_of(whole), state_of(pieces)
    assert torch.equal(a["uses"], b["uses"])
    for name in a:
        if a[name].is_floating_point():
            assert (a[name] - b[name]).norm() <= 1e-3 * a[name].norm() + 1e-6, name
    for x, y in zip(records(whole), records(pieces), strict=True):
        assert x["blocks"] == y["blocks"]
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-3)


def test_resume_is_exact_to_the_bit_whatever_the_targets(world, tmp_path, capfd):
    """Requirement 20: SIGTERM, SIGKILL, and other numbers of targets; draws in between."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    same = {"batch": {"draws": 2}}
    assert start(run_config(world, whole, 1, 2, **same)) == 0
    for rank, targets, step, number, code, saved in (
        (0, 2, 2, signal.SIGTERM, INTERRUPTED, {2}),
        (2, 2, 5, signal.SIGKILL, 1, {2, 3}),  # 3's is written beside training
        (None, 1, 7, signal.SIGINT, INTERRUPTED, {7}),
    ):
        config = resumed(run_config(world, pieces, targets, 2, **same))
        strike = Strike(f"step {step}:", number, victim=rank)
        assert begin(config, strike=strike) == code, capfd.readouterr().err
        assert read_progress(checkpoints(pieces / "checkpoints")[-1]).position in saved
    assert start(resumed(run_config(world, pieces, 3, 2, **same))) == 0
    assert_same_run(whole, pieces)


def test_a_rank_that_heeds_nothing_is_ended(world, tmp_path, monkeypatch, capfd):
    """Torch's launcher would wait for it half a minute, and here for ever."""
    monkeypatch.setattr(launch, "_SHUTDOWN_SECONDS", 0.5)
    close = MultiprocessContext._close
    monkeypatch.setattr(
        MultiprocessContext, "_close", lambda self, death_sig, timeout: close(self, death_sig, 1e6)
    )
    began = time.monotonic()
    assert start(run_config(world, tmp_path / "run", 1, 1), deaf) == 1
    assert time.monotonic() - began < PATIENCE_SECONDS
    error = capfd.readouterr().err
    assert re.search(r"error: rank 1 \(target 0, pid .*died without a word", error), error


def test_a_stuck_rank_is_found_and_named(world, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOSTILE", "hang")
    config = run_config(world, tmp_path / "run", 2, 1)
    began = time.monotonic()
    assert start(config, hostile) == 1
    assert time.monotonic() - began < PATIENCE_SECONDS
    error = capfd.readouterr().err
    stuck = r"error: rank 2 \(target 1\): no progress for \d+ s while capturing batch 3 \(documents"
    assert re.search(stuck, error), error


def test_sharded_drafters_are_replicated_ones(world, tmp_path):
    """fully_shard over three drafters, unequal work in the last step, and both ways of going on."""
    same = {"epochs": 4, "batch": {"token_budget": 48}}
    sharded = same | {"topology": {"shard": True}}
    replicas, mixed = tmp_path / "replicas", tmp_path / "mixed"
    assert start(run_config(world, replicas, 1, 3, **same)) == 0
    for targets, options, stop in ((1, sharded, 2), (2, same, 6), (1, sharded, None)):
        strike = None if stop is None else Strike(f"step {stop}:", signal.SIGINT)
        code = begin(resumed(run_config(world, mixed, targets, 3, **options)), strike=strike)
        assert code == (0 if stop is None else INTERRUPTED)
    last = len(records(replicas))
    expected, found = state_of(replicas, last), state_of(mixed, last)
    assert found.keys() == expected.keys()
    assert set(found["uses"].tolist()) == {4}
    for name in expected:
        if expected[name].is_floating_point():
            assert found[name].shape == expected[name].shape
            error = (found[name] - expected[name]).norm()
            assert error <= 1e-4 * expected[name].norm() + 1e-6, name
    for kind in ("train", "validation"):
        for x, y in zip(records(replicas, kind), records(mixed, kind), strict=True):
            assert x["loss"] == pytest.approx(y["loss"], rel=1e-4)
            assert x["blocks"] == y["blocks"]
    assert (mixed / "export/model.safetensors").exists()


def test_drafters_decide_together_about_steps_without_anchors(world, tmp_path, monkeypatch):
    """Requirement 18: one drafter never has a block, in the second step neither has."""
    monkeypatch.setenv("HOSTILE", "no anchors")
    folder = tmp_path / "run"
    assert start(run_config(world, folder, 1, 2), odd_drafter) == 0
    steps = records(folder)
    assert [r.get("skipped") for r in steps] == [None, "zero weight", *[None] * (STEPS - 2)]
    assert (steps[-1]["optimizer_steps"], steps[-1]["skipped_zero"]) == (STEPS - 1, 1)


def test_drafters_decide_together_about_steps_that_are_not_finite(
    world, tmp_path, monkeypatch, capfd
):
    """Requirement 12: skipped by both, counted, given up after n, saved, the tensor named."""
    monkeypatch.setenv("HOSTILE", "nan")
    folder = tmp_path / "run"
    config = run_config(world, folder, 1, 2)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, max_nonfinite=3))
    assert start(config, odd_drafter) == 2
    assert re.search(
        r"error: .*gradient of fc.weight was not finite in 3 steps", capfd.readouterr().err
    )
    assert [r["optimizer_steps"] for r in records(folder)] == [1, 2, 2, 2]
    state = torch.load(folder / "checkpoints/step-5/optimizer.pt", weights_only=True)
    counters = state["optimizer"]["counters"]
    assert (counters["steps"], counters["skipped_nonfinite"]) == (2, 3)


def test_auto_times_both_sides_and_splits_the_ranks(world, tmp_path, monkeypatch):
    """And where a cluster has made this process a rank of its own: that is not theirs."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    config = run_config(world, folder, topology={"targets": "auto", "devices": 3}, steps=3)
    assert start(config) == 0
    roles = [row["role"] for row in rank_table(folder)]
    assert roles in (
        ["drafter 0", "target 0", "target 1"],
        ["drafter 0", "drafter 1", "target 0"],
    )
    assert len(records(folder)) == 3


def test_a_split_that_does_not_fit_the_ranks_is_an_error(world, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HOSTILE", "")
    config = run_config(world, tmp_path / "run", 2, 1)
    assert start_local(config, 2) == 2
    assert "2 targets and 1 drafters are 3 ranks, but 2 were started" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_bad_data_ends_all_ranks_with_its_message(world, tmp_path, capfd):
    """Requirement 19: no rank waits at a barrier for a preparation that has failed."""
    bad = tmp_path / "bad.jsonl"
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": ""}]
    bad.write_text(json.dumps({"messages": turns}) + "\n")
    config = run_config(world, tmp_path / "run", 2, 2)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=str(bad)))
    began = time.monotonic()
    assert start(config) == 2
    assert time.monotonic() - began < PATIENCE_SECONDS
    error = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert error == ["error: " + error[0][7:]]
    assert "0 trainable rows of 1" in error[0]
