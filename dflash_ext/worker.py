"""One rank from its start to its end, whatever the end is.

A rank that fails says what it was, what it was doing and with which documents, tells the others and
ends at once: nobody waits for it. One that fails because another did leaves the word to that one.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from dflash_ext.config import TrainConfig
from dflash_ext.errors import FeatureError, UserError, one_line
from dflash_ext.launch import root_cause
from dflash_ext.probe import choose_topology
from dflash_ext.ranks import Ranks, join_world, leave_world, make_ranks, store_address
from dflash_ext.torch_api import share_device_memory
from dflash_ext.watch import FAILED, INTERRUPTED, SILENT_SECONDS, Failure, Watch, announce

_GRACE_SECONDS = 3.0


def as_rank(config: TrainConfig, train: Callable[[TrainConfig, Ranks], int]) -> int:
    """Run `train` as the rank that the launcher's environment says; returns its exit code.

    Does not return after a failure: the process ends with its exit code.
    """
    _set_environment()
    rank, device, nccl = join_world(config)
    size = dist.get_world_size()
    watch = Watch(
        store_address(), rank, ["rank"] * size, stall_seconds=config.topology.stall_seconds
    )
    try:
        topology = choose_topology(config, watch, rank, size, device)
        watch.set_roles([topology.role(r) for r in range(size)])
        ranks = make_ranks(config, topology, rank, device, nccl, watch)
        ranks.fail = partial(_end, watch, rank, size)
        code = train(config, ranks)
    except BaseException as error:  # the process ends here, with every rank told why
        _end(watch, rank, size, error)
        raise
    watch.finish()
    leave_world()
    return code


def _set_environment() -> None:
    """What must be said before the first use of a device, unless the user has said otherwise."""
    share_device_memory()
    # A batch on its way must not stand in one queue with the kernels of the batch before it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Ranks of one machine share its cores.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Said here too: a process forked from a warm one has read its environment long ago.
    share = max(1, len(os.sched_getaffinity(0)) // local)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", share)))


def _end(watch: Watch, rank: int, size: int, error: BaseException) -> None:
    """Say why, tell the others, end this process."""
    name = f"rank {rank} ({watch.roles[rank]})"
    code, trace = FAILED, False
    if isinstance(error, KeyboardInterrupt):
        message, code = "interrupted", INTERRUPTED
    elif isinstance(error, UserError):
        message, code = str(error) if rank == 0 else f"{name}: {error}", 2
    elif isinstance(error, FeatureError):
        message = f"{name}: {error}"
    else:
        # A broken connection is how a peer's death looks from here.
        first = root_cause(watch.store, rank, size, _GRACE_SECONDS)
        if first is None and _is_connection(error):
            first = root_cause(watch.store, rank, size, SILENT_SECONDS + 5)
        message = f"{name}, {watch.activity}: {one_line(error)}"
        if first is not None:
            _leave(first, rank)
        trace = not _is_connection(error)
    failure = watch.fail(message, code)
    _leave(failure, rank, error if failure.rank == rank and trace else None)


def _is_connection(error: BaseException) -> bool:
    text = str(error).lower()
    marks: Sequence[str] = ("connection", "gloo", "nccl", "timed out", "broken pipe", "socket")
    return isinstance(error, (RuntimeError, OSError)) and any(mark in text for mark in marks)


def _leave(failure: Failure, rank: int, error: BaseException | None = None) -> NoReturn:
    try:
        if error is not None:
            traceback.print_exception(error)
        announce(failure, rank)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also where nobody reads them any more
        os._exit(failure.code)  # not through destructors that wait for a peer
