"""Stored drafters of both layouts to read, break and convert."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import trained
from tiny_targets import tiny_model, tiny_tokenizer

from dflash_ext.export import save_export
from dflash_ext.target import Target

TAPS = (0, 2, 3)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A target directory `t`, the same drafter in both layouts: `zlab`, `speculators`."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("world")
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(root / "t")
    tiny_tokenizer().save_pretrained(root / "t")
    target = Target(model, tap_ids=TAPS, path=str(root / "t"))
    for layout in ("zlab", "speculators"):
        save_export(trained(target), root / layout, target=target, layout=layout)
    return root


@pytest.fixture(scope="module")
def target(world) -> Target:
    return Target.load(world / "t", tap_ids=TAPS)


def edited(world, tmp_path, change=lambda c: None, change_tensors=None, layout="zlab") -> Path:
    """A copy of the drafter in a layout with its config.json or its tensors changed."""
    folder = Path(shutil.copytree(world / layout, tmp_path / "edited"))
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    if change_tensors is not None:
        tensors = load_file(str(folder / "model.safetensors"))
        change_tensors(tensors)
        save_file(tensors, str(folder / "model.safetensors"))
    return folder


def arguments(layout: str, out: Path, target: Path | None = None) -> list[str]:
    named = [] if target is None else ["--target", str(target)]
    return ["--layout", layout, "--out", str(out), *named]
