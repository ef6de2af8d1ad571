"""Whose folder a run may use, and what it refuses to continue from."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from dflash_ext.config import BatchOptions, RunOptions, TopologyOptions, TrainConfig
from dflash_ext.errors import UserError
from dflash_ext.run import claim_run


def claim(**run):
    return claim_run(TrainConfig(run=RunOptions(**run)))


def used_run(folder: Path, *, when: int = 0) -> None:
    """A run's folder with one checkpoint, saved at the time `when`."""
    with claim(dir=folder):
        (folder / "checkpoints/step-1").mkdir(parents=True)
    os.utime(folder / "checkpoints", (when, when))


def mode(folder: Path) -> int:
    return folder.stat().st_mode & 0o777


def test_a_folder_that_is_no_run_is_left_as_it_is(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)
    mine.chmod(0o755)
    (mine / "results.json").write_text("years of work")
    for resume in ("never", "auto"):
        with (
            pytest.raises(UserError, match=r"mine is not empty and has no options.json"),
            claim(dir=mine, resume=resume),
        ):
            pass
    assert [p.name for p in mine.iterdir()] == ["results.json"]
    assert (mine / "results.json").read_text() == "years of work"
    assert mode(mine) == 0o755


def test_modes(tmp_path):
    """New folders are private; an empty one of the user's keeps its mode."""
    with claim(dir=tmp_path / "a/b") as (folder, checkpoint):
        assert (mode(folder), checkpoint) == (0o700, None)
        assert json.loads((folder / "options.json").read_text())["run"]["dir"] == str(folder)
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o755)
    with claim(dir=tmp_path / "c"):
        assert mode(tmp_path / "c") == 0o755


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_file_cannot_be_a_run_folder(tmp_path, inside):
    (tmp_path / "file").write_text("text")
    with (
        pytest.raises(UserError, match=r"cannot be a run folder|cannot be read"),
        claim(dir=tmp_path / "file" / inside),
    ):
        pass
    assert (tmp_path / "file").read_text() == "text"


def test_an_unwritable_folder_is_a_user_error(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):  # modes do not stop root, under which CI runs
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"\(Permission denied\): give"), claim(dir=tmp_path):
        pass


def test_lost_options_are_a_user_error(tmp_path):
    used_run(tmp_path / "run")
    (tmp_path / "run/options.json").unlink()
    with (
        pytest.raises(UserError, match=r"no options.json"),
        claim(dir=tmp_path / "run", resume="auto"),
    ):
        pass


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with claim() as (first, _), claim() as (second, _):
        assert (first, second) == (Path("runs/quickstart"), Path("runs/quickstart-2"))
        (first / "metrics.jsonl").write_text("of the first")
        for resume in ("never", "auto"):
            with (
                pytest.raises(UserError, match="in use by another run"),
                claim(dir=first, resume=resume),
            ):
                pass
        assert (first / "metrics.jsonl").read_text() == "of the first"
    with claim() as (again, _):  # neither left a checkpoint
        assert again == first


def test_default_names_skip_used_and_foreign_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    used_run(Path("runs/quickstart"))
    Path("runs/quickstart-2").mkdir()
    Path("runs/quickstart-2/notes.txt").write_text("mine")
    with claim() as (folder, checkpoint):
        assert (folder, checkpoint) == (Path("runs/quickstart-3"), None)


def test_resume_without_a_folder_takes_the_newest_run_of_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with claim(resume="auto") as (folder, checkpoint):
        assert (folder, checkpoint) == (Path("runs/quickstart"), None)
    used_run(Path("runs/quickstart"), when=100)
    used_run(Path("runs/mine"), when=300)
    used_run(Path("runs/other"), when=200)
    with claim(dir=Path("runs/failed")):  # has nothing to continue
        pass
    with claim(resume="auto") as (folder, checkpoint):
        assert folder == Path("runs/mine")
        assert checkpoint == folder / "checkpoints/step-1"
        with pytest.raises(UserError, match="runs/mine is in use"), claim(resume="auto"):
            pass


def test_what_may_change_when_a_run_goes_on(tmp_path):
    """The topology, and with it the micro-batches of each drafter; nothing that is trained on."""
    used_run(tmp_path)
    begun = TrainConfig(run=RunOptions(dir=tmp_path, resume="auto"))
    for free in (
        {"topology": TopologyOptions(targets=5, drafters=3)},
        {"batch": BatchOptions(accumulate=3)},
    ):
        with claim_run(dataclasses.replace(begun, **free)) as (_, checkpoint):
            assert checkpoint == tmp_path / "checkpoints/step-1"
    for fixed in (
        {"batch": BatchOptions(token_budget=1024)},
        {"epochs": 3},
        {"steps": 7},
    ):
        with (
            pytest.raises(UserError, match=f"has {next(iter(fixed))} "),
            claim_run(dataclasses.replace(begun, **fixed)),
        ):
            pass
