"""`python -m dflash_ext.prepare`: what it prints, saves and refuses."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
from prepare_cases import GOOD, save_target, write

from dflash_ext import prepare as command
from dflash_ext.data.store import TokenStore
from dflash_ext.errors import UserError


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


def test_command_line(tmp_path, target, capsys):
    source = write(tmp_path / "d.jsonl", [*GOOD, b"{"])
    store = tmp_path / "s"
    arguments = [source, "--target", target, "--out", str(store), "--max-length", "128"]
    assert command.main([*arguments, "--held-out", "2"]) == 0
    printed = capsys.readouterr().out
    assert "10 rows: 9 trained (9 samples" in printed
    assert "rows/s" in printed
    report = json.loads((store / "report.json").read_text())
    assert (report["rows"], report["trained"], report["skipped"]) == (10, 9, {"not JSON": 1})
    assert (report["train"]["samples"], report["held_out"]["samples"]) == (7, 2)
    opened = TokenStore.open(store)
    total = report["train"]["tokens_per_epoch"] + report["held_out"]["tokens"]
    assert total == int(opened.lengths.sum()) == report["tokens"]
    share = sum(int(opened.sample(i)[1].sum()) for i in range(len(opened))) / total
    assert report["supervised_share"] == pytest.approx(share)
    assert (store / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert command.main(["--out", str(store), "--verify"]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    tokens = store / "tokens.i32"
    tokens.write_bytes(b"\xff" + tokens.read_bytes()[1:])
    with pytest.raises(UserError, match=r"tokens\.i32 fails its checksum"):
        command.main(["--out", str(store), "--verify"])
    with pytest.raises(UserError, match="no source was named"):
        command.main(["--out", str(store)])
    with pytest.raises(UserError, match="workers -1"):
        command.main([*arguments, "--workers", "-1"])
    with pytest.raises(UserError, match=r"tokenizer of '.*nowhere' cannot be loaded"):
        command.main([source, "--target", str(tmp_path / "nowhere"), "--out", str(store)])


def as_program(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of `python -m dflash_ext.prepare`, without a new Python."""
    monkeypatch.setattr(sys, "argv", ["prepare", *map(str, arguments)])
    monkeypatch.delitem(sys.modules, "dflash_ext.prepare")  # run_module warns of one that is there
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("dflash_ext.prepare", run_name="__main__", alter_sys=True)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "cannot read "),
        (["--max-length", "1"], "max_length 1: expected at least 2"),
        (["--supervise", "none"], "supervise 'none': expected one of all, last"),
        (["--date", "today"], "date 'today': expected one like 2026-01-01"),
        (["--template-kwargs", "{"], "template_kwargs '{' is no JSON"),
        (["--workers", "-1"], "workers -1: expected 0 or more"),
    ],
)
def test_mistakes_are_one_line_and_status_two(
    tmp_path, target, monkeypatch, capsys, arguments, message
):
    arguments = [tmp_path / "x.jsonl", "--target", target, "--out", tmp_path / "s", *arguments]
    code, out, error = as_program(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
