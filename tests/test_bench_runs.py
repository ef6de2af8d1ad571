"""`bench runs`: what of run folders is told, from records as training writes them."""

from __future__ import annotations

import json

import pytest

from dflash_ext.bench import runs
from dflash_ext.errors import UserError


def run_folder(path, lr=0.01, steps=4, again=(), validated=(2, 4), **elsewhere):
    path.mkdir()
    options = {"optim": {"lr": lr, "betas": [0.9, 0.95]}, "steps": steps, "run": {"dir": str(path)}}
    (path / "options.json").write_text(json.dumps(options | elsewhere))
    lines = []
    for step in range(1, steps + 1):
        for seconds in [9.0] * (step in again) + [1.5]:
            lines.append({"kind": "train", "step": step, "time": step, "seconds": seconds})
        if step in validated:
            found = {"accept_len": 1 + step / 10, "tree_accept_len@64": 1 + step / 5, "loss": 5.0}
            lines.append({"kind": "validation", "step": step, "time": step, **found})
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def test_curves_count_training_alone_and_each_step_once(tmp_path):
    points = runs.curve(run_folder(tmp_path / "a", again=(2,)))
    assert [p["step"] for p in points] == [2, 4]
    assert [p["train_seconds"] for p in points] == [3.0, 6.0]
    assert [p["accept_len"] for p in points] == [1.2, 1.4]


def test_runs_are_told_by_what_differs(tmp_path, capsys):
    first, second = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", lr=0.1, steps=6)
    out, picture = tmp_path / "runs.json", tmp_path / "runs.png"
    runs.main([str(first), str(second), "--json", str(out), "--png", str(picture)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["changes"] for row in rows] == [{}, {"optim.lr": 0.1, "steps": 6}]
    assert rows[0]["options"]["optim"]["lr"] == 0.01
    assert "options" not in rows[1]
    assert (rows[1]["steps"], rows[1]["accept_len"]) == (4, 1.4)
    assert picture.stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "| a | – | 4 | 6 | 1.40 | 1.80 | 5.00 |" in shown
    assert "| b | optim.lr 0.1, steps 6 | 4 |" in shown


def test_what_is_no_run_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is no run folder: expected options\.json"):
        runs.main([str(tmp_path / "empty")])
    with pytest.raises(UserError, match="Not a directory"):
        runs.main([__file__])
    torn = run_folder(tmp_path / "torn")
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    assert len(runs.curve(torn)) == 2
    early = run_folder(tmp_path / "early", validated=())
    with pytest.raises(UserError, match="has not validated yet"):
        runs.main([str(early)])


def test_runs_that_ended_early_are_compared_where_both_were(tmp_path, capsys):
    folders = [run_folder(tmp_path / name, validated=(2, 3, 4)) for name in "ab"]
    runs.main([*map(str, folders), "--until", "3"])
    assert capsys.readouterr().out.count("| – | 3 | 4 | 1.30 |") == 2  # 4.5 s
    with pytest.raises(UserError, match="has not validated yet"):
        runs.main([str(folders[0]), "--until", "1"])
