"""Ten kills of random ranks at random moments, and the run is still the one nobody disturbed.

DFLASH_SOAK_KILLS=50 makes it longer.
"""

from __future__ import annotations

import os
import random
import signal
import time

import torch
from busy_machine import PATIENCE_SECONDS
from compared import assert_same_run, state_of
from ranks import begin, make_world, records, resumed, run_config, short_part, start
from strike import Strike, rank_table
from tiny_targets import one_thread  # noqa: F401

from dflash_ext.checkpoint import checkpoints, read_progress
from dflash_ext.watch import FAILED

PART_STEPS = 5
"""What one part of the run may do before it is killed: a checkpoint or two, and a bit."""
KILLS = int(os.environ.get("DFLASH_SOAK_KILLS", "10"))


def test_kills_at_random_moments(tmp_path, monkeypatch):
    """Requirements 19 to 21: each sample once per epoch, the same bits, in the end no loose end."""
    world = make_world(tmp_path)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PART_STEPS", str(PART_STEPS))
    # Of about four steps each: the parts, which do PART_STEPS at the most, never come to the end.
    epochs = 2 + KILLS * PART_STEPS // 4
    shape = {"epochs": epochs, "batch": {"token_budget": 48}, "run": {"checkpoint_every": 2}}
    whole, soaked = tmp_path / "whole", tmp_path / "soaked"
    assert start(run_config(world, whole, 1, 2, **shape)) == 0

    draw = random.Random(0)
    roles = set()
    for _ in range(KILLS):
        targets = draw.choice((1, 2))  # their number is free
        config = resumed(run_config(world, soaked, targets, 2, **shape))
        # Not only between steps: the delay lands anywhere in capture, hand-over, sum and save.
        places = [("step", 0), ("training on batch", 1), ("saving", 0), ("capturing batch", 2)]
        at, sender = draw.choice(places)
        strike = Strike(
            at,
            victim=draw.randrange(2 + targets),
            sender=sender,
            times=1 if at == "saving" else draw.choice((1, 3, 4)),
            delay=draw.random() * 0.05,
        )
        began = time.monotonic()
        assert begin(config, short_part, strike) == FAILED
        assert time.monotonic() - began < PATIENCE_SECONDS
        roles.add(rank_table(soaked)[strike.victim]["role"][:6])
    assert begin(resumed(run_config(world, soaked, 1, 2, **shape))) == 0
    assert roles == {"target", "drafte"}

    last = read_progress(checkpoints(soaked / "checkpoints")[-1])
    uses = state_of(soaked, last.position)["uses"]
    assert torch.equal(uses, torch.full_like(uses, epochs))
    assert_same_run(whole, soaked, last.position)
    assert [r["step"] for r in records(soaked)] == [*range(1, last.position + 1)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert len(list((soaked / "checkpoints").iterdir())) == 2  # retained; no half-written one
