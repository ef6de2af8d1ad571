"""`--targets auto`: how fast is each side, and how many ranks should each have?

Rank 0 times a target and a drafter on the largest legal batch, one after the other on its device,
and tells the others the split that moves the most feature batches per second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch

from dflash_ext.config import TrainConfig
from dflash_ext.data.registry import smollm2_dir
from dflash_ext.errors import UserError
from dflash_ext.memory import largest_batch
from dflash_ext.ranks import Ranks
from dflash_ext.startup import build_side, feature_dtype, load_target, needs_of
from dflash_ext.topology import Topology, best_split
from dflash_ext.watch import Watch

_ROUNDS = 3


def choose_topology(
    config: TrainConfig, watch: Watch, rank: int, size: int, device: torch.device
) -> Topology:
    """The topology that the options give, or the fastest for `size` ranks if they say auto."""
    options = config.topology
    if isinstance(options.targets, int) and options.drafters is not None:
        return Topology(options.targets, options.drafters, shared=False)
    if options.targets is None:
        raise UserError(f"{size} ranks were started: say what they do, --targets N --drafters M")
    if rank == 0:
        watch.doing("timing both sides", patience=4)
        target_seconds, drafter_seconds = time_sides(config, device)
        N, M = best_split(size, target_seconds, drafter_seconds)
        text = (
            f"auto: a feature batch takes a target {target_seconds:.3f} s and a drafter "
            f"{drafter_seconds:.3f} s, so {N} targets and {M} drafters of {size} ranks; "
            f"the {'target' if target_seconds / N > drafter_seconds / M else 'drafter'}s limit"
        )
        print(text, flush=True)
        watch.publish("split", [N, M])
    found = cast("list[int]", watch.wait_for("split", "waiting for rank 0 to time both sides"))
    return Topology(found[0], found[1], shared=False)


def time_sides(config: TrainConfig, device: torch.device) -> tuple[float, float]:
    """Seconds of one target and of one drafter for one feature batch of the largest size.

    The drafter's are for all draws of the batch and its share of the optimizer steps.
    """
    needs = needs_of(config, Topology(), 0, feature_dtype(config, device))
    target = load_target(config, config.target.path or str(smollm2_dir()), [device], needs)
    side = build_side(config, Ranks(device=device), target)
    trainer, optimizer, options = side.trainer, side.optimizer, config.batch
    data = config.data
    batch, anchors = largest_batch(
        options,
        max_length=data.longest[1],
        block_size=trainer.drafter.config.block_size,
        vocab_size=target.vocab_size,
        limit=options.anchor_budget,
    )
    features, blocks = target.features(batch), trainer.blocks(batch, anchors)

    def both() -> None:
        optimizer.step(trainer.micro_step(features, batch, blocks))

    capture = _seconds(lambda: target.features(batch), device)
    micro = _seconds(lambda: trainer.micro_step(features, batch, blocks), device)
    step = max(0.0, _seconds(both, device) - micro)
    return capture, options.draws * (micro + step / options.accumulate)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The fastest of a few runs after one that warms up."""
    times = []
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
