"""Entry points say in one line what their user can mend; results name the code they come from."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_ext import record
from dflash_ext.errors import FeatureError, UserError, parse_options, run_cli


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("block size 3: expected 4"), 2, "error: block size 3: expected 4\n"),
        (FeatureError("other tokens"), 1, "error: other tokens\n"),
        (
            PermissionError(13, "Permission denied", "a.json"),
            2,
            "error: a.json: Permission denied\n",
        ),
        (OSError(28, "No space left on device"), 2, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(error, code, line, capsys):
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as stop:
        run_cli(main)
    assert stop.value.code == code
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("error", [OSError("no file"), RuntimeError("a bug")])
def test_other_errors_keep_their_traceback(error):
    def main() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run_cli(main)
    assert raised.value is error


@dataclass(frozen=True)
class Inner:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 0:
            raise UserError(f"size {self.size}: expected 0 or more")


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    name: str = "a"

    def __post_init__(self) -> None:
        if not self.name:
            raise UserError("name is empty")


def test_what_options_have_against_their_values_is_said_in_their_words(capsys):
    assert parse_options(Outer, ["--inner.size", "3"]) == Outer(Inner(3))
    for arguments, message in (
        (["--inner.size", "-1"], "size -1: expected 0 or more"),
        (["--name", ""], "name is empty"),
    ):
        with pytest.raises(UserError, match=f"^{message}$"):
            parse_options(Outer, arguments, prog="it")
        assert capsys.readouterr() == ("", "")
    for arguments, code, stream, text in (
        (["--nmae", "b"], 2, "err", "--nmae"),
        (["--inner.size", "x"], 2, "err", "'x'"),
        (["--help"], 0, "out", "--inner.size"),
    ):
        with pytest.raises(SystemExit) as stop:
            parse_options(Outer, arguments, prog="it")
        assert stop.value.code == code
        assert getattr(capsys.readouterr(), stream).count(text) >= 1


def test_the_exit_code_is_the_entry_point_s():
    for returned, code in ((None, 0), (0, 0), (130, 130)):
        with pytest.raises(SystemExit) as stop:
            run_cli(lambda returned=returned: returned)
        assert stop.value.code == code


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """The package's place in a folder that is no checkout yet."""
    monkeypatch.delenv("DFLASH_COMMIT", raising=False)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "root" / "dflash_ext" / "record.py"))
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_the_commit_is_unknown_where_git_is_not_installed(checkout, monkeypatch, tmp_path):
    (checkout / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("git") is None
    assert record.environment()["commit"] == "unknown"
    record.save(tmp_path / "new" / "results.json", {"rows": []})
    assert (tmp_path / "new" / "results.json").is_file()


def test_the_commit_is_the_checkout_s_own(checkout, monkeypatch, tmp_path):
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text('#!/bin/sh\necho "$2 $3"\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(git.parent))
    (tmp_path / ".git").mkdir()  # a repository that merely lies around an installation
    assert record.environment()["commit"] == "unknown"
    (checkout / ".git").write_text("gitdir: elsewhere\n")  # a file, as in a second work tree
    assert record.environment()["commit"] == f"{checkout} describe"


def test_a_copied_tree_says_what_it_is_a_copy_of(checkout, monkeypatch):
    monkeypatch.setenv("DFLASH_COMMIT", "abc")
    assert record.environment()["commit"] == "abc"
