"""Keeps an eye on every rank of a run, so that none waits for one that will not come.

Each rank publishes what it is doing through a key-value store, from a thread of its own, and reads
what the others do. A rank that fails says so there and every other one ends with its message; one
that dies without a word, hangs or loses the store is found by its silence. Killed by a signal, a
rank leaves its last words in the store: role, batch and documents.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import DistStoreError, TCPStore

from dflash_ext.errors import UserError

TICK_SECONDS = 0.25
SILENT_SECONDS = 20.0
"""Without a sign of life from a rank's thread, after which the rank counts as dead."""
LAUNCHED = "DFLASH_LAUNCHED"
"""In the environment of ranks whose launcher says why they failed."""
FAILED, INTERRUPTED = 1, 130
"""Exit codes."""


@dataclass(frozen=True)
class Failure:
    """Why a run ended; the first one counts."""

    rank: int
    message: str
    code: int
    died: bool = False
    """The rank said nothing; others found its process gone."""


@dataclass
class Beat:
    """A rank's sign of life."""

    role: str
    pid: int
    host: str
    """`machine()` of its process."""
    activity: str = "starting"
    finished: bool = False
    count: int = 0

    def gone(self) -> bool:
        """Is it a process of this machine that has ended before its rank had finished?"""
        if self.finished or self.host != machine():
            return False
        try:
            with open(f"/proc/{self.pid}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    def __str__(self) -> str:
        return f"({self.role}, pid {self.pid}), last seen {self.activity}"


def machine() -> str:
    """Where a process id means something: containers may share a host's name, but not its ids."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


def short_ids(ids: Sequence[int]) -> str:
    """Document ids for a message; long lists are cut."""
    shown = ", ".join(map(str, ids[:16]))
    return f"[{shown}{', …' if len(ids) > 16 else ''}]"


def connect(address: str) -> TCPStore:
    """A client of its own for the store at host:port; blocking calls of others never hold it up."""
    host, port = address.rsplit(":", 1)
    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))


def read_failure(store: TCPStore) -> Failure | None:
    """The run's first failure, if there was one."""
    return Failure(**json.loads(store.get("failure"))) if store.check(["failure"]) else None


def report_failure(store: TCPStore, failure: Failure) -> Failure:
    """Make it the run's failure unless there is one already; returns the one that counts."""
    return Failure(**json.loads(store.compare_set("failure", "", json.dumps(asdict(failure)))))


def read_beat(store: TCPStore, rank: int) -> Beat | None:
    """The last sign of life of a rank."""
    key = f"beat/{rank}"
    return Beat(**json.loads(store.get(key))) if store.check([key]) else None


def death_of(store: TCPStore, rank: int) -> Failure:
    """The failure of a rank that ended without a word: who it was and what it was doing."""
    beat = read_beat(store, rank)
    name = f"rank {rank}" if beat is None else f"rank {rank} {beat}"
    return Failure(rank, f"{name}: died without a word", FAILED, died=True)


def dead_peer(store: TCPStore, ranks: Sequence[int]) -> Failure | None:
    """The failure of a rank of this machine whose process is gone, if there is one."""
    for rank in ranks:
        beat = read_beat(store, rank)
        if beat is not None and beat.gone():
            return death_of(store, rank)
    return None


def announce(failure: Failure, rank: int) -> None:
    """Print why the run ended: once on each machine, or by the launcher if that is ours."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    # The machine's second rank speaks for the first if that is the one that died.
    speaks = local == 0 or failure.rank == rank or (local == 1 and failure.rank == rank - 1)
    if speaks and LAUNCHED not in os.environ and failure.code != INTERRUPTED:
        print(f"error: {failure.message}", file=sys.stderr, flush=True)


class Watch:
    """One rank's part: says what it does, sees what the others do. Start it once per process."""

    def __init__(
        self,
        address: str,
        rank: int,
        roles: Sequence[str],
        *,
        stall_seconds: float,
        silent_seconds: float = SILENT_SECONDS,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """roles: of every rank. stall_seconds: how long one activity may last."""
        self.store, self.rank, self.roles = connect(address), rank, roles
        self.address, self.stall_seconds, self.silent_seconds = (
            address,
            stall_seconds,
            silent_seconds,
        )
        self._end = end
        self._beat = Beat(roles[rank], os.getpid(), machine())
        self._now = 0.0
        """Seconds that this watch has seen pass. Of a time in which the whole machine stood still
        (suspended, or taken from its guest) it sees one turn: nobody was silent or stuck then."""
        self._since, self._limit = self._now, float("inf")
        self._seen: dict[int, tuple[int, float]] = {}
        self._wake, self._over = threading.Event(), False
        self.stop_requested = threading.Event()
        """Set when the launcher asks for an orderly end."""
        self.orderly = False
        """Does the main thread heed `stop_requested`? Otherwise a request ends the process."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def doing(
        self, activity: str, documents: Sequence[int] | None = None, *, patience: float = 1.0
    ) -> None:
        """Say what this rank does from now on. It may take `patience` times `stall_seconds`.

        A rank that waits for another gives that one the first chance to be named: patience 2. Work
        whose length nobody knows (data preparation) has infinite patience.
        """
        text = activity if documents is None else f"{activity} (documents {short_ids(documents)})"
        self._beat.activity = text
        self._since, self._limit = self._now, self.stall_seconds * patience
        self._wake.set()

    def set_roles(self, roles: Sequence[str]) -> None:
        """Once it is known who does what."""
        self.roles, self._beat.role = roles, roles[self.rank]
        self._wake.set()

    @property
    def activity(self) -> str:
        return self._beat.activity

    def publish(self, key: str, value: object) -> None:
        """Give all ranks a JSON value under `key`."""
        self.store.set(f"value/{key}", json.dumps(value))

    def published(self, key: str) -> bool:
        return self.store.check([f"value/{key}"])

    def wait_for(self, key: str, activity: str) -> object:
        """The value that another rank will publish, however long that takes while it lives."""
        self.doing(activity, patience=float("inf"))
        while not self.published(key):
            time.sleep(0.05)
        self.doing("starting")
        return self.read(key)

    def read(self, key: str) -> object:
        """What was `published` under `key`."""
        return json.loads(self.store.get(f"value/{key}"))

    @contextlib.contextmanager
    def heeding_stop(self) -> Iterator[None]:
        """Inside, a request to stop is heeded by the main thread; outside it ends the process.

        Rank 0 has work after the block (export, evaluation) that a request should end; the other
        ranks have none, and a failure of theirs would end rank 0 while it saves.
        """
        self.orderly = True
        try:
            yield
        finally:
            self.orderly = self.rank != 0 or self.stop_requested.is_set()

    def fail(self, message: str, code: int = FAILED) -> Failure:
        """Report a failure of this rank; returns the failure that the run ends with."""
        return report_failure(self.store, Failure(self.rank, message, code))

    def finish(self) -> None:
        """This rank is done; its silence means nothing from now on."""
        self._over = True
        self._wake.set()
        self._thread.join(timeout=10)
        self._beat.finished = True
        with contextlib.suppress(DistStoreError, RuntimeError):  # the others may have gone already
            self._publish_beat()

    def _publish_beat(self) -> None:
        self._beat.count += 1
        self.store.set(f"beat/{self.rank}", json.dumps(asdict(self._beat)))

    def _run(self) -> None:
        published = looked = -float("inf")
        turned = time.monotonic()
        while not self._over:
            woken = self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            try:
                now = time.monotonic()
                self._now += min(now - turned, 4 * TICK_SECONDS)
                turned = now
                if woken or now - published >= 4 * TICK_SECONDS:
                    self._publish_beat()
                    published = now
                if now - looked >= TICK_SECONDS:  # however often the activity changes
                    self._look_around(self._now)
                    looked = now
            except (DistStoreError, RuntimeError, ConnectionError) as error:
                if not self._over:
                    # The store held the run together: without it nothing else can be known.
                    text = f"the store at {self.address} is gone ({error})".splitlines()[0]
                    self._leave(Failure(self.rank, text, FAILED))
                return
            except Exception as error:  # whatever it is, a rank that nobody watches must not go on
                text = f"rank {self.rank}: its watch failed ({type(error).__name__}: {error})"
                self._leave(Failure(self.rank, text, FAILED))
                return

    def _look_around(self, now: float) -> None:
        if self.store.check(["stop"]):
            self.stop_requested.set()
            if not self.orderly:
                self._leave(self.fail("interrupted", INTERRUPTED))
        failure = read_failure(self.store)
        if failure is not None:
            # The one that failed ends itself, with its own exit code, after saying why.
            if failure.rank != self.rank:
                self._leave(failure)
            return
        if now - self._since > self._limit:
            self.give_up(
                f"rank {self.rank} ({self.roles[self.rank]}): no progress for "
                f"{now - self._since:.0f} s while {self.activity}"
            )
        for rank, beat in self._beats():
            if beat.gone() and (now_beat := read_beat(self.store, rank)) and now_beat.gone():
                self._leave(report_failure(self.store, death_of(self.store, rank)))
            count, since = self._seen.get(rank, (-1, now))
            if beat.count != count or beat.finished:
                self._seen[rank] = (beat.count, now)
            elif now - since > self.silent_seconds:
                self.give_up(f"rank {rank} {beat}: no sign of life for {now - since:.0f} s")

    def _beats(self) -> list[tuple[int, Beat]]:
        """Of the other ranks, once every rank has begun to send them: one question for all."""
        keys = [f"beat/{rank}" for rank in range(len(self.roles))]
        if not self.store.check(keys):
            return []
        found = enumerate(self.store.multi_get(keys))
        return [(rank, Beat(**json.loads(beat))) for rank, beat in found if rank != self.rank]

    def give_up(self, message: str) -> None:
        """End the run and this process, from any thread."""
        self._leave(self.fail(message))

    def _leave(self, failure: Failure) -> None:
        """End this process: its main thread may be waiting for something that never comes."""
        try:
            announce(failure, self.rank)
        finally:  # also where nobody reads what it says
            self._end(failure.code)


class NoWatch:
    """Of a run of one process: nobody to wait for."""

    def __init__(self) -> None:
        self.stop_requested, self.orderly = threading.Event(), False
        self.activity = "starting"

    def doing(
        self, activity: str, documents: Sequence[int] | None = None, *, patience: float = 1.0
    ) -> None:
        pass

    def publish(self, key: str, value: object) -> None:
        pass

    def published(self, key: str) -> bool:
        return False

    def wait_for(self, key: str, activity: str) -> object:
        raise UserError(f"one process waits for nobody ({key})")

    @contextlib.contextmanager
    def heeding_stop(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        pass
