"""A rank before its first step: its models, its place in the run, the proof that it fits."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import resource
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from dflash_ext.checkpoint import Progress, read_progress
from dflash_ext.config import TrainConfig
from dflash_ext.errors import UserError
from dflash_ext.initialise import build_drafter, drafter_layers, export_taps
from dflash_ext.loss import needs_teacher, workspace_bytes
from dflash_ext.memory import largest_batch, largest_ds, predict_peak
from dflash_ext.monitor import Monitor
from dflash_ext.ops.kept import ds_limit, room_for_ds
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.parallel import Replicas, Shards
from dflash_ext.plan import Schedule
from dflash_ext.ranks import Ranks
from dflash_ext.target import Target
from dflash_ext.target_loading import WHOLE, Needs, Runs, parameter_shapes, values_loaded
from dflash_ext.teacher import check_teacher, final_norm
from dflash_ext.topology import Course, Topology
from dflash_ext.trainer import Trainer
from dflash_ext.transfer import FeatureBatch


@dataclass(frozen=True)
class Side:
    """What a drafter's rank trains with."""

    trainer: Trainer
    optimizer: DrafterOptimizer
    replicas: Replicas


def feature_dtype(config: TrainConfig, device: torch.device) -> str:
    """Of the target for features: bf16 on CUDA, fp32 on the CPU unless the options say otherwise.

    A name in `target.DTYPES`.
    """
    automatic = "bf16" if device.type == "cuda" else "fp32"
    return automatic if config.target.dtype == "auto" else config.target.dtype


def needs_of(config: TrainConfig, topology: Topology, rank: int, dtype: str) -> Needs:
    """What a rank of a run does with the target that it loads for features, in `dtype`."""
    captures, trains = topology.target_of(rank), topology.drafter_of(rank) is not None
    if config.data.train is None:  # it writes the data, and every rank knows them by their author
        return WHOLE
    evaluates = topology.shared and dtype == "fp32" and config.eval.prompts_per_set > 0
    if evaluates or (captures == 0 and config.eval.decode_every > 0):
        return WHOLE
    runs: Runs = "nothing"
    if captures is not None:
        runs = "layers" if needs_teacher(config.loss.kind) else "taps"
    copied = drafter_layers(config.drafter) if trains and config.drafter.init == "target" else 0
    return Needs(runs, head=trains, last_layers=copied)


def load_target(
    config: TrainConfig, path: str, devices: list[torch.device], needs: Needs = WHOLE
) -> Target:
    """The target for features, in `feature_dtype`; needs: what of it this process loads."""
    target = _target(config, path, devices, feature_dtype(config, devices[0]), needs)
    if needs_teacher(config.loss.kind):
        target.hand_over_last_layer()
        if needs.runs == "layers":
            check_teacher(target)
    if config.target.fp8 and needs.runs != "nothing":
        target.quantise()
    return target


def fp32_target(
    config: TrainConfig,
    path: str,
    device: torch.device,
    target: Target | None,
    needs: Needs = WHOLE,
) -> Target:
    """The target in fp32, in which all ways of decoding give the same tokens.

    `target` itself if it is whole and in fp32 already; needs: what is loaded otherwise.
    """
    if target is not None and target.dtype == torch.float32 and target.whole:
        return target
    return _target(config, path, [device], "fp32", needs, accelerated=False)


def _target(
    config: TrainConfig,
    path: str,
    devices: list[torch.device],
    dtype: str,
    needs: Needs,
    accelerated: bool = True,
) -> Target:
    taps = config.target.tap_ids or export_taps(config.drafter)
    return Target.load(
        path,
        device=devices,
        dtype=dtype,
        tap_ids=taps,
        trust_remote_code=config.target.trust_remote_code,
        needs=needs,
        random_weights=config.target.random_weights,
        accelerated=accelerated,
    )


def build_side(config: TrainConfig, ranks: Ranks, target: Target) -> Side:
    """Drafter and optimizer of a drafter's rank: the same on all of them, to the bit."""
    torch.manual_seed(config.seed)
    drafter = build_drafter(config.drafter, config.target, target)
    norm = final_norm(target) if needs_teacher(config.loss.kind) else None
    trainer = Trainer(target.vocabulary(), drafter, config, norm)
    Replicas(ranks.drafter_group, drafter).synchronise()
    group = ranks.drafter_group
    if not config.topology.shard or group is None:  # one drafter has nothing to share
        optimizer = DrafterOptimizer(drafter, config.optim, config.steps)
        return Side(trainer, optimizer, Replicas(group, drafter))
    shards = Shards(group, drafter, trainer.forward, trainer.zero_step)
    optimizer = DrafterOptimizer(drafter, config.optim, config.steps, shard_group=group)
    return Side(trainer, optimizer, shards)


def whereabouts(
    config: TrainConfig,
    ranks: Ranks,
    schedule: Schedule,
    checkpoint: Path | None,
    monitor: Monitor,
) -> tuple[Path | None, Progress, int]:
    """(checkpoint to continue from, where the run stands, its optimizer steps) by rank 0's word."""
    if not ranks.first:
        told = cast("dict[str, Any]", ranks.watch.wait_for("progress", "waiting for rank 0's word"))
        path = None if told["checkpoint"] is None else Path(told["checkpoint"])
        progress = Progress(told["position"], told["seconds"], Course(**told["course"]))
        return path, progress, told["steps"]
    M, A, D = ranks.topology.drafters, config.batch.accumulate, config.batch.draws
    progress = Progress(0) if checkpoint is None else read_progress(checkpoint)
    end = None if config.epochs is None else schedule.batches_of(config.epochs)
    if progress.course is None:
        course = Course(M, A, D, end)
    else:
        # The end moves where the data grew, never over a batch that is behind the run.
        course = progress.course.continued(progress.position, M, A, D)
        course = dataclasses.replace(course, end=end)
        before, now = progress.course.drafters * progress.course.accumulate, M * A
        if before != now:
            monitor.say(
                f"an optimizer step has {now} micro-batches ({M} drafters x {A}) from here on, it "
                f"had {before}: --batch.accumulate keeps it, where it divides"
            )
    steps = config.steps if course.end is None else course.steps()
    progress = dataclasses.replace(progress, course=course)
    if not ranks.topology.shared:
        told = {"checkpoint": None if checkpoint is None else str(checkpoint.absolute())}
        place = {"position": progress.position, "seconds": progress.seconds, "steps": steps}
        ranks.watch.publish("progress", told | place | {"course": dataclasses.asdict(course)})
    return checkpoint, progress, steps


def write_resolved(file: Path, trainer: Trainer, path: str, monitor: Monitor) -> None:
    """Save and say what the options left open: taps, mask token, gamma, shapes, dtype."""
    config = trainer.drafter.config
    resolved = {
        "target": path,
        "device": str(trainer.device),
        "dtype": str(trainer.embedding.dtype),
        "gamma": trainer.gamma,
        "final_tap_normed": False,
        "label_shift": 0,
        "drafter": dataclasses.asdict(config),
    }
    file.write_text(json.dumps(resolved, indent=2) + "\n")
    count = sum(p.numel() for p in trainer.drafter.parameters())
    monitor.say(
        f"drafter: {count / 1e6:.1f} M parameters, {config.num_layers} layers, block "
        f"{config.block_size}, taps {list(config.target_layer_ids)}, mask token "
        f"{config.mask_token_id}, gamma {trainer.gamma}"
    )


def report_memory(trainer: Trainer, target: Target, buffers: int, monitor: Monitor) -> None:
    """Say the predicted peak of a step. buffers: a drafter's for feature batches, 0 if shared."""
    config, batch = trainer.drafter.config, trainer.config.batch
    places = Counter[torch.device]()
    for p in target.model.parameters():
        places[p.device] += p.numel()
    weights = places[target.device]
    parts = predict_peak(
        config,
        batch,
        handed_width=trainer.handed_width,
        logits_or_ds=max(
            workspace_bytes(
                trainer.config.loss.kind,
                trainer.config.loss.chunk_rows,
                trainer.head.shape[0],
                trainer.embedding.dtype,
                trainer.device,
            ),
            min(
                ds_limit(trainer.device),
                largest_ds(config, batch, trainer.config.data.longest[1]),
            ),
        ),
        drafter_parameters=sum(p.numel() for p in trainer.drafter.parameters()),
        target_parameters=weights,
        bytes_per_value=trainer.embedding.element_size(),
        moments=1 if trainer.config.optim.name == "muon" else 2,
    )
    if trainer.head_fp8 is not None:
        parts["FP8 head"] = trainer.head_fp8.values.nbytes
    if buffers:
        shared = trainer.embedding.data_ptr() == trainer.head.data_ptr()
        parts["target weights"] = trainer.embedding.nbytes + (0 if shared else trainer.head.nbytes)
        one = batch.token_budget * trainer.handed_width * trainer.embedding.element_size()
        parts["feature buffers"] = buffers * one
    if len(places) > 1:
        each = (f"{d} {n * target.dtype.itemsize / 2**20:.0f} MiB" for d, n in places.items())
        monitor.say(f"the target's weights: {', '.join(each)}")
    text = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in parts.items())
    where = " of a drafter's rank" if buffers else ""
    monitor.say(f"predicted peak{where} {sum(parts.values()) / 2**20:.0f} MiB ({text})")
    if buffers:
        capturing = needs_of(trainer.config, Topology(2, 1, shared=False), 2, "")
        size = values_loaded(target.model, target.num_layers, target.tap_ids, capturing)
        monitor.say(
            f"weights of a target's rank: {size * target.dtype.itemsize / 2**20:.0f} MiB"
            + (f" over {n} devices" if (n := trainer.config.target.devices) > 1 else "")
        )
    if trainer.config.eval.prompts_per_set and target.dtype != torch.float32:
        whole = sum(map(math.prod, parameter_shapes(target.model).values()))
        monitor.say(
            f"evaluation, before and after: {whole * 4 / 2**20:.0f} MiB more for the whole target "
            "in fp32"
        )


def release(device: torch.device) -> None:
    """Give the memory of a model that was let go back to the device.

    Whatever refers to itself, as parts of a model may, waits for Python's collector, and freed
    memory for an allocator that needs it: neither may come before another rank wants the space.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rehearse(
    config: TrainConfig, max_length: int, target: Target | None, side: Side | None, monitor: Monitor
) -> None:
    """Run the largest batch the budgets allow as step 0, without an update (requirement 14).

    Each rank its own side of it. Moments and gradients exist already, as in every later
    micro-batch; the optimizer is fresh. A drafter without a target takes features of ones.
    What a step of AdamW launches between its sums over the drafters and its end is loaded from then
    on: loading may wait for an idle device, and one that sums waits for the others (sender.py).
    Documents are many rather than long, so dS takes what the longest may need.
    """
    trainer = None if side is None else side.trainer
    batch, anchors = largest_batch(
        config.batch,
        max_length=max_length,
        block_size=4 if trainer is None else trainer.drafter.config.block_size,
        vocab_size=trainer.head.shape[0] if trainer else cast(Target, target).embedding_rows,
    )
    device = trainer.device if trainer else cast(Target, target).device
    on_gpu, rows = device.type == "cuda", 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        features = None if target is None else target.features(batch)
        if side is not None and trainer is not None:
            side.optimizer.allocate()
            blocks = trainer.blocks(batch, anchors)
            rows = blocks.num_rows
            kept = largest_ds(trainer.drafter.config, config.batch, max_length)
            with side.replicas.step(), room_for_ds(kept):
                trainer.micro_step(features or _ones(trainer, batch.num_tokens), batch, blocks)
            side.optimizer.rehearse(side.replicas.reduce(trainer.no_sums()))
    except torch.OutOfMemoryError:
        raise UserError(
            f"the largest batch ({batch.num_tokens} tokens, {len(anchors)} blocks) does not fit on "
            f"{device}: lower --batch.token-budget, --batch.anchor-chunk (or anchor-budget) or "
            "--loss.chunk-rows"
        ) from None
    peak = (
        torch.cuda.max_memory_allocated(device)
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    monitor.say(
        f"rehearsed the largest batch ({batch.num_tokens} tokens, {len(anchors)} blocks, "
        f"{rows} rows): peak {peak / 2**20:.0f} MiB"
        + ("" if on_gpu else " resident, the process in all")
    )


def _ones(trainer: Trainer, rows: int) -> FeatureBatch:
    like = trainer.embedding
    ones = torch.ones(rows, trainer.handed_width, dtype=like.dtype, device=like.device)
    return FeatureBatch(ones, trainer.handed_taps, (), "", rows)
