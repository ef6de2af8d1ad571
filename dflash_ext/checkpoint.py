"""Checkpoints: exact continuation, written under a temporary name and renamed (requirement 21).

A checkpoint directory `step-<position>` holds drafter.safetensors (the fp32 masters), optimizer.pt
(moments, counters and random state; read with weights_only, so nothing in it can run code) and
progress.json. Data and anchors need no state beside one integer: the position in the plan.

A checkpoint is whole, whoever wrote it: any number of drafters, sharded or not, continues from it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.parallel import placed_like
from dflash_ext.topology import Course

_NAME = re.compile(r"step-(\d+)")
RECORD = "record.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside weights and moments."""

    position: int
    """Steps of the loop done, skipped ones included: the data position, one integer."""
    seconds: float = 0.0
    """Training time so far."""
    course: Course | None = None
    """What a step consists of since the number of drafters last changed."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_state(drafter: Drafter) -> dict[str, Tensor]:
    """Of the CPU and the run's own device; other GPUs are other programs' business."""
    device = drafter.fc.weight.device
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in `folder`, oldest first; unfinished writes are not among them."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]))


@dataclass(frozen=True)
class Snapshot:
    """All of a checkpoint, in host memory and no longer changed by training."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    """Empty: weights only, to look at, not to go on from."""
    progress: Progress
    record: dict[str, Any] | None = None
    """What else is to stand beside it (RECORD)."""


def take_snapshot(
    drafter: Drafter, optimizer: DrafterOptimizer, progress: Progress, uses: Tensor | None = None
) -> Snapshot:
    """Copy what a checkpoint holds to the host. uses: int32, how often each sample was trained on.

    Sharded drafters all call this together: every one gets the whole.
    """
    weights = {name: host_copy(tensor) for name, tensor in optimizer.parameters.items()}
    state = {"optimizer": host_copies(optimizer.state_dict()), "random": _random_state(drafter)}
    if uses is not None:
        state["uses"] = uses.clone()
    return Snapshot(weights, state, progress)


def host_copy(tensor: Tensor) -> Tensor:
    """A whole, contiguous copy on the CPU, also of a sharded tensor."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    copied = whole.cpu()
    return copied.clone() if copied.data_ptr() == whole.data_ptr() else copied


def host_copies(value: Any) -> Any:
    """`host_copy` of every tensor in nested dicts and lists."""
    if isinstance(value, Tensor):
        return host_copy(value)
    if isinstance(value, dict):
        return {key: host_copies(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(host_copies(item) for item in value)
    return value


def write_snapshot(folder: Path, snapshot: Snapshot, *, keep: int) -> Path:
    """Write `folder`/step-<position>, then drop all but the newest `keep` checkpoints.

    A kill at any moment leaves the previous checkpoints whole. `folder` belongs to one run, in
    which a position has one state, so an existing checkpoint of the position is kept as it is.
    Returns the directory; UserError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{snapshot.progress.position}"
    if final.exists():
        return final
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)  # of a killed write
    temporary = folder / f".tmp-{final.name}"
    try:
        temporary.mkdir(mode=0o700)
        save_file(snapshot.weights, temporary / "drafter.safetensors")
        if snapshot.state:
            torch.save(snapshot.state, temporary / "optimizer.pt")
        (temporary / "progress.json").write_text(json.dumps(asdict(snapshot.progress)))
        if snapshot.record is not None:
            (temporary / RECORD).write_text(json.dumps(snapshot.record) + "\n")
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
    except Exception as error:  # a full disk is an OSError, a SafetensorError or a RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)  # its space is wanted
        last = [path.name for path in checkpoints(folder)[-1:]]
        raise UserError(
            f"checkpoint {final} cannot be written: {' '.join(str(error).split())}; "
            + (f"{last[0]} is whole: make room, then --run.resume auto" if last else "make room")
        ) from error
    temporary.rename(final)
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def save_checkpoint(
    folder: Path, drafter: Drafter, optimizer: DrafterOptimizer, progress: Progress, *, keep: int
) -> Path:
    """`take_snapshot` and `write_snapshot` in one go."""
    return write_snapshot(folder, take_snapshot(drafter, optimizer, progress), keep=keep)


class CheckpointWriter:
    """Writes snapshots beside training, one at a time; a failed write surfaces at the next call."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Begin to write; waits for the write before it, if that still goes on."""
        self.wait()
        # Not a daemon: whatever ends the program in an orderly way lets the write end first.
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_snapshot(self._folder, snapshot, keep=self._keep)
        except BaseException as error:  # raised in the main thread instead, by `wait`
            self._error = error

    def wait(self) -> None:
        """Return when everything is on disk; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong so far, without waiting."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def read_progress(path: Path) -> Progress:
    """`Progress` of a checkpoint. UserError if there is none."""
    file = path / "progress.json"
    try:
        values = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"checkpoint {path}: {file} is missing") from None
    course = values.pop("course", None)
    return Progress(**values, course=None if course is None else Course(**course))


def load_checkpoint(
    path: Path, drafter: Drafter, optimizer: DrafterOptimizer
) -> tuple[Progress, Tensor | None]:
    """Restore weights, moments, schedule, counters and random state in place; exact.

    Returns where the run stands and the uses of each sample. Of sharded drafters each reads its
    part of the same files. UserError if the checkpoint is incomplete or belongs to a drafter or
    optimizer of another shape.
    """
    try:
        weights = load_file(path / "drafter.safetensors")
        state = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"checkpoint {path}: {error.filename} is missing") from None
    progress = read_progress(path)
    own = optimizer.parameters
    for name, tensor in own.items():
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != tuple(tensor.shape):
            raise UserError(
                f"checkpoint {path}: {name} is {found}, expected {tuple(tensor.shape)}; resume "
                "with the configuration of the run, or start in another folder"
            )
    if extra := sorted(weights.keys() - own.keys()):
        raise UserError(f"checkpoint {path}: {extra[0]} is not a parameter of this drafter")
    try:
        optimizer.load_state_dict(state["optimizer"])
    except ValueError as error:
        raise UserError(f"checkpoint {path} is of another optimizer: {error}") from None
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(placed_like(weights[name], tensor))
    torch.set_rng_state(state["random"]["cpu"])
    device = drafter.fc.weight.device
    if device.type == "cuda" and "cuda" in state["random"]:
        torch.cuda.set_rng_state(state["random"]["cuda"], device)
    return progress, state.get("uses")
