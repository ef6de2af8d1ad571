"""`python -m dflash_ext.train [recipe] [options]`: from nothing to an evaluated drafter.

Without arguments it is the quickstart of this machine's device. With `--targets 5 --drafters 3` it
starts that many ranks here; `torchrun ... -m dflash_ext.train` starts them over several machines.
`_train` reads top to bottom on every rank: data, target, drafter, memory, before, loop, export,
after, table. One process is the case in which one rank is both sides.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_ext.batch import PackedBatch
from dflash_ext.best import DECODED, VALIDATION, Best
from dflash_ext.blocks import draw_anchors
from dflash_ext.checkpoint import CheckpointWriter, Progress, load_checkpoint, take_snapshot
from dflash_ext.comparison import encoded_prompts
from dflash_ext.config import RECIPES, DrafterOptions, TrainConfig, check_given, is_export
from dflash_ext.data.registry import smollm2_dir
from dflash_ext.errors import UserError, parse_options, run_cli
from dflash_ext.identity import settle
from dflash_ext.judge import Judge, comparison_of
from dflash_ext.launch import start_local, world_size
from dflash_ext.metrics import summarise, sums_size
from dflash_ext.monitor import Monitor
from dflash_ext.optim import DrafterOptimizer, StepResult
from dflash_ext.pipeline import Book, InProcess, Source, own_handovers
from dflash_ext.placement import to_device
from dflash_ext.questions import Answerer, Decoding, Far, Near
from dflash_ext.ranks import Ranks, started_as_rank, target_devices
from dflash_ext.rates import Tally, TargetCost, product_tflops, rates
from dflash_ext.receiver import Receiver
from dflash_ext.run import claim_run, interruption, resolve_device
from dflash_ext.samples import prepare_files, synthesise
from dflash_ext.sender import Sender, serve
from dflash_ext.startup import (
    Side,
    build_side,
    feature_dtype,
    fp32_target,
    load_target,
    needs_of,
    rehearse,
    release,
    report_memory,
    whereabouts,
    write_resolved,
)
from dflash_ext.target_loading import WHOLE, Needs
from dflash_ext.topology import Handover, validates
from dflash_ext.trainer import Validation
from dflash_ext.transfer import FeatureBatch
from dflash_ext.transformers_api import hide_progress_bars
from dflash_ext.uses import Uses
from dflash_ext.watch import INTERRUPTED
from dflash_ext.worker import as_rank

FOREVER = float("inf")
LOADING, REHEARSING = "loading the target", "rehearsing the largest batch"


@dataclass(frozen=True)
class Job:
    """What a rank knows of its run once data, target and plan are there."""

    config: TrainConfig
    ranks: Ranks
    monitor: Monitor
    folder: Path | None
    """None on all ranks but the first."""
    book: Book
    steps: int
    cost: TargetCost


def train(config: TrainConfig, ranks: Ranks | None = None) -> int:
    """One rank's part of a run, by default the whole of it in this process; the exit code.

    Interrupted by Ctrl-C it saves and returns 130.
    """
    ranks = ranks or Ranks(device=resolve_device(config.device))
    if not ranks.first:
        return _train(config, ranks, None, None, Monitor(None))
    with claim_run(config) as (folder, checkpoint):
        if ranks.table:
            (folder / "ranks.json").write_text(json.dumps(ranks.table, indent=2) + "\n")
        monitor = Monitor(folder, tensorboard=config.run.tensorboard)
        try:
            return _train(config, ranks, folder, checkpoint, monitor)
        finally:
            monitor.close()


def _train(
    config: TrainConfig,
    ranks: Ranks,
    folder: Path | None,
    checkpoint: Path | None,
    monitor: Monitor,
) -> int:
    watch, shared = ranks.watch, ranks.topology.shared
    monitor.say(f"run folder {folder}, device {ranks.device}{ranks.describe()}")

    # Mistakes shall cost seconds: data from a file is prepared before any model loads, and all that
    # the options name is built before the target writes data.
    path = config.target.path or str(smollm2_dir())
    given = None
    if config.data.train is not None:
        with ranks.first_goes_first("files", "preparing data"):
            given = prepare_files(config, path, monitor)
    watch.doing(LOADING, patience=4)
    needs = needs_of(config, ranks.topology, ranks.rank, feature_dtype(config, ranks.device))
    target = load_target(config, path, target_devices(config, ranks), needs)
    side = None if ranks.drafter is None else build_side(config, ranks, target)
    target.keep(dataclasses.replace(needs, last_layers=0))  # those that the drafter began as
    sets: dict[str, list[list[int]]] = {}
    if folder is not None and side is not None:
        write_resolved(folder / "resolved.json", side.trainer, path, monitor)
        report_memory(side.trainer, target, 0 if shared else config.topology.buffers, monitor)
        if config.eval.prompts_per_set:
            sets = encoded_prompts(target, config.eval.prompts, config.eval.prompts_per_set)

    with ranks.first_goes_first("samples", "making data"):
        train_set, held_out = given or synthesise(config, target, monitor)
    data = settle(config, ranks, folder, checkpoint, target, (train_set, held_out), monitor)
    train_set, held_out, schedule = data
    row_bytes = len(target.handed_taps) * target.hidden_size * target.dtype.itemsize
    book = Book(train_set, schedule, Validation(config, held_out, row_bytes))
    checkpoint, progress, steps = whereabouts(config, ranks, schedule, checkpoint, monitor)
    job = Job(config, ranks, monitor, folder, book, steps, TargetCost.of(target))
    if side is not None:
        side.optimizer.total_steps = steps
    own = own_handovers(config, ranks, progress, steps, book.validation)
    longest = int(schedule.lengths.max())
    if side is None:
        sender = Sender(ranks, target, config.batch)
        watch.doing(REHEARSING, patience=4)
        rehearse(config, longest, target, None, monitor)
        watch.wait_for("begin", "waiting for rank 0 to begin")
        with interruption(), watch.heeding_stop():
            answerer = None
            if config.eval.decode_every and ranks.target == 0:
                sets = encoded_prompts(target, config.eval.prompts, config.eval.prompts_per_set)
                comparison = comparison_of(config, sets, held_out)
                answerer = Answerer(watch, target, comparison) if comparison else None
            serve(ranks, target, sender, own, book)
            if answerer is not None:
                answerer.finish()
        ranks.leave()
        return 0

    kept = target if shared else None
    del target  # a drafter on a rank of its own keeps the embedding and the head only
    release(ranks.device)
    source: Source
    if kept is not None:
        source = InProcess(kept, side.trainer, book)
    else:
        source = Receiver(ranks, own, book, side.trainer, buffers=config.topology.buffers)
    watch.doing(REHEARSING, patience=4)
    rehearse(config, longest, kept, side, monitor)
    uses = Uses(train_set, schedule)
    if checkpoint is not None:
        _, saved = load_checkpoint(checkpoint, side.trainer.drafter, side.optimizer)
        if ranks.first and saved is not None:
            uses.restore(saved, progress)
        monitor.say(f"continuing from {checkpoint} at step {progress.position}/{steps}")

    judge = None if folder is None else Judge(config, folder, monitor, sets, held_out)
    if config.eval.prompts_per_set and checkpoint is None:
        before = side.replicas.whole()  # by all drafters together
        if judge is not None and judge.comparison is not None:
            watch.doing("evaluating before training", patience=FOREVER)
            exact = fp32_target(config, path, ranks.device, kept)
            judge.before(exact, before)
            del exact
            release(ranks.device)
        del before
    best = Best(ranks, folder, DECODED if config.eval.decode_every else VALIDATION)
    decoding: Decoding | None = None
    if config.eval.decode_every and kept is None:
        decoding = Far(ranks, folder, monitor, best)
    elif config.eval.decode_every and kept is not None and judge is not None:
        decoding = Near(judge, kept, best)
    ranks.begin_together()
    with interruption() as interrupted, watch.heeding_stop():
        progress, stopped = loop(job, side, source, uses, best, decoding, progress, interrupted)
    if stopped:
        monitor.say(f"interrupted: saved at step {progress.position}; --run.resume auto continues")
        return INTERRUPTED
    trained = side.replicas.whole()
    ranks.leave()
    if judge is None or not config.run.export:
        return 0

    watch.doing("evaluating after training", patience=FOREVER)
    needs = WHOLE if judge.comparison else Needs("nothing")  # an export is proven on its head
    exact = kept or fp32_target(config, path, ranks.device, None, needs)
    judge.export(exact, trained, progress.position)
    if judge.comparison is not None:
        exact = fp32_target(config, path, ranks.device, exact)
        judge.after(exact, trained, progress)
    return 0


def loop(
    job: Job,
    side: Side,
    source: Source,
    uses: Uses,
    best: Best,
    decoding: Decoding | None,
    progress: Progress,
    interrupted: Callable[[], bool],
) -> tuple[Progress, bool]:
    """Optimizer steps from `progress` on; returns where it ended and if on request.

    Everything a step uses follows from its number (`Course`), on every drafter; one with fewer
    micro-batches than others, or none, still takes part in every sum.
    """
    config, ranks, monitor = job.config, job.ranks, job.monitor
    trainer, optimizer, replicas = side.trainer, side.optimizer, side.replicas
    drafter, targets, course = ranks.drafter or 0, ranks.topology.targets, progress.course
    assert course is not None
    B, every, validation = trainer.drafter.config.block_size, config.eval.every, job.book.validation
    began, held_out = time.monotonic() - progress.seconds, dict[str, float]()
    peak_tflops = config.topology.peak_tflops or product_tflops(ranks.device)
    writer = None
    if job.folder is not None:
        writer = CheckpointWriter(job.folder / "checkpoints", keep=config.run.keep_checkpoints)

    def asked() -> bool:
        return interrupted() or ranks.watch.stop_requested.is_set()

    def save(progress: Progress) -> None:
        counted = uses.total(ranks.drafter_group, ranks.sum_device, progress)
        if writer is not None or config.topology.shard:
            snapshot = take_snapshot(trainer.drafter, optimizer, progress, counted)
            if writer is not None:
                writer.write(snapshot)

    def validate() -> dict[str, float]:
        def take(index: int) -> tuple[PackedBatch, FeatureBatch]:
            return source.take(Handover("held-out", index, index % targets, drafter))

        own = range(drafter, len(validation), ranks.topology.drafters)
        with replicas.reading():
            return validation.run(trainer, own, take, replicas.sum)

    source.start()
    position, captured, stop = progress.position, -1, False
    with monitor.stage("train") as stage:
        while position < job.steps and not stop:
            step_began, sums, tally = time.monotonic(), trainer.no_sums(), Tally()
            with replicas.step():
                for index, draw in course.micros(position, drafter):
                    if index != captured:
                        handover = Handover("train", index, index % targets, drafter)
                        batch, features = source.take(handover)
                        captured, (epoch, _) = index, job.book.schedule.locate(index)
                        if draw == 0:
                            uses.use(batch.sample_ids)
                    anchors = draw_anchors(
                        batch,
                        anchors_per_sequence=config.batch.anchors_per_sequence,
                        seed=config.seed,
                        epoch=epoch,
                        draw=draw,
                    )
                    blocks = trainer.blocks(batch, anchors)
                    tally.count(trainer, job.cost, batch, blocks, course.draws)
                    if blocks.num_rows:
                        sums += trainer.micro_step(features, batch, blocks)
            position += 1
            if writer is not None:
                writer.check()  # hours of training that could not be saved are worth nothing
            ranks.watch.doing(f"step {position}: summing over the drafters", patience=2)
            tally.waits = source.waits()
            tally.stop = float(asked())
            sums = replicas.reduce(
                torch.cat([sums, to_device(torch.tensor(tally.values()), sums.device)])
            )
            progress = Progress(position, time.monotonic() - began, course)
            try:
                result, values = optimizer.step(sums)
            except UserError:  # too many non-finite steps: what was trained before is kept
                save(progress)
                finish_saving(ranks, writer, best)
                raise
            whole = Tally.of(values[sums_size(B) :])
            stop = whole.stop > 0

            metrics = summarise(values[: sums_size(B)], B)
            if not result.applied:
                metrics = {}
            seconds = time.monotonic() - step_began
            speed = rates(whole, seconds, ranks.topology, peak_tflops, config.target.devices)
            record = metrics | {"seconds": seconds} | speed | source.memory()
            monitor.log("train", position, record | step_record(result, optimizer))
            if validates(position, job.steps, every):
                ranks.watch.doing(f"validating after step {position}", patience=2)
                held_out = validate()
                source.waits()  # validation's, which are no share of the next step's time
                monitor.log("validation", position, held_out)
                if held_out and not config.eval.decode_every:
                    best.consider(progress, held_out["accept_len"], optimizer.parameters)
            if decoding is not None:
                due = validates(position, job.steps, config.eval.decode_every)
                decoding.step(progress, replicas, due=due)
            stage.update(position, job.steps, note(metrics, held_out, result, speed))
            if position % config.run.checkpoint_every == 0:
                ranks.watch.doing(f"saving step {position}", patience=2)
                save(progress)
            if ranks.topology.drafters == 1:  # nobody else to agree with
                stop = asked()
        if decoding is not None:
            decoding.finish(stop and position < job.steps)
        ranks.watch.doing("saving the last step", patience=4)
        save(progress)
        finish_saving(ranks, writer, best)
    stop = stop and position < job.steps
    if stop:
        source.stop()
    return progress, stop


def finish_saving(ranks: Ranks, writer: CheckpointWriter | None, best: Best) -> None:
    """Return, on every drafter, when the last checkpoint is on disk: then all may end."""
    if writer is not None:
        best.wait()
        writer.wait()
        ranks.watch.publish("saved", True)
    elif not ranks.first:
        ranks.watch.wait_for("saved", "waiting for rank 0 to save")


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


def note(
    metrics: dict[str, float],
    held_out: dict[str, float],
    result: StepResult,
    speed: dict[str, float | str],
) -> str:
    """The progress display's text for one step."""
    if not result.applied:
        return f"skipped: {result.reason}"
    text = f"loss {metrics['loss']:.3f}  accept {metrics['accept_len']:.2f}"
    if "accept_len" in held_out:
        text += f"  held-out {held_out['accept_len']:.2f}"
    return f"{text}  {speed['ktok_s']:.2f} Ktok/s, limit: {speed['limit']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: an optional recipe name, then options over that recipe's values."""
    rest = list(sys.argv[1:] if arguments is None else arguments)
    recipe = "one_gpu" if torch.cuda.is_available() else "cpu"
    if rest and rest[0] in RECIPES:
        recipe = rest.pop(0)
    defaults = RECIPES[recipe]()

    def parse() -> TrainConfig:
        prog = f"python -m dflash_ext.train [{'|'.join(RECIPES)}]"
        return parse_options(TrainConfig, rest, default=defaults, prog=prog)

    config = parse()
    if is_export(config.drafter.init):
        # An export brings its own shape: only the user's options may disagree, not the recipe's.
        defaults = dataclasses.replace(defaults, drafter=DrafterOptions())
        config = parse()
    check_given(config)
    hide_progress_bars()
    if started_as_rank():
        return as_rank(config, train)
    size = world_size(config)
    return train(config) if size == 1 else start_local(config, size)


if __name__ == "__main__":
    run_cli(main)
