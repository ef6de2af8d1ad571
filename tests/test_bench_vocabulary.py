"""The vocabulary loss's benchmark: small on the CPU, and silent if a result is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from dflash_ext.bench import vocabulary
from dflash_ext.bench.anchors import WrongResult
from dflash_ext.bench.vocabulary import Problem, Size, check
from dflash_ext.errors import UserError

TINY = Size(rows=12, vocab=101, hidden=16, chunk_rows=6, slots=3)


def test_the_whole_command_on_the_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(vocabulary, "CPU_SIZE", TINY)
    kept = tmp_path / "r.json"
    vocabulary.main(["--device", "cpu", "--rounds", "1", "--json", str(kept)])
    result = json.loads(kept.read_text())
    assert result["environment"]["torch"] == torch.__version__
    loss, (operators,) = result["loss"], result["operators"]
    for name in ("ce", "dpace", "kl", "lk", "naive", "products"):
        assert loss[f"{name}_ms"] > 0
    assert loss["naive_over_ce"] == pytest.approx(loss["naive_ms"] / loss["ce_ms"], rel=1e-2)
    assert loss["gradient_distance"] < 1e-5
    rate = 6 * 101 * 4 / (operators["statistics_ms"] * 1e6)
    assert operators["statistics_gb_s"] == pytest.approx(rate, rel=1e-2)
    assert "ce_over_products" in capsys.readouterr().out


def test_a_wrong_gradient_is_never_reported(monkeypatch):
    problem = Problem(TINY, "cpu")
    assert check(problem) < 1e-5
    loss = Problem.loss

    def off(self):
        value = loss(self)
        self.hidden.grad.mul_(1.1)
        return value

    monkeypatch.setattr(Problem, "loss", off)
    with pytest.raises(WrongResult, match="gradient 1"):
        check(problem)


def test_bad_options(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch sees no GPU here"):
        vocabulary.main(["--device", "cuda"])
    with pytest.raises(UserError, match="--rounds 0"):
        vocabulary.main(["--device", "cpu", "--rounds", "0"])
