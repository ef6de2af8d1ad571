"""What must be the same in two runs."""

from __future__ import annotations

from pathlib import Path

import torch
from ranks import STEPS, records
from safetensors.torch import load_file


def state_of(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Every weight, moment, counter and sample count of a checkpoint."""
    last = folder / f"checkpoints/step-{step}"
    state = load_file(last / "drafter.safetensors")
    saved = torch.load(last / "optimizer.pt", weights_only=True)
    for i, inner in enumerate(saved["optimizer"]["optimizers"]):
        for p, moments in inner["state"].items():
            state |= {f"optimizer {i} {p} {name}": value for name, value in moments.items()}
    state["counters"] = torch.tensor(list(saved["optimizer"]["counters"].values()))
    return state | {"uses": saved["uses"], "random": saved["random"]["cpu"]}


def assert_same_run(a: Path, b: Path, step: int = STEPS) -> None:
    first, second = state_of(a, step), state_of(b, step)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    for kind in ("train", "validation"):
        for x, y in zip(records(a, kind), records(b, kind), strict=True):
            for name in ("loss", "accept_len", "grad_norm", "blocks"):
                assert x.get(name) == y.get(name), (kind, x["step"], name)
