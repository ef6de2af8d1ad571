"""Decoding on a target's rank: the numbers of one process, the best kept, nobody left waiting."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from busy_machine import PATIENCE_SECONDS, wait_until
from test_generate import drafter_for, prompts
from tiny_targets import one_thread, tiny_model  # noqa: F401

from dflash_ext.best import DECODED, Best, read_record
from dflash_ext.checkpoint import Progress, checkpoints
from dflash_ext.comparison import Comparison, DecodeOptions, decoded_lengths
from dflash_ext.monitor import Monitor
from dflash_ext.parallel import Replicas
from dflash_ext.questions import Answerer, Far
from dflash_ext.ranks import Ranks
from dflash_ext.target import Target
from dflash_ext.watch import Watch


class Board(Watch):
    """What ranks publish, without a store or a thread."""

    def __init__(self):
        self.values, self.rank, self.roles, self.gave_up = {}, 1, ["drafter 0", "target 0"], []

    def publish(self, key, value):
        self.values[key] = json.dumps(value)

    def published(self, key):
        return key in self.values

    def read(self, key):
        return json.loads(self.values[key])

    def wait_for(self, key, activity):
        wait_until(lambda: key in self.values)
        return self.read(key)

    def give_up(self, message):
        self.gave_up.append(message)


@pytest.fixture
def target() -> Target:
    return Target(tiny_model(num_hidden_layers=2))


def comparison() -> Comparison:
    return Comparison({"a": prompts(2), "b": prompts(1, seed=1)}, DecodeOptions(8, batch=2))


def far(board: Board, folder, monitor) -> tuple[Far, Best]:
    ranks = Ranks(device=torch.device("cpu"), watch=board)
    best = Best(ranks, folder, DECODED)
    return Far(ranks, folder, monitor, best), best


def test_answers_are_what_one_process_would_log(target, tmp_path):
    board, monitor = Board(), Monitor(tmp_path)
    asker, best = far(board, tmp_path, monitor)
    answerer, expected, weights = Answerer(board, target, comparison()), {}, {}
    for step in (5, 10, 15):
        drafter = drafter_for(target, block_size=4, seed=step)
        own = comparison()
        own.drafter("during", target, drafter)
        expected[step] = decoded_lengths(own, "during", 4)
        weights[step] = {name: w.detach().clone() for name, w in drafter.named_parameters()}
        replicas = Replicas(None, drafter)
        asker.step(Progress(step), replicas, due=True)
        while asker._pending is not None:
            asker.step(Progress(step + 1), replicas, due=False)
            time.sleep(0.01)
        for parameter in drafter.parameters():  # training goes on
            parameter.data.zero_()
    asker.finish(False)
    answerer.finish()
    monitor.close()
    best.wait()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = {r["step"]: {k: v for k, v in r.items() if "accept" in k} for r in lines}
    assert found == expected
    assert set(expected[5]) == {"accept_len", "accept_len/a", "accept_len/b"}
    step = read_record(tmp_path).step
    assert expected[step]["accept_len"] == max(e["accept_len"] for e in expected.values())
    assert not (tmp_path / "decoding").exists()
    assert [path.name for path in checkpoints(tmp_path / "best")] == [f"step-{step}"]


def test_a_slow_target_is_asked_for_the_newest_and_the_last_step(target, tmp_path, capsys):
    board, monitor = Board(), Monitor(tmp_path)
    asker, _ = far(board, tmp_path, monitor)
    replicas = Replicas(None, drafter_for(target, block_size=4))
    for step in (5, 10, 15):  # nobody answers yet
        asker.step(Progress(step), replicas, due=True)
    assert "step 10 is not decoded" in capsys.readouterr().out
    answerer = Answerer(board, target, comparison())
    asker.finish(False)
    answerer.finish()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 15]


def test_a_stopped_run_waits_for_no_answer(target, tmp_path, monkeypatch):
    board, begun = Board(), threading.Event()
    asker, _ = far(board, tmp_path, Monitor(tmp_path))
    check = Answerer._check

    def slowly(self, done, total):
        begun.set()
        wait_until(self._stopped.is_set)
        check(self, done, total)

    monkeypatch.setattr(Answerer, "_check", slowly)
    answerer = Answerer(board, target, comparison())
    asker.step(Progress(5), Replicas(None, drafter_for(target, block_size=4)), due=True)
    assert begun.wait(PATIENCE_SECONDS)
    asker.finish(True)
    answerer.finish()
    assert "decoded/0" not in board.values
    assert board.gave_up == []


def test_a_failure_ends_the_run_and_is_named(target, tmp_path):
    board = Board()
    answerer = Answerer(board, target, comparison())
    board.publish("decode/0", {"path": str(tmp_path / "nowhere"), "config": {}})
    answerer._thread.join(PATIENCE_SECONDS)
    (message,) = board.gave_up
    assert message.startswith("rank 1 (target 0), decoding for rank 0: ")
