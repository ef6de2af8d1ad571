"""Checkpoints: exact continuation, written under a temporary name and renamed (requirement 21).

A checkpoint directory `step-<position>` holds drafter.safetensors (the fp32 masters), optimizer.pt
(moments, counters and random state; read with weights_only, so nothing in it can run code) and
progress.json. Data and anchors need no state beside one integer: the position in the plan.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError
from dflash_ext.optim import DrafterOptimizer

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside weights and moments."""

    position: int
    """Steps of the loop done, skipped ones included: the data position, one integer."""
    seconds: float = 0.0
    """Training time so far."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Of the CPU and the run's own device; other GPUs are other programs' business."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in `folder`, oldest first; unfinished writes are not among them."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]))


def save_checkpoint(
    folder: Path, drafter: Drafter, optimizer: DrafterOptimizer, progress: Progress, *, keep: int
) -> Path:
    """Write `folder`/step-<position>, then drop all but the newest `keep` checkpoints.

    A kill at any moment leaves the previous checkpoints whole. `folder` belongs to one run, in
    which a position has one state, so an existing checkpoint of the position is kept as it is.
    Returns the directory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{progress.position}"
    if final.exists():
        return final
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)  # of a killed write
    temporary = folder / f".tmp-{final.name}"
    temporary.mkdir(mode=0o700)
    weights = {name: tensor.cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(weights, temporary / "drafter.safetensors")
    state = {"optimizer": optimizer.state_dict(), "random": _random_state(drafter.fc.weight.device)}
    torch.save(state, temporary / "optimizer.pt")
    (temporary / "progress.json").write_text(json.dumps(asdict(progress)))
    for path in temporary.iterdir():
        _sync(path)
    _sync(temporary)
    temporary.rename(final)
    _sync(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def load_checkpoint(path: Path, drafter: Drafter, optimizer: DrafterOptimizer) -> Progress:
    """Restore weights, moments, schedule, counters and random state in place; exact.

    UserError if the checkpoint is incomplete or belongs to a drafter or optimizer of another shape.
    """
    try:
        weights = load_file(path / "drafter.safetensors")
        state = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        progress = Progress(**json.loads((path / "progress.json").read_text()))
    except FileNotFoundError as error:
        raise UserError(f"checkpoint {path}: {error.filename} is missing") from None
    own = drafter.state_dict()
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
    drafter.load_state_dict(weights)
    torch.set_rng_state(state["random"]["cpu"])
    device = drafter.fc.weight.device
    if device.type == "cuda" and "cuda" in state["random"]:
        torch.cuda.set_rng_state(state["random"]["cuda"], device)
    return progress
