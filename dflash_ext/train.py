"""`python -m dflash_ext.train [cpu|one_gpu] [options]`: from nothing to an evaluated drafter.

Without arguments it is the quickstart of this machine's device. `train` reads top to bottom:
configuration, data, target, drafter, memory, before, loop, export, after, table.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import tyro
from transformers.utils import logging as transformers_logging

from dflash_ext.blocks import draw_anchors
from dflash_ext.checkpoint import Progress, load_checkpoint, save_checkpoint
from dflash_ext.comparison import Comparison, encoded_prompts
from dflash_ext.config import RECIPES, DrafterOptions, TrainConfig, is_export, to_json
from dflash_ext.data.registry import smollm2_dir
from dflash_ext.data.synthesis import model_identity
from dflash_ext.errors import UserError, run_cli
from dflash_ext.export import save_export
from dflash_ext.initialise import build_drafter, export_taps
from dflash_ext.memory import largest_batch, predict_peak
from dflash_ext.metrics import summarise
from dflash_ext.monitor import Monitor
from dflash_ext.optim import DrafterOptimizer, StepResult, muon_class
from dflash_ext.plan import Schedule
from dflash_ext.record import save
from dflash_ext.run import claim_run, interruption, keep_identity, resolve_device
from dflash_ext.samples import Samples, prepare_files, synthesise
from dflash_ext.shield import shield
from dflash_ext.target import Target
from dflash_ext.trainer import Trainer, Validation

INTERRUPTED = 130


def train(config: TrainConfig) -> int:
    """One whole run; returns the exit code. Interrupted by Ctrl-C it saves and returns 130."""
    device = resolve_device(config.device)
    if config.optim.name == "muon":
        muon_class()  # a torch too old for it is reported at once
    with claim_run(config) as (folder, checkpoint):
        monitor = Monitor(folder, tensorboard=config.run.tensorboard)
        try:
            return _train(config, device, folder, checkpoint, monitor)
        finally:
            monitor.close()


def _train(
    config: TrainConfig,
    device: torch.device,
    folder: Path,
    checkpoint: Path | None,
    monitor: Monitor,
) -> int:
    monitor.say(f"run folder {folder}, device {device}")

    # Mistakes shall cost seconds: data from a file is prepared before any model loads, and all that
    # the options name is built before the target writes data.
    path = config.target.path or str(smollm2_dir())
    given = None if config.data.train is None else prepare_files(config, path, monitor)
    target = load_target(config, path, device)
    torch.manual_seed(config.seed)
    drafter = build_drafter(config.drafter, config.target, target)
    optimizer = DrafterOptimizer(drafter, config.optim, config.steps)
    trainer = Trainer(target, drafter, config)
    B = drafter.config.block_size
    write_resolved(folder / "resolved.json", trainer, path, monitor)
    report_memory(trainer, optimizer, monitor)
    sets = encoded_prompts(target, config.eval)

    train_set, held_out = given or synthesise(config, target, monitor)
    identity = identity_of(target, train_set, held_out)
    keep_identity(folder, identity, resumed=checkpoint is not None)
    schedule, validation = schedule_of(config, train_set), Validation(trainer, held_out)
    longest = int(train_set.store.lengths[train_set.indices].max())
    rehearse(trainer, optimizer, longest, monitor)
    progress = Progress(0)
    if checkpoint is not None:
        progress = load_checkpoint(checkpoint, drafter, optimizer)
        monitor.say(f"continuing from {checkpoint} at step {progress.position}/{config.steps}")

    some = held_out.indices[: config.eval.prompts_per_set].tolist()
    if config.eval.held_out_prompts and some:
        sets["held-out"] = [held_out.store.prompt(i) for i in some]
    comparison = Comparison(folder, sets, config.eval.max_new_tokens)
    if sets and checkpoint is None:
        exact = fp32_target(target, config)
        with monitor.stage("evaluate before") as stage:
            comparison.baselines(exact, B, stage.update)
            comparison.drafter("before", exact, drafter, stage.update)
        del exact

    progress, interrupted = loop(
        config, trainer, optimizer, train_set, schedule, validation, progress, folder, monitor
    )
    if interrupted:
        monitor.say(f"interrupted: saved at step {progress.position}; --run.resume auto continues")
        return INTERRUPTED

    export = save_export(drafter, folder / "export", target=target)
    monitor.say(f"exported to {export}: reloaded, and equal to an independent forward")
    if sets:
        exact = fp32_target(target, config)
        with monitor.stage("evaluate after") as stage:
            comparison.baselines(exact, B, stage.update)  # kept from before, unless prompts changed
            comparison.drafter("after", exact, drafter, stage.update)
        rows = comparison.rows(B)
        seconds = round(progress.seconds)  # of training alone
        result = {"benchmark": "train", "train_seconds": seconds, "steps": config.steps}
        cells = [[v if isinstance(v, str) else f"{v:.2f}" for v in r.values()] for r in rows]
        monitor.table("Accepted length (tokens per target step)", list(rows[0]), cells)
        options = json.loads(to_json(config))
        save(folder / "results.json", {**result, "options": options, "rows": rows})
    return 0


def schedule_of(config: TrainConfig, samples: Samples) -> Schedule:
    """The plan of all epochs. UserError if a sample does not fit the budgets."""
    options, store = config.batch, samples.store
    return Schedule(
        store.lengths[samples.indices],
        np.minimum(store.candidates[samples.indices], options.anchors_per_sequence),
        seed=config.seed,
        token_budget=options.token_budget,
        max_documents=options.max_documents,
        anchor_budget=options.anchor_budget,
    )


def loop(
    config: TrainConfig,
    trainer: Trainer,
    optimizer: DrafterOptimizer,
    samples: Samples,
    schedule: Schedule,
    validation: Validation,
    progress: Progress,
    folder: Path,
    monitor: Monitor,
) -> tuple[Progress, bool]:
    """Optimizer steps from `progress` to `config.steps`; returns where it ended and if by a signal.

    Everything a step uses follows from (seed, position): micro-batch m belongs to feature batch
    m // draws, whose (epoch, samples) the plan gives, and draws its anchors as number m % draws.
    """
    options, store = config.batch, samples.store
    position, began, held_out = progress.position, time.monotonic() - progress.seconds, {}
    captured = -1  # index of the feature batch at hand

    def save(progress: Progress) -> None:
        save_checkpoint(
            folder / "checkpoints",
            trainer.drafter,
            optimizer,
            progress,
            keep=config.run.keep_checkpoints,
        )

    with monitor.stage("train") as stage, interruption() as interrupted:
        while position < config.steps and not interrupted():
            step_began, target_seconds, sums = time.monotonic(), 0.0, None
            for micro in range(position * options.accumulate, (position + 1) * options.accumulate):
                index, draw = divmod(micro, options.draws)
                if index != captured:
                    captured, (epoch, _) = index, schedule.locate(index)
                    batch = store.batch(samples.indices[schedule.batch(index)].tolist())
                    capture_began = time.monotonic()
                    features = trainer.features(batch)
                    target_seconds += time.monotonic() - capture_began
                anchors = draw_anchors(
                    batch,
                    anchors_per_sequence=options.anchors_per_sequence,
                    seed=config.seed,
                    epoch=epoch,
                    draw=draw,
                )
                blocks = trainer.blocks(batch, anchors)
                if blocks.num_rows:
                    part = trainer.micro_step(features, batch, blocks)
                    sums = part if sums is None else sums + part
            position += 1
            try:
                result, values = optimizer.step(sums)
            except UserError:  # too many non-finite steps: what was trained before is kept
                save(Progress(position, time.monotonic() - began))
                raise
            progress = Progress(position, time.monotonic() - began)

            metrics = summarise(values, trainer.drafter.config.block_size) if values else {}
            times = {"seconds": time.monotonic() - step_began, "seconds_target": target_seconds}
            monitor.log("train", position, metrics | times | step_record(result, optimizer))
            last = position == config.steps
            if last or (config.eval.every and position % config.eval.every == 0):
                held_out = validation.run()
                monitor.log("validation", position, held_out)
            stage.update(position, config.steps, note(metrics, held_out, result))
            if position % config.run.checkpoint_every == 0:
                save(progress)
        save(progress)
        return progress, interrupted()


def step_record(result: StepResult, optimizer: DrafterOptimizer) -> dict[str, float | str]:
    """What the optimizer did, for metrics.jsonl."""
    record: dict[str, float | str] = {
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "optimizer_steps": optimizer.steps,
        "skipped_zero": optimizer.skipped_zero,
        "skipped_nonfinite": optimizer.skipped_nonfinite,
    }
    return record if result.applied else record | {"skipped": result.reason}


def note(metrics: dict[str, float], held_out: dict[str, float], result: StepResult) -> str:
    """The progress display's text for one step."""
    if not result.applied:
        return f"skipped: {result.reason}"
    text = f"loss {metrics['loss']:.3f}  accept {metrics['accept_len']:.2f}"
    if "accept_len" in held_out:
        text += f"  held-out {held_out['accept_len']:.2f}"
    return text


def load_target(config: TrainConfig, path: str, device: torch.device) -> Target:
    """The target for features: bf16 on CUDA, fp32 on the CPU unless the options say otherwise."""
    automatic = "bf16" if device.type == "cuda" else "fp32"
    dtype = automatic if config.target.dtype == "auto" else config.target.dtype
    taps = config.target.tap_ids or export_taps(config.drafter)
    return shielded_target(config, path, device, dtype, taps)


def fp32_target(target: Target, config: TrainConfig) -> Target:
    """The same target in fp32, in which all ways of decoding give the same tokens."""
    if target.dtype == torch.float32:
        return target
    return shielded_target(config, target.path, target.device, "fp32", target.tap_ids)


def shielded_target(
    config: TrainConfig, path: str, device: torch.device, dtype: str, taps: Sequence[int] | None
) -> Target:
    """`Target.load`, and kept out of other threads' FX tracing."""
    remote = config.target.trust_remote_code
    target = Target.load(path, device=device, dtype=dtype, tap_ids=taps, trust_remote_code=remote)
    shield(target.model)
    return target


def identity_of(target: Target, train_set: Samples, held_out: Samples) -> dict[str, str]:
    """What the run depends on by content: its data and the target's config, dtype and weights."""
    model = model_identity(target.model)
    return {
        "training data": train_set.store.identity,
        "held-out data": held_out.store.identity,
        "target's config": model["config"],
        "target's dtype": model["dtype"],
        "target's weights": model["weights"],
    }


def write_resolved(file: Path, trainer: Trainer, path: str, monitor: Monitor) -> None:
    """Save and say what the options left open: taps, mask token, gamma, shapes, dtype."""
    config = trainer.drafter.config
    resolved = {
        "target": path,
        "device": str(trainer.target.device),
        "dtype": str(trainer.target.dtype),
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


def report_memory(trainer: Trainer, optimizer: DrafterOptimizer, monitor: Monitor) -> None:
    """Say the predicted peak of a step."""
    parts = predict_peak(
        trainer.drafter.config,
        trainer.config.batch,
        chunk_rows=trainer.config.loss.chunk_rows,
        drafter_parameters=sum(p.numel() for p in optimizer.parameters.values()),
        target_parameters=sum(p.numel() for p in trainer.target.model.parameters()),
        bytes_per_value=trainer.embedding.element_size(),
        moments=1 if trainer.config.optim.name == "muon" else 2,
    )
    text = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in parts.items())
    monitor.say(f"predicted peak {sum(parts.values()) / 2**20:.0f} MiB ({text})")
    if trainer.config.eval.prompts_per_set and trainer.target.dtype != torch.float32:
        size = sum(p.numel() for p in trainer.target.model.parameters()) * 4 / 2**20
        monitor.say(f"evaluation, before and after: {size:.0f} MiB more for the target in fp32")


def rehearse(
    trainer: Trainer, optimizer: DrafterOptimizer, max_length: int, monitor: Monitor
) -> None:
    """Run the largest batch the budgets allow as step 0, without an update (requirement 14).

    Moments and gradients exist already, as in every later micro-batch; `optimizer` is fresh.
    """
    config, target = trainer.drafter.config, trainer.target
    batch, anchors = largest_batch(
        trainer.config.batch,
        max_length=max_length,
        block_size=config.block_size,
        vocab_size=target.vocab_size,
    )
    on_gpu = target.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(target.device)
    try:
        optimizer.allocate()
        blocks = trainer.blocks(batch, anchors)
        trainer.micro_step(target.features(batch), batch, blocks)
    except torch.OutOfMemoryError:
        raise UserError(
            f"the largest batch ({batch.num_tokens} tokens, {len(anchors)} blocks) does not fit on "
            f"{target.device}: lower --batch.token-budget, --batch.anchor-budget or "
            "--loss.chunk-rows"
        ) from None
    optimizer.zero_grad()
    peak = (
        torch.cuda.max_memory_allocated(target.device)
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    monitor.say(
        f"rehearsed the largest batch ({batch.num_tokens} tokens, {len(anchors)} blocks, "
        f"{blocks.num_rows} rows): peak {peak / 2**20:.0f} MiB"
        + ("" if on_gpu else " resident, the process in all")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: an optional recipe name, then options over that recipe's values."""
    rest = list(sys.argv[1:] if arguments is None else arguments)
    recipe = "one_gpu" if torch.cuda.is_available() else "cpu"
    if rest and rest[0] in RECIPES:
        recipe = rest.pop(0)
    defaults = RECIPES[recipe]()

    def parse() -> TrainConfig:
        prog = "python -m dflash_ext.train [cpu|one_gpu]"
        return tyro.cli(TrainConfig, args=rest, default=defaults, prog=prog)

    config = parse()
    if is_export(config.drafter.init):
        # An export brings its own shape: only the user's options may disagree, not the recipe's.
        defaults = dataclasses.replace(defaults, drafter=DrafterOptions())
        config = parse()
    transformers_logging.disable_progress_bar()  # it would break through our own display
    return train(config)


if __name__ == "__main__":
    run_cli(main)
