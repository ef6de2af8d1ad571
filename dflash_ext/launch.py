"""Starts the ranks of a run on this machine, and says why they ended.

torch's elastic launcher starts and supervises them: one that dies takes the others along. Without
GPUs, ranks are forked from a server process that has imported everything once. CUDA does not
survive a fork from a process that has as much as counted its devices, so with GPUs each rank starts
afresh.
`torchrun ... -m dflash_ext.train` starts the same ranks over several machines.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from types import FrameType

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dflash_ext.config import TrainConfig
from dflash_ext.errors import UserError
from dflash_ext.ranks import check_split
from dflash_ext.topology import Topology
from dflash_ext.watch import (
    INTERRUPTED,
    LAUNCHED,
    Failure,
    dead_peer,
    death_of,
    read_beat,
    read_failure,
    report_failure,
)

HOST = "127.0.0.1"
# What a launcher tells a rank. Ours may itself run where another one (torchrun, a cluster's) has
# said so: the ranks must not take that for their own.
_RANK_VARIABLE = re.compile(r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC_|ROLE_")
PRELOAD = ["dflash_ext.warm"]
_SHUTDOWN_SECONDS = 5.0
"""For ranks whose peer has failed to say so and end; there is nothing left to save."""


def world_size(config: TrainConfig) -> int:
    """Ranks that the options ask for; 1: one process. UserError if they leave it open."""
    options = config.topology
    if options.targets == "auto":
        size = options.devices or torch.cuda.device_count()
        if size < 2:
            raise UserError(
                "--targets auto needs at least 2 ranks and there are "
                f"{torch.cuda.device_count()} GPUs: say how many with --devices"
            )
        return size
    if options.targets is None or options.drafters is None:
        check_split(config, config.target.devices)
        return 1
    check_split(config, options.drafters + options.targets * config.target.devices)
    return Topology(options.targets, options.drafters, shared=False).world_size


Entry = Callable[[TrainConfig], int]


def run_rank(config: TrainConfig) -> int:
    """What every rank runs."""
    from dflash_ext.train import train  # not at the top: these import this module
    from dflash_ext.worker import as_rank

    return as_rank(config, train)


def _child(config: TrainConfig, environment: dict[str, str], entry: Entry) -> int:
    os.environ.update(environment)  # the fork server's own may be older
    return entry(config)


def start_local(config: TrainConfig, size: int, entry: Entry = run_rank) -> int:
    """Run `size` ranks on this machine to their end; returns the run's exit code.

    Why a run failed is printed here, once. `entry` runs in every rank, by default a whole run.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it shorter
    multiprocessing.set_forkserver_preload(PRELOAD)
    # Ours, so that it outlives the ranks; the launcher's own store is a tenant of it.
    store = _new_store()
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="static",
            rdzv_endpoint=f"{HOST}:{store.port}",
            rdzv_configs={"rank": 0, "timeout": 900},
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn" if torch.cuda.is_available() else "forkserver",
            local_addr=HOST,
        ),
        _child,
    )
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # nothing leaves it
    environment |= {k: v for k, v in os.environ.items() if not _RANK_VARIABLE.match(k)}
    environment[LAUNCHED] = "1"
    outcome: list[int | BaseException] = []

    def supervise() -> None:
        try:
            outcome.append(launch(config, environment, entry)[0])
        except BaseException as error:  # handed to the main thread
            outcome.append(error)

    # In a thread: the launcher would answer a signal by killing what this one lets save and end.
    thread = threading.Thread(target=supervise, name="launcher")
    failed = float("inf")
    with _Signals(store, size):
        thread.start()
        while thread.is_alive():
            thread.join(timeout=0.2)
            if read_failure(store) or dead_peer(store, range(size)):
                failed = min(failed, time.monotonic())
            # torch leaves the others half a minute to heed a SIGTERM: in a collective none can.
            if time.monotonic() - failed > _SHUTDOWN_SECONDS:
                _kill_unfinished(store, size)
    return _exit_code(outcome[0], store)


_used_ports: set[int] = set()


def _new_store() -> TCPStore:
    """A store on a port that this process has not used before.

    torch remembers by its port the store that others may be tenants of, also after that is gone.
    """
    passed_over = []
    while True:
        store = TCPStore(
            HOST,
            0,
            is_master=True,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
        )
        if store.port not in _used_ports:
            _used_ports.add(store.port)
            return store
        passed_over.append(store)  # kept open, so that the next one gets another port


class _Signals:
    """The first SIGINT or SIGTERM asks the ranks to save and end, the second one ends them."""

    def __init__(self, store: TCPStore, size: int) -> None:
        self._store, self._size = store, size
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self._store.check(["stop"]):
            _kill_unfinished(self._store, self._size)
        else:
            self._store.set("stop", "1")


def _kill_unfinished(store: TCPStore, size: int) -> None:
    """End all ranks of this machine that have not ended, whatever they are doing."""
    for rank in range(size):
        beat = read_beat(store, rank)
        if beat is not None and not beat.finished and not beat.gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)


def _exit_code(outcome: int | BaseException, store: TCPStore) -> int:
    if isinstance(outcome, int):
        return outcome
    failure, how = read_failure(store), ""
    if isinstance(outcome, ChildFailedError):
        rank, process = outcome.get_first_failure()
        if failure is None or (failure.died and process.exitcode < 0):
            # Of several dead ranks the launcher has seen the first; it ended the others itself.
            failure = death_of(store, rank)
        how = f" ({process.message})" if failure.rank == rank and process.exitcode < 0 else ""
    if failure is None:
        raise outcome
    kind = "" if failure.code == INTERRUPTED else "error: "
    print(f"{kind}{failure.message}{how}", flush=True, file=sys.stderr)
    return failure.code


def root_cause(store: TCPStore, own: int, size: int, seconds: float) -> Failure | None:
    """Another rank's failure, if one shows within `seconds`: ours may be its consequence."""
    end = time.monotonic() + seconds
    others = [rank for rank in range(size) if rank != own]
    while time.monotonic() < end:
        failure = read_failure(store)
        if failure is None and (dead := dead_peer(store, others)) is not None:
            failure = report_failure(store, dead)
        if failure is not None:
            return failure
        time.sleep(0.1)
    return None
