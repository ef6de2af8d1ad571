"""Decoding the prompts while training, to know which weights are the best: `eval.decode_every`.

One process decodes between two steps. With ranks, target 0 decodes in a thread of its own, beside
its captures, and rank 0 takes the answer whenever it comes: no drafter waits for it, and all
targets go on feeding. The weights travel as a file in the run folder, which all ranks share.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_ext.best import Best
from dflash_ext.checkpoint import Progress, Snapshot, host_copy, write_snapshot
from dflash_ext.comparison import Comparison, decoded_lengths
from dflash_ext.drafter import Drafter, DrafterConfig
from dflash_ext.errors import one_line
from dflash_ext.judge import Judge
from dflash_ext.monitor import Monitor
from dflash_ext.parallel import Replicas
from dflash_ext.ranks import Ranks
from dflash_ext.target import Target
from dflash_ext.watch import NoWatch, Watch

FOLDER = "decoding"
_POLL_SECONDS = 0.2


class Decoding(Protocol):
    """The drafters' side; of sharded drafters each has one, else rank 0."""

    def step(self, progress: Progress, replicas: Replicas, *, due: bool) -> None:
        """After every optimizer step. due: its weights are to be decoded with."""

    def finish(self, stopped: bool) -> None:
        """Training ends; if not on request, with the answers that are still to come."""


class Near:
    """The target is in this process."""

    def __init__(self, judge: Judge, target: Target, best: Best) -> None:
        self._judge, self._target, self._best = judge, target, best

    def step(self, progress: Progress, replicas: Replicas, *, due: bool) -> None:
        if due:
            drafter = replicas.whole()
            found = self._judge.during(progress.position, self._target, drafter)
            self._best.consider(progress, found, dict(drafter.named_parameters()))

    def finish(self, stopped: bool) -> None:
        pass


class Far:
    """The target is another rank: ask it, and look for its answer after every step.

    One question at a time, and one that waits: of steps that are due meanwhile the newest.
    """

    def __init__(self, ranks: Ranks, folder: Path | None, monitor: Monitor, best: Best) -> None:
        """folder: the run's on rank 0; None for the other drafters."""
        assert isinstance(ranks.watch, Watch)
        self._watch, self._run, self._monitor, self._best = ranks.watch, folder, monitor, best
        self._number = 0  # of the next question
        self._pending: _Weights | None = None
        self._waiting: _Weights | None = None
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._clear()

    def _clear(self) -> None:
        if self._run is not None:  # also of a run that was killed while it asked
            shutil.rmtree(self._run / FOLDER, ignore_errors=True)

    def step(self, progress: Progress, replicas: Replicas, *, due: bool) -> None:
        drafter = replicas.whole() if due else None  # of sharded drafters all bring their part
        if self._run is None:
            return
        if drafter is not None:
            if self._waiting is not None:
                self._monitor.say(
                    f"step {self._waiting.progress.position} is not decoded: target 0 has not done "
                    "with the one before (--eval.decode-every is small)"
                )
            weights = {name: host_copy(w) for name, w in drafter.named_parameters()}
            self._waiting = _Weights(progress, weights, drafter.config)
        self._collect()
        self._ask()

    def _ask(self) -> None:
        if self._pending is None and self._waiting is not None:
            self._pending, self._waiting = self._waiting, None
            arguments = (f"decode/{self._number}", self._pending)
            self._writing = threading.Thread(target=self._write, args=arguments, name="decoding")
            self._writing.start()
            self._number += 1

    def _write(self, key: str, asked: _Weights) -> None:
        assert self._run is not None
        try:
            snapshot = Snapshot(asked.weights, {}, asked.progress)
            path = write_snapshot(self._run / FOLDER, snapshot, keep=1).absolute()
            config = dataclasses.asdict(asked.config)
            self._watch.publish(key, {"path": str(path), "config": config})
        except BaseException as error:  # raised in the main thread instead
            self._error = error

    def _collect(self) -> None:
        if self._error is not None:
            raise self._error
        key = f"decoded/{self._number - 1}"
        if self._pending is None or not self._watch.published(key):
            return
        found, asked = cast("dict[str, float]", self._watch.read(key)), self._pending
        self._pending = None
        self._monitor.log("decoded", asked.progress.position, found)
        self._best.consider(asked.progress, found["accept_len"], asked.weights)

    def finish(self, stopped: bool) -> None:
        if self._run is None:  # nor may it wait for rank 0 in a sum meanwhile
            self._watch.wait_for("decode/end", "waiting for rank 0's last question")
            return
        while not stopped and (self._pending or self._waiting):
            self._ask()
            assert self._writing is not None
            self._writing.join()
            if self._error is None:
                key = f"decoded/{self._number - 1}"
                self._watch.wait_for(key, "waiting for target 0 to decode")
            self._collect()
        if self._writing is not None:
            self._writing.join()
        self._watch.publish("decode/end", stopped)
        self._clear()


@dataclass(frozen=True)
class _Weights:
    """A step's, on the host."""

    progress: Progress
    weights: dict[str, Tensor]
    config: DrafterConfig


class _Ended(Exception):
    """The run ended on request; nobody waits for the answer."""


class Answerer:
    """Target 0's side: a thread that decodes whatever rank 0 asks for."""

    def __init__(self, watch: Watch | NoWatch, target: Target, comparison: Comparison) -> None:
        target.vocabulary()  # made once, before there are two threads
        assert isinstance(watch, Watch)
        self._watch, self._target, self._comparison = watch, target, comparison
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    def _question(self, number: int) -> Mapping[str, Any] | None:
        """The next question; None if there will be no more."""
        while not self._watch.published(f"decode/{number}"):
            if self._watch.published("decode/end") or self._stopped.wait(_POLL_SECONDS):
                return None
        return cast("dict[str, Any]", self._watch.read(f"decode/{number}"))

    def _check(self, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise _Ended

    def _run(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.set_device(self._target.device)  # a thread's own
        try:
            for number in itertools.count():
                question = self._question(number)
                if question is None:
                    return
                self._watch.publish(f"decoded/{number}", self._answer(question))
        except _Ended:
            return
        except BaseException as error:  # nobody looks at this thread, so the run has to end
            self._give_up(error)

    def _answer(self, question: Mapping[str, Any]) -> dict[str, float]:
        config: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value  # JSON has no tuples
            for key, value in question["config"].items()
        }
        drafter = Drafter(DrafterConfig(**config))
        drafter.load_state_dict(load_file(Path(question["path"]) / "drafter.safetensors"))
        drafter.to(self._target.device)
        self._comparison.drafter("during", self._target, drafter, self._check)
        return decoded_lengths(self._comparison, "during", drafter.config.block_size)

    def _give_up(self, error: BaseException) -> None:
        rank, role = self._watch.rank, self._watch.roles[self._watch.rank]
        self._watch.give_up(f"rank {rank} ({role}), decoding for rank 0: {one_line(error)}")

    def finish(self) -> None:
        """Return when rank 0 wants no more answers and the thread has ended."""
        if self._watch.wait_for("decode/end", "waiting for rank 0's last question"):
            self._stopped.set()
        self._thread.join()
