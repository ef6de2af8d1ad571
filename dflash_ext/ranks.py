"""A process's place among the ranks of a run: its role, its device, its process groups.

Processes are started by torch's elastic launcher, by us (launch.py) or by torchrun; either way the
environment says which rank this is. The default group is gloo, on the CPU: it carries what hosts
tell each other (credits, headers), and a peer's death ends a call at once. Feature batches and
gradients go over NCCL where every rank has a GPU of its own, else over gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dflash_ext.config import TrainConfig
from dflash_ext.errors import UserError
from dflash_ext.run import resolve_device
from dflash_ext.topology import Topology, devices_of
from dflash_ext.watch import NoWatch, Watch

# While it moves a feature batch an NCCL kernel keeps multiprocessors from the other side's kernels,
# which may want all of them at once: a few blocks are fast enough (0.7 GB in some 10 ms).
_TRANSFER_BLOCKS = 4


def _raised(error: BaseException) -> Any:
    raise error


@dataclass
class Ranks:
    """This process among the others."""

    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    watch: Watch | NoWatch = field(default_factory=NoWatch)
    node_leader: bool = True
    """The first rank of its machine."""
    nccl: bool = False
    """Does the data go over NCCL?"""
    pairs: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)
    """(target, drafter) -> (gloo group, data group) of those two."""
    drafter_group: Any = None
    """Of all drafters; None if there is one."""
    fail: Callable[[BaseException], Any] = field(default=_raised)
    """End the run for an error of a helper thread, which the main thread may never see."""
    table: list[dict[str, Any]] = field(default_factory=list)
    """Of each rank: its role, host, process id and device, and what its data go over."""

    @property
    def drafter(self) -> int | None:
        return self.topology.drafter_of(self.rank)

    @property
    def target(self) -> int | None:
        return self.topology.target_of(self.rank)

    @property
    def staged(self) -> bool:
        """Do features pass through pinned memory, because gloo sends from the host only?"""
        return self.device.type == "cuda" and not self.nccl

    def helper(self, name: str) -> ThreadPoolExecutor:
        """A thread beside the main one, for work on this rank's device.

        Without its own word on the device, its first CUDA call would open a context on GPU 0.
        """

        def bind() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)

        return ThreadPoolExecutor(1, name, initializer=bind)

    @property
    def sum_device(self) -> torch.device:
        """Where whole numbers are summed over the drafters."""
        return self.device if self.nccl else torch.device("cpu")

    @property
    def role(self) -> str:
        return self.topology.role(self.rank)

    def describe(self) -> str:
        """For the log, after the device: how the ranks are arranged."""
        if self.topology.shared:
            return ""
        how = "NCCL" if self.nccl else "gloo"
        return f", {self.topology.targets} targets and {self.topology.drafters} drafters over {how}"

    @contextmanager
    def first_goes_first(self, key: str, activity: str) -> Iterator[None]:
        """Run the block on rank 0, then on the first rank of each machine, then on the others.

        For work whose result is cached: who comes later finds it done. It may take hours; a failure
        on one rank ends the others at once.
        """
        machine = os.environ.get("GROUP_RANK", "0")
        if not self.first:
            self.watch.wait_for(f"{key}/first", f"waiting for rank 0, {activity}")
            if not self.node_leader:
                self.watch.wait_for(f"{key}/{machine}", f"waiting for this machine, {activity}")
        self.watch.doing(activity, patience=float("inf"))
        yield
        if self.first:
            self.watch.publish(f"{key}/first", True)
        if self.node_leader:
            self.watch.publish(f"{key}/{machine}", True)

    def begin_together(self) -> None:
        """Rank 0 says when training begins: what it does before may take long."""
        if self.first:
            self.watch.publish("begin", True)
        else:
            self.watch.wait_for("begin", "waiting for rank 0 to begin")

    def leave(self) -> None:
        """Leave all groups, now that nothing is left to exchange.

        All ranks do so at about the same time, rank 0 before work that is its alone: the end of an
        NCCL communicator may wait for the other side's.
        """
        self.watch.doing("leaving the others", patience=float("inf"))
        leave_world()

    @property
    def first(self) -> bool:
        """Rank 0: keeps the run folder, speaks to the user, evaluates and exports."""
        return self.rank == 0


def started_as_rank() -> bool:
    """Was this process started by an elastic launcher, as one of several ranks?"""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def device_of(config: TrainConfig, rank: int, local: int, ranks_here: int) -> tuple[Any, bool]:
    """(first device of a rank, does every rank of its machine have its own).

    local: its number among the ranks_here of its machine. Ranks share devices round robin where
    they outnumber them. UserError if a target of several would have to.
    """
    device = resolve_device(config.device)
    drafters, per_target = config.topology.drafters or ranks_here, config.target.devices
    own, wanted = devices_of(
        rank, local, ranks_here=ranks_here, drafters=drafters, per_target=per_target
    )
    check_split(config, wanted)
    if device.type != "cuda":
        return device, False
    device = torch.device("cuda", own[0] % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device, wanted <= torch.cuda.device_count()


def check_split(config: TrainConfig, wanted: int) -> None:
    """UserError if a machine, whose ranks want so many, is too small for a target of several."""
    per_target = config.target.devices
    if per_target == 1:
        return
    gpus = torch.cuda.device_count() if resolve_device(config.device).type == "cuda" else 0
    if wanted > gpus:
        raise UserError(
            f"target.devices {per_target}: the ranks of this machine need {wanted} GPUs of their "
            f"own, there are {gpus}: lower --targets, --drafters or --target.devices"
        )


def target_devices(config: TrainConfig, ranks: Ranks) -> list[torch.device]:
    """The devices of this rank's target: the rank's own, and those after it."""
    if ranks.target is None or config.target.devices == 1:
        return [ranks.device]
    first = ranks.device.index or 0
    return [torch.device("cuda", first + i) for i in range(config.target.devices)]


def store_address() -> str:
    """Of the launcher's store (of rank 0's, where a launcher has none), which all ranks reach."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def join_world(config: TrainConfig) -> tuple[int, torch.device, bool]:
    """Enter the default process group; (rank, device, may data go over NCCL)."""
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    device, own = device_of(config, rank, local, here)
    # What may take longer is waited for through the store (Watch.wait_for), never in a collective.
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * config.topology.stall_seconds))
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, own and dist.is_nccl_available())
    return rank, device, all(answers)


def _group(ranks: Sequence[int], nccl: bool, timeout: timedelta, blocks: int | None = None) -> Any:
    if not nccl:
        return dist.new_group(list(ranks), backend="gloo", timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout  # torch warns of a difference, though its own argument counts
    if blocks is not None and hasattr(options, "config"):
        options.config.max_ctas = blocks
    return dist.new_group(list(ranks), backend="nccl", timeout=timeout, pg_options=options)


def make_ranks(
    config: TrainConfig,
    topology: Topology,
    rank: int,
    device: torch.device,
    nccl: bool,
    watch: Watch,
) -> Ranks:
    """All process groups of a topology; every rank calls this with the same topology."""
    if topology.world_size != dist.get_world_size():
        raise UserError(
            f"{topology.targets} targets and {topology.drafters} drafters are "
            f"{topology.world_size} ranks, but {dist.get_world_size()} were started"
        )
    own = {"rank": rank, "role": topology.role(rank), "host": os.uname().nodename}
    own |= {"pid": os.getpid(), "device": str(device), "data": "NCCL" if nccl else "gloo"}
    table: list[Any] = [None] * topology.world_size
    dist.all_gather_object(table, own)
    timeout = timedelta(seconds=2 * config.topology.stall_seconds)
    one = torch.ones(1, device=device)
    pairs: dict[tuple[int, int], tuple[Any, Any]] = {}
    for target, drafter in topology.pairs():
        members = (drafter, topology.target_rank(target))
        control = _group(members, False, timeout)
        data = _group(members, True, timeout, _TRANSFER_BLOCKS) if nccl else control
        if rank in members:
            pairs[target, drafter] = control, data
            if nccl and rank == drafter:  # connect now, in one order for all: it takes both
                dist.recv(one, src=members[1], group=data)
            elif nccl:
                dist.send(one, dst=drafter, group=data)
    drafters = None
    if topology.drafters > 1:
        drafters = _group(range(topology.drafters), nccl, timeout)
        if rank < topology.drafters:
            dist.all_reduce(one, group=drafters)
    return Ranks(
        topology,
        rank,
        device,
        watch,
        node_leader=os.environ["LOCAL_RANK"] == "0",
        nccl=nccl,
        pairs=pairs,
        drafter_group=drafters if rank < topology.drafters else None,
        table=table,
    )


def leave_world() -> None:
    """Leave all groups, if this process is in any."""
    if dist.is_initialized():
        dist.destroy_process_group()
