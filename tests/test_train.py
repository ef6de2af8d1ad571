"""Whole runs on a tiny random target: files, continuation after every kind of stop, no compiler."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from busy_machine import PATIENCE_SECONDS
from safetensors.torch import load_file
from tiny_targets import one_thread, tiny_model, tiny_tokenizer  # noqa: F401

from dflash_ext import train as train_module
from dflash_ext.checkpoint import checkpoints
from dflash_ext.config import (
    BatchOptions,
    DataOptions,
    DrafterOptions,
    EvalOptions,
    LossOptions,
    OptimOptions,
    RunOptions,
    TargetOptions,
    TrainConfig,
)
from dflash_ext.errors import UserError
from dflash_ext.export import load_export
from dflash_ext.monitor import Monitor
from dflash_ext.pipeline import InProcess
from dflash_ext.target import Target
from dflash_ext.train import INTERRUPTED, train

STEPS = 20


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny target directory, a chat file whose answers count upwards, and a cache of its own."""
    root = tmp_path_factory.mktemp("world")
    tiny_model("llama", head_dim=64).save_pretrained(root / "target")
    tokenizer = tiny_tokenizer(special=("user", "assistant", "<|reserved_0|>"))
    tokenizer.save_pretrained(root / "target")
    draw = random.Random(0)
    rows = []
    for _ in range(40):
        a, n = draw.randrange(30), draw.randrange(4, 20)
        answer = " ".join(f"w{(a + i) % 60}" for i in range(n))
        turns = [("user", f"w{a} w{a + 1}"), ("assistant", answer)]
        rows.append({"messages": [{"role": r, "content": c} for r, c in turns]})
    (root / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "prompts.txt").write_text("w1 w2\nw5 w6\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_CACHE", str(root / "cache"))
        yield root


def config_of(world: Path, folder: Path, **changes) -> TrainConfig:
    config = TrainConfig(
        target=TargetOptions(path=str(world / "target"), tap_ids=(0, 2)),
        data=DataOptions(train=str(world / "chat.jsonl"), held_out=6, max_length=64),
        drafter=DrafterOptions(num_layers=1, block_size=4),
        loss=LossOptions(chunk_rows=64),
        optim=OptimOptions(name="muon", lr=0.01),
        batch=BatchOptions(
            token_budget=120, max_documents=6, anchors_per_sequence=4, anchor_budget=24, draws=2
        ),
        eval=EvalOptions(prompts_per_set=0, every=5),
        run=RunOptions(dir=folder, checkpoint_every=3),
        steps=STEPS,
        device="cpu",
    )
    return dataclasses.replace(config, **changes)


def resumed(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))


def records(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight and moment of the last checkpoint."""
    last = checkpoints(folder / "checkpoints")[-1]
    assert last.name == f"step-{STEPS}"
    state = load_file(last / "drafter.safetensors")
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)["optimizer"]
    for i, inner in enumerate(optimizer["optimizers"]):
        for p, moments in inner["state"].items():
            state |= {f"optimizer {i} {p} {name}": value for name, value in moments.items()}
    state["counters"] = torch.tensor(list(optimizer["counters"].values()))
    return state


def assert_bit_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def uninterrupted(world):
    """The final state and losses every other way of getting there must reproduce."""
    torch.set_num_threads(1)
    folder = world / "uninterrupted"
    assert train(config_of(world, folder)) == 0
    return final_state(folder), [r["loss"] for r in records(folder, "train")]


def test_a_whole_run(world, tmp_path, capsys):
    folder = tmp_path / "run"
    options = EvalOptions(
        prompts=(str(world / "prompts.txt"),),
        prompts_per_set=2,
        max_new_tokens=12,
        every=20,
        decode_every=30,
    )
    config = config_of(world, folder, eval=options, steps=60)
    assert train(config) == 0
    shown = capsys.readouterr().out
    for text in (
        "40 rows: 40 trained",
        "predicted peak",
        "rehearsed the largest batch",
        "exported",
    ):
        assert text in shown
    assert folder.stat().st_mode & 0o077 == 0

    steps, validation = records(folder, "train"), records(folder, "validation")
    assert [r["step"] for r in steps] == list(range(1, 61))
    assert [r["step"] for r in validation] == [20, 40, 60]
    for record in validation:
        assert 1 <= record["accept_len"] <= record["tree_accept_len@16"] <= 4
    losses = [r["loss"] for r in steps]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])  # counting upwards is learnable
    assert validation[-1]["accept_len"] > 1.1

    rows = json.loads((folder / "results.json").read_text())["rows"]
    generations = json.loads((folder / "generations.json").read_text())["results"]
    assert [row["prompts"] for row in rows] == ["prompts.txt", "held-out"]
    for row in rows:
        assert row["equals greedy"] == "2/2"
        assert min(row["before"], row["after"], row["prompt lookup"]) >= 1
        assert f"{row['after']:.2f}" in shown
    resolved = json.loads((folder / "resolved.json").read_text())
    assert resolved["drafter"]["target_layer_ids"] == [0, 2]
    assert resolved["final_tap_normed"] is False
    report = json.loads((folder / "prepared-train.json").read_text())
    assert report["rows"] == report["trained"] == 40

    decoded = records(folder, "decoded")
    assert [r["step"] for r in decoded] == [30, 60]
    assert all(r["accept_len/prompts.txt"] >= 1 for r in decoded)
    after = [g for found in generations["after"].values() for g in found]
    during = [g for found in generations["during"].values() for g in found]
    assert [g["accepted"] for g in during] == [g["accepted"] for g in after]  # the last step's
    best = max(decoded, key=lambda r: r["accept_len"])
    (kept,) = checkpoints(folder / "best")
    record = json.loads((kept / "record.json").read_text())
    assert record == {k: best[k] for k in ("step", "accept_len")} | {"measure": "decoded"}
    assert load_export(folder / "best/export").config.block_size == 4

    exported = load_export(folder / "export")
    trained = load_file(checkpoints(folder / "checkpoints")[-1] / "drafter.safetensors")
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, trained[name].bfloat16().float())


def test_kill_9_and_resume_equals_uninterrupted(world, tmp_path, uninterrupted):
    """Requirements 20, 21: killed in step 8, the last checkpoint at 6, mid-way in draws."""
    folder = tmp_path / "run"
    config = config_of(world, folder)
    script = (
        "import os, pickle, signal, sys, torch\n"
        "from dflash_ext.monitor import Monitor\n"
        "from dflash_ext.train import train\n"
        "torch.set_num_threads(1)\n"
        "log = Monitor.log\n"
        "def killing(self, kind, step, metrics):\n"
        "    if (kind, step) == ('train', 8):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    log(self, kind, step, metrics)\n"
        "Monitor.log = killing\n"
        "train(pickle.loads(sys.stdin.buffer.read()))\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(config),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(train_module.__file__).parents[1],
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert [c.name for c in checkpoints(folder / "checkpoints")] == ["step-3", "step-6"]
    assert train(resumed(config)) == 0
    assert_bit_equal(final_state(folder), uninterrupted[0])
    steps = [r["step"] for r in records(folder, "train")]
    assert steps == [*range(1, 8), *range(7, STEPS + 1)]  # 7 was lost with the kill, and repeated


def test_ctrl_c_saves_and_exits_cleanly(world, tmp_path, uninterrupted, monkeypatch, capsys):
    folder = tmp_path / "run"
    config = config_of(world, folder)
    log = Monitor.log

    def interrupting(self, kind, step, metrics):
        log(self, kind, step, metrics)
        if (kind, step) == ("train", 7):
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Monitor, "log", interrupting)
        assert train(config) == INTERRUPTED
    assert "interrupted: saved at step 7; --run.resume auto continues" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    assert [c.name for c in checkpoints(folder / "checkpoints")] == ["step-6", "step-7"]
    assert not (folder / "export").exists()
    assert train(resumed(config)) == 0
    assert "continuing from" in capsys.readouterr().out
    assert_bit_equal(final_state(folder), uninterrupted[0])
    assert [r["step"] for r in records(folder, "train")] == list(range(1, STEPS + 1))


def test_no_compiler_and_no_tracer(world, tmp_path, uninterrupted, monkeypatch):
    """Requirement 26: compiler and tracers out of order, then a thread that traces all along."""
    import torch.fx
    from torch.fx.experimental import proxy_tensor

    trace = torch.fx.Tracer.trace

    def refuse(*args, **kwargs):
        raise AssertionError("the run path must not compile or trace")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", refuse)
        patch.setattr(torch.fx.Tracer, "trace", refuse)
        patch.setattr(proxy_tensor, "make_fx", refuse)
        assert train(config_of(world, tmp_path / "refused")) == 0
    assert_bit_equal(final_state(tmp_path / "refused"), uninterrupted[0])

    assert torch.fx.Tracer.trace is trace
    begun, stop, traced = threading.Event(), threading.Event(), []

    def keep_tracing():
        module = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(20)])
        while not stop.is_set():
            traced.append(torch.fx.symbolic_trace(module))
            del traced[:-1]
            begun.set()

    thread = threading.Thread(target=keep_tracing)
    thread.start()
    assert begun.wait(PATIENCE_SECONDS)
    try:
        assert train(config_of(world, tmp_path / "beside")) == 0
    finally:
        stop.set()
        thread.join()
    assert_bit_equal(final_state(tmp_path / "beside"), uninterrupted[0])


def test_draws_share_one_capture_and_accumulation_adds_up(world, tmp_path, monkeypatch):
    captured = []
    features = Target.features

    def counting(self, batch):
        captured.append(batch.sample_ids)
        return features(self, batch)

    monkeypatch.setattr(Target, "features", counting)
    batch = config_of(world, tmp_path).batch
    run = RunOptions(dir=tmp_path / "run", checkpoint_every=100)
    config = config_of(
        world,
        tmp_path / "run",
        steps=6,
        batch=dataclasses.replace(batch, draws=3, accumulate=2),
        data=dataclasses.replace(config_of(world, tmp_path).data, held_out=0),
        run=run,
    )
    assert train(config) == 0
    rehearsal, *batches = captured
    assert len(batches) == 4  # 6 steps x 2 micro-batches / 3 draws, and no validation
    assert len({sample for batch in batches for sample in batch}) == sum(map(len, batches))
    assert len(rehearsal) == batch.max_documents
    assert all("accept_len" not in r for r in records(tmp_path / "run", "validation"))


def test_what_validation_waits_for_is_no_step_s(world, tmp_path, monkeypatch):
    take = InProcess.take

    def slowly(self, handover):
        if handover.kind == "held-out":
            self._capture += 100.0
        return take(self, handover)

    monkeypatch.setattr(InProcess, "take", slowly)
    assert train(config_of(world, tmp_path / "run", steps=6)) == 0
    assert len(records(tmp_path / "run", "validation")) == 2
    for record in records(tmp_path / "run", "train"):
        assert 0 <= record["share_target"] <= 1


def test_options_of_a_run_are_kept(world, tmp_path):
    folder = tmp_path / "run"
    config = config_of(world, folder, steps=2)
    assert train(config) == 0
    with pytest.raises(UserError, match=r"holds the checkpoints of a run: continue it with"):
        train(config)
    with pytest.raises(UserError, match=r"has seed 0, the options say 1"):
        train(resumed(dataclasses.replace(config, seed=1)))


def test_bad_data_stops_before_any_model_loads(world, tmp_path, monkeypatch):
    bad = tmp_path / "bad.jsonl"
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": ""}]
    bad.write_text(json.dumps({"messages": turns}) + "\n")
    monkeypatch.setattr(Target, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    data = DataOptions(train=str(bad), held_out=0, max_length=64)
    with pytest.raises(UserError, match="0 trainable rows of 1"):
        train(config_of(world, tmp_path / "run", data=data))
    target = TargetOptions(path=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"tokenizer of .*nowhere.* cannot be loaded"):
        train(config_of(world, tmp_path / "other", target=target))
