"""Signals out of the middle of a run, at an exact place however slow the machine is.

A thread of the test that watches a run and strikes is woken too late on a busy machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from busy_machine import wait_until

from dflash_ext.config import TrainConfig
from dflash_ext.launch import Entry
from dflash_ext.watch import NoWatch, Watch, read_beat


@dataclass(frozen=True)
class Strike:
    """A signal from inside a run, when a rank's watch hears what the rank does next.

    The rank goes on once the signal has taken effect, so the place is the same in every run.
    """

    at: str
    """How that activity begins: "step 5:" is behind the fifth step's gradients."""
    number: int = signal.SIGKILL
    victim: int | None = None
    """The rank that gets the signal; None: the launcher."""
    sender: int = 0
    times: int = 1
    """The first such activity, the second, ..."""
    delay: float | None = None
    """Strike so many seconds later, in a thread: anywhere in what follows. The entry must see to it
    that the run does not end before (`short_part`)."""
    launcher: int = field(default_factory=os.getpid)

    def into(self, doing: Callable[..., None], folder: Path) -> Callable[..., None]:
        """`doing`, a watch's, with the blow in it."""
        count = [0]

        def striking(watch: Watch | NoWatch, activity: str, *rest, **keywords) -> None:
            doing(watch, activity, *rest, **keywords)
            count[0] += activity.startswith(self.at)
            if activity.startswith(self.at) and count[0] == self.times:
                if self.delay is None:
                    self._hit(watch, folder)
                else:
                    threading.Timer(self.delay, self._hit, (watch, folder)).start()

        return striking

    def _hit(self, watch: Watch | NoWatch, folder: Path) -> None:
        if self.victim is None:
            os.kill(self.launcher, self.number)
            if self.launcher != os.getpid():
                wait_until(watch.stop_requested.is_set)
            return
        pid = rank_table(folder)[self.victim]["pid"]
        if self.number == signal.SIGKILL:
            # Its last words are what it has told so far: let it have come to say what it does.
            beat = partial(read_beat, watch.store, self.victim)
            wait_until(lambda: re.search(r"(batch|step) \d", str(beat())))
        os.kill(pid, self.number)
        if self.number == signal.SIGKILL and self.delay is None:
            # The run is over: the watch's thread ends this process as well. Until it does, this
            # rank could get through another step or two, and save them.
            wait_until(lambda: False)


def struck(strike: Strike, entry: Entry, config: TrainConfig) -> int:
    """A rank of a run that `strike` hits."""
    if os.environ["RANK"] == str(strike.sender):
        Watch.doing = strike.into(Watch.doing, config.run.dir)
    return entry(config)


def rank_table(folder: Path) -> list[dict]:
    """Who is which process of a run that has begun to train."""
    return json.loads((folder / "ranks.json").read_text())
