"""Atomic, bounded, exact: what a checkpoint promises."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
import torch
from busy_machine import PATIENCE_SECONDS, wait_until
from test_drafter import make
from test_optim import NAMES, ONE, fill_gradients, snapshot

from dflash_ext import checkpoint
from dflash_ext.checkpoint import (
    CheckpointWriter,
    Progress,
    checkpoints,
    load_checkpoint,
    read_progress,
    save_checkpoint,
    take_snapshot,
    write_snapshot,
)
from dflash_ext.config import OptimOptions
from dflash_ext.errors import UserError
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.topology import Course


def pair(name="adamw", **changes):
    drafter = make(**changes)
    return drafter, DrafterOptimizer(drafter, OptimOptions(name=name), 20)


def advance(drafter, optimizer, steps):
    for step in steps:
        fill_gradients(drafter, seed=step)
        optimizer.step(ONE)


@pytest.mark.parametrize("name", NAMES)
def test_resume_is_exact_to_the_bit(tmp_path, name):
    drafter, optimizer = pair(name)
    advance(drafter, optimizer, range(5))
    optimizer.step(torch.zeros(2))
    torch.manual_seed(123)
    path = save_checkpoint(tmp_path, drafter, optimizer, Progress(6, 1.5), keep=2)
    drawn = torch.rand(3)
    advance(drafter, optimizer, range(5, 9))

    other, resumed = pair(name)
    torch.manual_seed(7)
    assert load_checkpoint(path, other, resumed) == (Progress(6, 1.5), None)
    assert torch.equal(torch.rand(3), drawn)  # random state
    assert (resumed.steps, resumed.skipped_zero) == (5, 1)
    advance(other, resumed, range(5, 9))
    for a, b in zip(snapshot(drafter, optimizer), snapshot(other, resumed)):
        assert torch.equal(a, b)
    assert resumed.state_dict()["counters"] == optimizer.state_dict()["counters"]


def test_retention_and_order(tmp_path):
    drafter, optimizer = pair()
    for position in (8, 9, 10, 11):  # 10 sorts before 9 as text
        save_checkpoint(tmp_path, drafter, optimizer, Progress(position), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-10", "step-11"]
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-11"]
    assert os.stat(tmp_path / "step-11").st_mode & 0o077 == 0


def test_a_kill_during_the_write_leaves_the_previous_one_whole(tmp_path, monkeypatch):
    drafter, optimizer = pair()
    save_checkpoint(tmp_path, drafter, optimizer, Progress(1), keep=1)

    class Killed(BaseException):
        pass

    def killed(*args, **kwargs):
        raise Killed

    for victim in ("save_file", "_sync"):  # before any byte, and just before the rename
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, victim, killed)
            with pytest.raises(Killed):
                save_checkpoint(tmp_path, drafter, optimizer, Progress(2), keep=1)
        assert [path.name for path in checkpoints(tmp_path)] == ["step-1"]
        load_checkpoint(tmp_path / "step-1", *pair())
    save_checkpoint(tmp_path, drafter, optimizer, Progress(2), keep=1)
    assert os.listdir(tmp_path) == ["step-2"]  # the leftover is gone too


def test_wrong_checkpoints_are_one_line_errors(tmp_path):
    drafter, optimizer = pair()
    path = save_checkpoint(tmp_path, drafter, optimizer, Progress(1), keep=1)
    with pytest.raises(UserError, match=r"gate_proj.weight is \(80, 48\), expected \(96, 48\)"):
        load_checkpoint(path, *pair(intermediate_size=96))
    with pytest.raises(UserError, match=r"q_proj\.bias is missing"):
        load_checkpoint(path, *pair(attention_bias=True))
    fewer = DrafterOptimizer(drafter, OptimOptions(name="adamw"), 20)
    fewer.optimizers.pop()
    with pytest.raises(UserError, match="another optimizer"):
        load_checkpoint(path, drafter, fewer)
    one_layer = {"num_layers": 1, "layer_types": ("full_attention",), "sliding_window": None}
    with pytest.raises(UserError, match="is not a parameter of this drafter"):
        load_checkpoint(path, *pair(**one_layer))
    broken = shutil.copytree(path, tmp_path / "step-5")
    (broken / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"optimizer.pt is missing"):
        load_checkpoint(broken, *pair())


def test_other_devices_random_state_is_left_alone(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a CPU run touched a GPU's random state")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    path = save_checkpoint(tmp_path, *pair(), Progress(1), keep=1)
    load_checkpoint(path, *pair())
    state = torch.load(path / "optimizer.pt", weights_only=True)
    assert state["random"].keys() == {"cpu"}


def test_a_checkpoint_cannot_run_code(tmp_path):
    drafter, optimizer = pair()
    path = save_checkpoint(tmp_path, drafter, optimizer, Progress(1), keep=1)

    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    torch.save({"optimizer": Payload()}, path / "optimizer.pt")
    with pytest.raises(Exception, match=r"weights_only|Weights only|Unsupported"):
        load_checkpoint(path, *pair())
    assert not (tmp_path / "owned").exists()


def test_a_snapshot_does_not_change_with_training(tmp_path):
    drafter, optimizer = pair()
    advance(drafter, optimizer, range(3))
    uses = torch.tensor([1, 2, 0], dtype=torch.int32)
    progress = Progress(3, 0.5, Course(2, 1, 1, 9, 1, 2))
    shot = take_snapshot(drafter, optimizer, progress, uses)
    before = snapshot(drafter, optimizer)
    uses += 1
    advance(drafter, optimizer, range(3, 6))
    path = write_snapshot(tmp_path, shot, keep=1)
    other, resumed = pair()
    assert load_checkpoint(path, other, resumed)[0] == read_progress(path) == progress
    assert load_checkpoint(path, other, resumed)[1].tolist() == [1, 2, 0]
    for a, b in zip(before, snapshot(other, resumed)):
        assert torch.equal(a, b)


def test_one_write_at_a_time_beside_training(tmp_path, monkeypatch):
    drafter, optimizer = pair()
    begun, go = threading.Event(), threading.Event()
    write, running = checkpoint.write_snapshot, []

    def slow(*args, **keywords):
        running.append(1)
        assert len(running) == 1
        begun.set()
        assert go.wait(PATIENCE_SECONDS)
        path = write(*args, **keywords)
        running.pop()
        return path

    monkeypatch.setattr(checkpoint, "write_snapshot", slow)
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.write(take_snapshot(drafter, optimizer, Progress(1)))
    assert begun.wait(PATIENCE_SECONDS)  # and this thread is free
    assert checkpoints(tmp_path) == []
    threading.Timer(0.2, go.set).start()
    writer.write(take_snapshot(drafter, optimizer, Progress(2)))  # waits for the first
    assert [path.name for path in checkpoints(tmp_path)][:1] == ["step-1"]
    writer.wait()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-1", "step-2"]


def test_a_failed_write_surfaces_at_the_next_call(tmp_path, monkeypatch):
    drafter, optimizer = pair()
    writer = CheckpointWriter(tmp_path, keep=1)

    def full(*args, **keywords):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        writer.write(take_snapshot(drafter, optimizer, Progress(1)))
        with pytest.raises(UserError, match=r"step-1 cannot be written: .* No space left .* make"):
            writer.write(take_snapshot(drafter, optimizer, Progress(2)))
    writer.write(take_snapshot(drafter, optimizer, Progress(3)))
    writer.wait()
    assert os.listdir(tmp_path) == ["step-3"]


def test_a_full_disk_is_told_at_the_next_step_and_no_fuller_for_it(tmp_path, monkeypatch):
    drafter, optimizer = pair()
    save_checkpoint(tmp_path, drafter, optimizer, Progress(1), keep=2)
    writer = CheckpointWriter(tmp_path, keep=2)

    def full(_state, path):
        path.write_bytes(b"half of it")
        raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    writer.write(take_snapshot(drafter, optimizer, Progress(2)))

    def go_on_training():
        wait_until(lambda: writer.check())  # which returns nothing, or raises

    with pytest.raises(UserError, match=r"step-2 cannot .* step-1 is whole: make room, then"):
        go_on_training()
    assert os.listdir(tmp_path) == ["step-1"]
