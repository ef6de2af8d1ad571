"""Ten kills of random ranks at random moments, and the run is still the one nobody disturbed.

DFLASH_SOAK_KILLS=50 makes it longer.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time

import torch
from ranks import Killer, make_world, records, resumed, run_config, run_rank, short_part, start
from test_pipeline import assert_same_run, state_of
from tiny_targets import one_thread  # noqa: F401

from dflash_ext.checkpoint import checkpoints, read_progress
from dflash_ext.watch import FAILED

PART_STEPS = 6
"""What one part of the run may do before it is killed: a checkpoint or two, and a bit."""
KILLS = int(os.environ.get("DFLASH_SOAK_KILLS", "10"))


def test_kills_at_random_moments(tmp_path, monkeypatch):
    """Requirements 19 to 21: each sample once per epoch, the same bits, in the end no loose end."""
    world = make_world(tmp_path)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PART_STEPS", str(PART_STEPS))
    epochs = 2 * KILLS  # about four steps each: enough for every kill to fall before the last one
    shape = {"epochs": epochs, "batch": {"token_budget": 48}, "run": {"checkpoint_every": 2}}
    whole, soaked = tmp_path / "whole", tmp_path / "soaked"
    assert start(run_config(world, whole, 1, 2, **shape)) == 0

    draw = random.Random(0)
    kills, roles, slowest = 0, set(), 0.0
    while True:
        targets = draw.choice((1, 2))  # their number is free
        config = resumed(run_config(world, soaked, targets, 2, **shape))
        if kills < KILLS:
            # Not only between steps: the delay lands anywhere in capture, hand-over, sum and save.
            killer = Killer(soaked, draw.randrange(2 + targets), after=0)
            killer.steps, killer.delay = draw.choice((2, 3)), draw.random() * 0.05
            killer.start()
        code = start(config, short_part if kills < KILLS else run_rank)
        if kills == KILLS:
            assert code == 0
            break
        killer.join()
        assert code == FAILED
        slowest = max(slowest, time.monotonic() - killer.killed_at)
        kills += 1
        roles.add(json.loads((soaked / "ranks.json").read_text())[killer.rank]["role"][:6])
    print(f"{kills} kills, {kills + 1} starts, all ranks gone within {slowest:.1f} s")
    assert roles == {"target", "drafte"}
    assert slowest < 30

    last = read_progress(checkpoints(soaked / "checkpoints")[-1])
    uses = state_of(soaked, last.position)["uses"]
    assert torch.equal(uses, torch.full_like(uses, epochs))
    assert_same_run(whole, soaked, last.position)
    assert [r["step"] for r in records(soaked)] == [*range(1, last.position + 1)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(list((soaked / "checkpoints").iterdir())) == 2  # retained; no half-written one
