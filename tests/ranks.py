"""Runs of several ranks for tests: started as the command line does, in this process.

Ranks are forked from the launcher's server, which has imported everything once, so that a run of
eight processes costs seconds. Threads of the test may kill them meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

from tiny_targets import tiny_model, tiny_tokenizer

from dflash_ext.config import (
    BatchOptions,
    DataOptions,
    DrafterOptions,
    EvalOptions,
    LossOptions,
    OptimOptions,
    RunOptions,
    TargetOptions,
    TopologyOptions,
    TrainConfig,
)
from dflash_ext.launch import start_local, world_size

STEPS = 12


def make_world(root: Path, rows: int = 40) -> Path:
    """A tiny target directory and a chat file whose answers count upwards."""
    tiny_model("llama", head_dim=64).save_pretrained(root / "target")
    tiny_tokenizer(special=("user", "assistant", "<|reserved_0|>")).save_pretrained(root / "target")
    draw = random.Random(0)
    lines = []
    for _ in range(rows):
        a, n = draw.randrange(30), draw.randrange(4, 20)
        answer = " ".join(f"w{(a + i) % 60}" for i in range(n))
        turns = [("user", f"w{a} w{a + 1}"), ("assistant", answer)]
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    (root / "chat.jsonl").write_text("\n".join(lines) + "\n")
    (root / "prompts.txt").write_text("w1 w2\nw5 w6\n")
    return root


def run_config(world: Path, folder: Path, targets: int = 0, drafters: int = 0, **changes):
    """A short run on tiny shapes; 0 targets: one process."""
    batch = {"token_budget": 120, "max_documents": 6, "anchors_per_sequence": 4}
    batch |= {"anchor_budget": 24} | changes.pop("batch", {})
    run = {"dir": folder, "checkpoint_every": 3} | changes.pop("run", {})
    topology = {"stall_seconds": 60} | changes.pop("topology", {})
    if targets:
        topology |= {"targets": targets, "drafters": drafters}
    config = TrainConfig(
        target=TargetOptions(path=str(world / "target"), tap_ids=(0, 2)),
        data=DataOptions(train=str(world / "chat.jsonl"), held_out=6, max_length=64),
        drafter=DrafterOptions(num_layers=1, block_size=4),
        loss=LossOptions(chunk_rows=64),
        optim=OptimOptions(name="adamw", lr=0.01),
        batch=BatchOptions(**batch),
        eval=EvalOptions(prompts_per_set=0, every=5),
        run=RunOptions(**run),
        topology=TopologyOptions(**topology),
        steps=STEPS,
        device="cpu",
    )
    return dataclasses.replace(config, **changes)


def resumed(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))


def start(config: TrainConfig) -> int:
    """The exit code of a run of several ranks."""
    return start_local(config, world_size(config))


def records(folder: Path, kind: str = "train") -> list[dict]:
    """metrics.jsonl; of a step that a kill undid the last record counts."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [r for r in map(json.loads, lines) if r["kind"] == kind]
    return sorted({r["step"]: r for r in found}.values(), key=lambda r: r["step"])


class Killer(threading.Thread):
    """Sends a signal to one rank once the run has logged `after` steps."""

    def __init__(self, folder: Path, rank: int, after: int, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.folder, self.rank, self.after, self.number = folder, rank, after, number
        self.killed_at: float | None = None

    def run(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            file = self.folder / "metrics.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            done = [json.loads(line)["step"] for line in lines if '"train"' in line]
            if done and done[-1] >= self.after:
                ranks = json.loads((self.folder / "ranks.json").read_text())
                os.kill(ranks[self.rank]["pid"], self.number)
                self.killed_at = time.monotonic()
                return
            time.sleep(0.005)
