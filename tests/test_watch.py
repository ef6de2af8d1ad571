"""Nobody waits for a rank that is dead, stuck or has failed; the first failure is the one told."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
from busy_machine import PATIENCE_SECONDS, wait_until
from torch.distributed import TCPStore

from dflash_ext import watch as watch_module
from dflash_ext.errors import UserError
from dflash_ext.watch import (
    FAILED,
    INTERRUPTED,
    Beat,
    Failure,
    NoWatch,
    Watch,
    announce,
    connect,
    machine,
    read_beat,
    read_failure,
    report_failure,
    short_ids,
)

ROLES = ["drafter 0", "target 0"]


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(watch_module, "TICK_SECONDS", 0.02)
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


class Rank:
    """A watch whose process does not really end."""

    def __init__(self, store: TCPStore, rank: int, **limits) -> None:
        self.ended, self.code = threading.Event(), None
        limits = {"stall_seconds": 900, "silent_seconds": 900} | limits
        address = f"127.0.0.1:{store.port}"
        self.watch = Watch(address, rank, ROLES, end=self._end, **limits)

    def _end(self, code: int) -> None:
        self.code = self.code if self.ended.is_set() else code
        self.ended.set()
        self.watch._over = True  # as the end of a process would

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_) -> None:
        self.watch.finish()


def test_what_a_rank_does_is_known_to_all(store):
    with Rank(store, 0) as first, Rank(store, 1) as second:
        second.watch.doing("capturing batch 7", range(40))
        wait_until(lambda: "batch 7" in str(read_beat(store, 1)))
        beat = read_beat(store, 1)
        assert f"(target 0, pid {beat.pid}), last seen capturing batch 7 (documents [0, 1" in str(
            beat
        )
        assert "15, …])" in str(beat)
        threading.Timer(0.2, second.watch.publish, ["split", [5, 3]]).start()
        assert first.watch.wait_for("split", "waiting") == [5, 3]
        assert not first.ended.is_set()
        assert not second.ended.is_set()
    assert read_beat(store, 1).finished


def test_the_first_failure_ends_everybody(store, capsys):
    with Rank(store, 0) as first, Rank(store, 1) as second:
        own = second.watch.fail("rank 1 (target 0): an unlucky batch", 2)
        assert second.watch.fail("a consequence").message == own.message
        assert first.ended.wait(PATIENCE_SECONDS)
        assert first.code == 2
        assert not second.ended.is_set()  # it ends itself, after saying why
    assert "error: rank 1 (target 0): an unlucky batch" in capsys.readouterr().err
    assert read_failure(store) == Failure(1, "rank 1 (target 0): an unlucky batch", 2)
    assert report_failure(store, Failure(0, "too late", 1)).rank == 1


def test_a_rank_without_a_sign_of_life_is_named(store):
    with Rank(store, 0) as first:
        silent = Rank(store, 1)
        silent.watch.doing("capturing batch 3", [4, 9])
        wait_until(lambda: "batch 3" in str(read_beat(store, 1)))
        silent.watch._over = True  # the process is stopped or gone; it cannot say so
        first.watch.silent_seconds = 0.4
        assert first.ended.wait(PATIENCE_SECONDS)
        assert first.code == FAILED
        message = read_failure(store).message
        assert message.startswith("rank 1 (target 0, pid ")
        assert "last seen capturing batch 3 (documents [4, 9]): no sign of life for" in message
    silent.watch._over = True


def test_a_finished_rank_may_be_silent(store):
    with Rank(store, 0) as first:
        with Rank(store, 1):
            pass
        first.watch.silent_seconds = 0.1
        assert not first.ended.wait(0.5)


def test_a_stall_is_the_stuck_rank_s_not_the_waiting_one_s(store):
    limits = {"stall_seconds": 0.5}
    with Rank(store, 0, **limits) as first, Rank(store, 1, **limits) as second:
        first.watch.doing("waiting for batch 3 of target 0", [1], patience=1000)
        second.watch.doing("capturing batch 3", [1])
        assert second.ended.wait(PATIENCE_SECONDS)
        assert first.ended.wait(PATIENCE_SECONDS)
    expected = (
        r"rank 1 \(target 0\): no progress for \d+ s while capturing batch 3 \(documents \[1\]\)"
    )
    assert re.match(expected, read_failure(store).message)


def test_a_machine_that_stood_still_has_lost_nobody(store, monkeypatch):
    """Suspended for longer than anybody may be silent or do one thing."""
    limits, clock, stood = {"stall_seconds": 100, "silent_seconds": 100}, time.monotonic, [0.0]
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: clock() + stood[0])
    with Rank(store, 0, **limits) as first, Rank(store, 1, **limits) as second:
        first.watch.doing("waiting for batch 3 of target 0", [1], patience=2)
        second.watch.doing("capturing batch 3", [1])
        wait_until(lambda: read_beat(store, 0) and read_beat(store, 1))
        stood[0] = 1000.0
        counts = [read_beat(store, rank).count for rank in (0, 1)]
        wait_until(lambda: all(read_beat(store, r).count > counts[r] + 3 for r in (0, 1)))
        assert not first.ended.is_set()
        assert not second.ended.is_set()


def test_a_lost_store_ends_a_rank(capsys, monkeypatch):
    monkeypatch.setattr(watch_module, "TICK_SECONDS", 0.02)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Rank(store, 0)
    wait_until(partial(read_beat, store, 0))
    del store
    assert rank.ended.wait(PATIENCE_SECONDS)
    assert "is gone" in capsys.readouterr().err


def test_a_watch_that_fails_ends_its_rank(store, capsys, monkeypatch):
    """Also where nobody reads what it says: a rank that nobody watches could wait for ever."""

    def closed(*_):
        raise BrokenPipeError

    with Rank(store, 0) as first:
        monkeypatch.setattr(first.watch, "_beats", lambda: 1 / 0)
        monkeypatch.setattr(watch_module, "announce", closed)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        assert first.ended.wait(PATIENCE_SECONDS)
        assert first.code == FAILED


def test_a_process_of_another_container_is_not_missed(monkeypatch):
    """Machines may share a name; their process ids mean something else."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = Beat("target 0", gone.pid, machine())
    assert here.gone()
    assert not dataclasses.replace(here, finished=True).gone()
    monkeypatch.setattr(os, "readlink", lambda _: "pid:[another]")
    assert os.uname().nodename in machine()
    assert not here.gone()


def test_a_request_to_stop_is_heeded_or_ends_the_process(store):
    with Rank(store, 0) as first, Rank(store, 1) as second, first.watch.heeding_stop():
        connect(f"127.0.0.1:{store.port}").set("stop", "1")
        assert second.ended.wait(PATIENCE_SECONDS)
        assert second.code == INTERRUPTED
        assert first.watch.stop_requested.wait(PATIENCE_SECONDS)


def test_who_speaks(capsys, monkeypatch):
    """Once on each machine, by its first rank, or by the second if the first is what died."""
    failure = Failure(4, "rank 4 died", 1)
    for local, rank, speaks in ((0, 0, 1), (1, 1, 0), (1, 5, 1), (2, 6, 0), (4, 4, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        announce(failure, rank)
        assert capsys.readouterr().err == "error: rank 4 died\n" * speaks
    monkeypatch.setenv(watch_module.LAUNCHED, "1")
    announce(failure, 4)
    assert capsys.readouterr().err == ""


def test_one_process_watches_nobody():
    watch = NoWatch()
    watch.doing("anything", [1])
    watch.publish("key", 1)
    with watch.heeding_stop():
        pass
    watch.finish()
    with pytest.raises(UserError, match="waits for nobody"):
        watch.wait_for("key", "waiting")
    assert short_ids(range(3)) == "[0, 1, 2]"
