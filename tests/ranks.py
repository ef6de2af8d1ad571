"""Runs of several ranks for tests: started as the command line does, in this process.

Ranks are forked from the launcher's server, which has imported everything once, so that a run of
eight processes costs seconds. Whoever is stopped or killed in the middle of a run is so from
inside (`Strike`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from strike import Strike, struck

from dflash_ext.config import (
    RECIPES,
    BatchOptions,
    DataOptions,
    DrafterOptions,
    EvalOptions,
    LossOptions,
    OptimOptions,
    RunOptions,
    TargetOptions,
    TopologyOptions,
    TrainConfig,
)
from dflash_ext.data.store import StoreWriter
from dflash_ext.launch import Entry, run_rank, start_local, world_size
from dflash_ext.topology import Topology
from dflash_ext.watch import NoWatch, Watch

STEPS = 12
STALL_SECONDS = 900.0
"""Collectives and the watch have this patience or twice as much, so that nothing but a fault of the
launcher or the watch keeps a run of these tests waiting; then it is longer than pytest's timeout.
"""


def make_world(root: Path, rows: int = 40) -> Path:
    """A tiny target directory, and a chat file and a store whose answers count upwards."""
    from tiny_targets import tiny_model, tiny_tokenizer  # not at the top: ranks import this file

    tiny_model("llama", head_dim=64).save_pretrained(root / "target")
    tiny_tokenizer(special=("user", "assistant", "<|reserved_0|>")).save_pretrained(root / "target")
    draw = random.Random(0)
    lines = []
    for _ in range(rows):
        a, n = draw.randrange(30), draw.randrange(4, 20)
        answer = " ".join(f"w{(a + i) % 60}" for i in range(n))
        turns = [("user", f"w{a} w{a + 1}"), ("assistant", answer)]
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    (root / "chat.jsonl").write_text("\n".join(lines) + "\n")
    with StoreWriter(root / "store") as writer:
        for _ in range(rows):
            a, n = draw.randrange(30), draw.randrange(4, 20)
            ids = [5, *(6 + (a + i) % 70 for i in range(n))]
            writer.append(ids, [i > 2 for i in range(n + 1)])
    (root / "prompts.txt").write_text("w1 w2\nw5 w6\n")
    return root


def run_config(world: Path, folder: Path, targets: int = 0, drafters: int = 0, **changes):
    """A short run on tiny shapes; 0 targets: one process. data: "store" or "chat.jsonl"."""
    data = changes.pop("data", "store")
    batch = {"token_budget": 120, "max_documents": 6, "anchors_per_sequence": 4}
    batch |= {"anchor_budget": 24} | changes.pop("batch", {})
    run = {"dir": folder, "checkpoint_every": 3} | changes.pop("run", {})
    topology = {"stall_seconds": STALL_SECONDS} | changes.pop("topology", {})
    if targets:
        topology |= {"targets": targets, "drafters": drafters}
    config = TrainConfig(
        target=TargetOptions(path=str(world / "target"), tap_ids=(0, 2)),
        data=DataOptions(train=str(world / data), held_out=6, max_length=48),
        drafter=DrafterOptions(num_layers=1, block_size=4),
        loss=LossOptions(chunk_rows=64),
        optim=OptimOptions(name="adamw", lr=0.01),
        batch=BatchOptions(**batch),
        eval=EvalOptions(prompts_per_set=0, every=5),
        run=RunOptions(**run),
        topology=TopologyOptions(**topology),
        steps=STEPS,
        device="cpu",
    )
    return dataclasses.replace(config, **changes)


def resumed(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))


def start(config: TrainConfig, entry: Entry = run_rank) -> int:
    """The exit code of a run of several ranks."""
    return start_local(config, world_size(config), entry)


def begin(config: TrainConfig, entry: Entry = run_rank, strike: Strike | None = None) -> int:
    """The exit code of a run of one process, in this one, or of several ranks."""
    from dflash_ext.train import train

    if world_size(config) > 1:
        return start(config, entry if strike is None else partial(struck, strike, entry))
    doing = NoWatch.doing
    try:
        if strike is not None:
            NoWatch.doing = strike.into(doing, config.run.dir)
        return train(config)
    finally:
        NoWatch.doing = doing


def command_line(config: TrainConfig) -> list[str]:
    """The options that make `config` of the recipe `cpu`."""
    words = []

    def add(prefix: str, value: object, default: object) -> None:
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                name = "" if field.name == "topology" else f"{prefix}{field.name}."
                child, other = (getattr(x, field.name) for x in (value, default))
                add(name if dataclasses.is_dataclass(child) else prefix + field.name, child, other)
        elif value != default:
            items = value if isinstance(value, tuple) else [value]
            words.extend([f"--{prefix.replace('_', '-')}", *map(str, items)])

    add("", config, RECIPES["cpu"]())
    return words


def records(folder: Path, kind: str = "train") -> list[dict]:
    """metrics.jsonl; of a step that a kill undid the last record counts."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [r for r in map(json.loads, lines) if r["kind"] == kind]
    return sorted({r["step"]: r for r in found}.values(), key=lambda r: r["step"])


class FakeEvent:
    """Of a device that does at once what it is asked, as the CPU does."""

    def __init__(self, **_keywords) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def _happened(self) -> bool:
        assert self.recorded, "an event that nobody recorded"
        return True

    query = wait = synchronize = _happened


def without_pinning() -> None:
    """Pinned memory needs a GPU: ordinary memory instead."""
    empty = torch.empty
    torch.empty = lambda *size, pin_memory=False, **keywords: empty(*size, **keywords)


def as_if_nccl(config: TrainConfig) -> int:
    """A rank that takes every branch it takes over NCCL, with stand-ins for what needs a GPU.

    Data go over gloo groups of their own. The groups must be asked for as torch asks for NCCL's.
    """
    from dflash_ext import worker
    from dflash_ext.pipeline import HEADER

    join, new_group, irecv = worker.join_world, dist.new_group, dist.irecv
    isend, send = dist.isend, dist.send
    data_groups, order, announced = [], [], []

    def group(ranks, backend, timeout, pg_options=None):
        if backend == "nccl":
            assert pg_options.is_high_priority_stream
            assert pg_options._timeout == timeout
            order.append((tuple(ranks), pg_options.config.max_ctas))
        made = new_group(ranks, backend="gloo", timeout=timeout)
        if backend == "nccl" and len(ranks) == 2 and max(ranks) >= config.topology.drafters:
            data_groups.append(made)
        return made

    def receive(tensor, src, group, tag):
        if group in data_groups:
            assert "from target" in threading.current_thread().name  # not before it is announced
        return irecv(tensor, src=src, group=group, tag=tag)

    def send_later(tensor, dst, group, tag):
        if group in data_groups:  # a send spins until the drafter receives, for which it is told
            assert announced.pop() == dst
        return isend(tensor, dst=dst, group=group, tag=tag)

    def send_now(tensor, dst, group, tag=0):
        if tag == HEADER:
            assert "announcer" in threading.current_thread().name  # not before it is captured
            announced.append(dst)
        return send(tensor, dst=dst, group=group, tag=tag)

    def options():
        return SimpleNamespace(config=SimpleNamespace(max_ctas=None), _timeout=None)

    without_pinning()
    dist.new_group, dist.irecv = group, receive
    dist.isend, dist.send = send_later, send_now
    dist.ProcessGroupNCCL = SimpleNamespace(Options=options)
    worker.join_world = lambda config: (*join(config)[:2], True)
    torch.cuda.Event, torch.cuda.Stream = FakeEvent, lambda _device: object()
    torch.cuda.stream = lambda _stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda _device: None
    code = run_rank(config)
    N, M = config.topology.targets, config.topology.drafters
    pairs = [((d, M + t), 4) for t in range(N) for d in range(M)]
    assert order == pairs + [(tuple(range(M)), None)] * (M > 1)
    return code


def as_if_staged(config: TrainConfig) -> int:
    """A rank whose features pass through host memory, as over gloo from a GPU to a GPU."""
    from dflash_ext.ranks import Ranks

    without_pinning()
    Ranks.staged = True
    return run_rank(config)


def loading(config: TrainConfig) -> int:
    """A rank that launches a kernel for the first time while a send spins, or is about to.

    CUDA loads a kernel at its first launch, may wait for an idle device then, and keeps all other
    calls into the driver waiting too. The announcing thread dawdles with one of these at its end.
    """
    from dflash_ext.target import Target

    x = torch.ones(64, device="cuda")
    names = ["erf", "erfc", "expm1", "log1p", "asinh", "acosh", "atanh", "sinh", "cosh", "tan"]
    kernels = iter([getattr(torch, name) for name in [*names, "asin", "acos", "atan", "exp2"]])
    spinning, features, isend = threading.Event(), Target.features, dist.isend

    def capture(*args):
        spinning.wait(0.5)  # the batch before is on its way
        spinning.clear()
        for kernel in itertools.islice(kernels, 1):
            kernel(x)
        return features(*args)

    def send(tensor, **keywords):
        work = isend(tensor, **keywords)
        if tensor.is_cuda:
            spinning.set()
            time.sleep(0.2)
            torch.cuda.Event().record()
        return work

    Target.features, dist.isend = capture, send
    return run_rank(config)


def deaf(config: TrainConfig) -> int:
    """Rank 1, the target, dies in its second capture; rank 0 sees nothing and heeds no SIGTERM.

    As a rank whose main thread waits for its device, on a machine too busy for its other thread.
    """
    from dflash_ext.target import Target
    from dflash_ext.trainer import Trainer
    from dflash_ext.watch import Watch

    count = [0]

    def stuck(self, *_):
        count[0] += 1
        if count[0] > 1:  # the first is the rehearsal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(STALL_SECONDS)
        return self.no_sums()

    def last(self, batch, features=Target.features):
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return features(self, batch)

    if os.environ["RANK"] == "0":
        Watch._look_around, Trainer.micro_step = lambda *_: None, stuck
    else:
        Target.features = last
    return run_rank(config)


def two_drafters(config: TrainConfig) -> int:
    """Both ranks are drafters with a batch each: their sums are those of one that has both."""
    from dflash_ext import ranks, worker
    from dflash_ext.blocks import draw_anchors
    from dflash_ext.checkpoint import host_copy
    from dflash_ext.data.store import TokenStore
    from dflash_ext.startup import build_side, load_target

    worker._set_environment()
    rank, device, nccl = ranks.join_world(config)
    group = ranks._group(range(2), nccl, timedelta(seconds=60))
    target = load_target(config, config.target.path, [device])
    store = TokenStore.open(config.data.train)
    batches = [store.batch([0, 1, 2]), store.batch([3, 4])]

    def add_gradients(side, batch):
        anchors = draw_anchors(batch, anchors_per_sequence=4, seed=0, epoch=0)
        blocks = side.trainer.blocks(batch, anchors)
        return side.trainer.micro_step(target.features(batch), batch, blocks)

    one = build_side(config, ranks.Ranks(device=device), target)
    expected = sum(add_gradients(one, batch) for batch in batches)
    both = ranks.Ranks(Topology(1, 2, shared=False), rank, device, nccl=nccl, drafter_group=group)
    side = build_side(config, both, target)
    with side.replicas.step():
        sums = add_gradients(side, batches[rank])
    sums = side.replicas.reduce(sums)
    torch.testing.assert_close(sums, expected)
    for (name, a), b in zip(
        side.trainer.drafter.named_parameters(), one.trainer.drafter.parameters()
    ):
        a, b = host_copy(a.grad), host_copy(b.grad)
        assert (a - b).norm() <= 1e-5 * b.norm(), name
    result, _ = side.optimizer.step(sums)
    assert result.applied
    assert side.replicas.whole().fc.weight.isfinite().all()
    ranks.leave_world()
    return 0


def hostile(config: TrainConfig) -> int:
    """A rank of 2 targets; number 1 hands over what HOSTILE says, from its second batch on."""
    from dflash_ext.target import Target

    if os.environ["RANK"] == "2":
        kind, features, count = os.environ["HOSTILE"], Target.features, [0]

        def bad(self, batch):
            good = features(self, batch)
            count[0] += 1
            if count[0] < 3:  # the rehearsal and one good batch
                return good
            rows = good.features
            if kind == "error":
                raise ValueError("an unlucky\nbatch")
            if kind == "hang":
                time.sleep(STALL_SECONDS)
            changed = {
                "zeros": {"features": torch.zeros_like(rows)},
                "short": {"features": rows[:-1]},
                "nan": {"features": torch.where(rows > 1, torch.nan, rows)},
                "swapped": {"sample_ids": good.sample_ids[::-1]},
                "other tokens": {"token_hash": "0" * 32},
                "taps": {"tap_ids": good.tap_ids[::-1]},
                "dtype": {"features": rows.bfloat16()},
            }
            return dataclasses.replace(good, **changed[kind])

        Target.features = bad
        if kind == "hang":
            doing = Watch.doing

            def impatient(watch: Watch, activity: str, documents=None, patience: float = 1.0):
                hangs = activity == "capturing batch 3"
                doing(watch, activity, documents, patience=patience / STALL_SECONDS**hangs)

            Watch.doing = impatient
    return run_rank(config)


def short_part(config: TrainConfig) -> int:
    """A rank of a run that does PART_STEPS steps and then waits to be killed, however late."""
    from dflash_ext.trainer import Trainer

    micro_step, count = Trainer.micro_step, [0]

    def bounded(self, *args):
        count[0] += 1
        if count[0] > 1 + int(os.environ["PART_STEPS"]):  # the first is the rehearsal
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher must be able to end it
            time.sleep(STALL_SECONDS)
        return micro_step(self, *args)

    Trainer.micro_step = bounded
    return run_rank(config)


def odd_drafter(config: TrainConfig) -> int:
    """A rank of 2 drafters; number 1 has no anchors, or a gradient that is not finite.

    "no anchors": number 0 has none in its second micro-batch, so that step has none at all.
    """
    from dflash_ext import train
    from dflash_ext.trainer import Trainer

    kind, rank = os.environ["HOSTILE"], os.environ["RANK"]
    draw, micro_step, count = train.draw_anchors, Trainer.micro_step, [0]

    def few(*args, **keywords):
        count[0] += 1
        anchors = draw(*args, **keywords)
        return anchors[:0] if rank == "1" or count[0] == 2 else anchors

    def poisoned(self, *args):
        sums = micro_step(self, *args)
        count[0] += 1
        if rank == "1" and count[0] > 3:  # the rehearsal and two good steps
            self.drafter.fc.weight.grad[0, 0] = float("nan")
        return sums

    if kind == "no anchors":
        train.draw_anchors = few
    else:
        Trainer.micro_step = poisoned
    return run_rank(config)
