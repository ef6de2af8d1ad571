"""The part `headline` of `bench pipeline`: the recipe `eight_gpu` as it is, N targets : M drafters.

Pieces, each of which may be measured in a call of its own:

- alone: each side on one device. The N:M run should do a step in the time of the slower side: of
  M batches' captures over N targets, or of one drafter's own batch.
- pace: the N:M run against that; waits, MFU, memory, hand-overs, time until the first step.
- kills: a run of one epoch, in which first a drafter and then a target is killed: how soon all
  ranks have ended, and what the finished run has used in the end.
- losses: the first steps of N:M beside those of 1:1 that accumulates M micro-batches, whose steps
  are of the same batches.

The recipe draws up to 512 anchors a document, so a batch is four times as much work for a drafter
as for a target of 8 B: some 4.8 s on an H200, by what `bench step` found. So with the defaults
`alone` and `pace` should take about 400 s on eight, `kills` and `losses` about 450 s.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dflash_ext.bench.markdown import Row
from dflash_ext.bench.pipeline_problem import (
    SHAPES,
    Options,
    alone,
    attempt,
    documents_for,
    pace_of,
    random_run,
    records,
    used,
    write_shape,
)
from dflash_ext.bench.witness import Blow, launch, memory_of, start_of
from dflash_ext.checkpoint import checkpoints, read_progress
from dflash_ext.config import RunOptions, TopologyOptions, TrainConfig, eight_gpu_recipe
from dflash_ext.errors import UserError
from dflash_ext.plan import Schedule
from dflash_ext.rates import product_tflops
from dflash_ext.record import environment
from dflash_ext.run import resolve_device
from dflash_ext.samples import Samples, schedule_of
from dflash_ext.startup import release
from dflash_ext.target import DTYPES
from dflash_ext.topology import best_split
from dflash_ext.uses import planned_uses
from dflash_ext.watch import INTERRUPTED

WARMUP_STEPS, STEPS, ALONE_STEPS = 8, 40, 6
SAVE_EVERY = 2
"""Steps between the checkpoints of the run that is killed."""
STALL_SECONDS = 240.0
"""More than anything takes here, saving included; a hang shall not cost the whole call."""
# What makes two calls parts of one measurement.
_SAME = ("shape", "targets", "drafters", "recipe", "gpus")


def headline_config(options: Options, work: Path) -> TrainConfig:
    """The recipe on data in `work`/store, with a random target of the shape."""
    recipe = eight_gpu_recipe()
    topology = dataclasses.replace(
        recipe.topology,
        targets=options.targets,
        drafters=options.drafters,
        stall_seconds=STALL_SECONDS,
    )
    recipe = dataclasses.replace(recipe, topology=topology, epochs=None)
    return random_run(recipe, options, work, SHAPES[options.shape])


def earlier(options: Options) -> Row:
    """The headline that lies where the result goes, if one does."""
    if "headline" not in options.parts or not options.json.exists():
        return {}
    found: Row = json.loads(options.json.read_text()).get("headline", {})
    return found


@dataclass(frozen=True)
class Job:
    """What the pieces share."""

    options: Options
    work: Path
    found: Row
    """Of all pieces so far, of earlier calls too."""
    save: Callable[[], None]
    """Keep it: for pieces of several runs, each of which is paid for."""

    @property
    def config(self) -> TrainConfig:
        return headline_config(self.options, self.work)


def headline(options: Options, work: Path, before: Row, keep: Callable[[Row], None]) -> Row:
    """The pieces asked for, each kept (`keep`) as soon as it is known; 1 if one failed.

    before: an earlier result, whose pieces stay if it is of the same run on as many GPUs.
    """
    config, shape = headline_config(options, work), SHAPES[options.shape]
    check_steps(options)
    found: Row = {
        "shape": options.shape,
        "targets": options.targets,
        "drafters": options.drafters,
        "token_budget": config.batch.token_budget,
        "anchors_per_sequence": config.batch.anchors_per_sequence,
        "recipe": {
            name: dataclasses.asdict(getattr(config, name)) for name in ("drafter", "batch", "loss")
        },
        "gpus": torch.cuda.device_count(),
        "exit_code": 0,
    }
    kept = json.loads(json.dumps(found))  # tuples are lists there
    if all(before.get(name) == kept[name] for name in _SAME):
        found |= {name: before[name] for name in PIECES if name in before}
    write_shape(work / "target", shape)
    documents_for(work / "store", config, shape, (timed_steps(options) + 1) * options.drafters)
    job = Job(options, work, found, partial(keep, found))
    for name in options.headline_pieces:
        made = environment()
        piece: Row = {"exit_code": 1, "date": made["date"], "commit": made["commit"]}
        found[name] = piece
        piece |= attempt(partial(_measured, name, job, piece))
        found["exit_code"] = found["exit_code"] or piece["exit_code"]
        job.save()
        print(json.dumps({name: piece}), flush=True)
        if piece["exit_code"] == INTERRUPTED:
            found["exit_code"] = INTERRUPTED
            break
    return found


def _measured(name: str, job: Job, piece: Row) -> Row:
    return {"exit_code": PIECES[name](job, piece)}


def timed_steps(options: Options) -> int:
    return options.steps or STEPS


def alone_steps(options: Options) -> int:
    """Steps whose batches, one for each drafter, each side is timed on alone."""
    if options.alone_batches is None:
        return ALONE_STEPS
    return options.alone_batches // options.drafters


def check_steps(options: Options) -> None:
    """UserError before anything runs, if the numbers of steps do not suffice."""
    count, steps = alone_steps(options), timed_steps(options)
    if count < 1:
        raise UserError(
            f"--alone-batches {options.alone_batches} are less than a step of --drafters "
            f"{options.drafters}"
        )
    if steps < WARMUP_STEPS + count:
        raise UserError(
            f"--steps {steps} are too few: {WARMUP_STEPS} warm up, then the batches of {count} are "
            "compared"
        )


def expected(alone_seconds: Mapping[str, float], targets: int, drafters: int) -> dict[str, float]:
    """Seconds that N targets and M drafters need for what one of each needs `alone_seconds` for.

    The drafters' number supposes that their batches cost the same (`balance`).
    """
    return {
        "target": alone_seconds["target"] / targets,
        "drafter": alone_seconds["drafter"] / drafters,
        "ktok": alone_seconds["ktok"],
    }


def balance(work: Sequence[float], drafters: int) -> float:
    """The share of their own pace that drafters can reach who wait for each other in every step.

    work: of each batch, in the plan's order; a step is as long as its largest batch, and has one
    for each drafter.
    """
    steps = np.reshape(np.asarray(work, dtype=np.float64), (-1, drafters))
    return float(steps.mean(1).sum() / steps.max(1).sum())


def difference(found: Sequence[float], reference: Sequence[float]) -> float:
    """The largest difference of two curves over the reference's value there."""
    a, b = np.asarray(found), np.asarray(reference)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def measure_alone(job: Job, piece: Row) -> int:
    """What each side needs for the batches of the first steps after the warm-up of `pace`."""
    options, device = job.options, resolve_device(job.options.device)
    N, M, count = options.targets, options.drafters, alone_steps(options)
    seconds, tera = alone(job.config, WARMUP_STEPS * M, count * M, ranks=N + M)
    steps = expected(seconds, N, M)
    piece |= {
        "batches": count * M,
        "seconds": seconds,
        "target_seconds_a_batch": seconds["target"] / (count * M),
        "drafter_seconds_a_batch": seconds["drafter"] / (count * M),
        "target_seconds_a_step": steps["target"] / count,
        "drafter_seconds_a_step": steps["drafter"] / count,
        "drafter_tera": [round(value, 6) for value in tera],
        "drafters_balance": balance(tera, M),
        "product_tflops": product_tflops(device),
    }
    # Of these devices, by the two numbers alone.
    best = best_split(N + M, piece["target_seconds_a_batch"], piece["drafter_seconds_a_batch"])
    piece["best_split"] = "{}:{}".format(*best)
    release(device)
    return 0


def measure_pace(job: Job, piece: Row) -> int:
    """The N:M run; compared with what `alone` found, here or in an earlier call."""
    options, folder = job.options, job.work / "run"
    N, M, count = options.targets, options.drafters, alone_steps(options)
    done = launch(
        dataclasses.replace(job.config, steps=timed_steps(options)), job.work / "run-notes"
    )
    piece |= run_facts(folder)
    by_itself, steps = job.found.get("alone", {}), records(folder)
    usable = by_itself.get("batches") == count * M and "seconds" in by_itself
    pace = expected(by_itself["seconds"], N, M) if usable else None
    piece |= pace_of(steps, pace, WARMUP_STEPS, count)
    # Those of the records are of rank 0 and of whichever target it heard of last.
    for name in ("reserved_gib", "target_reserved_gib"):
        piece.pop(name, None)
    piece["memory"] = memory_of(done.notes, M, WARMUP_STEPS)
    if steps:
        needed = [*range(M), *sorted({M + batch % N for batch in range(M)})]
        piece["seconds"] = start_of(done.notes, done.began, steps[0]["time"], needed)
        piece["seconds"]["first_step"] = steps[0]["seconds"]  # its wait for a capture included
    if "ktok_s" in piece and "bytes_a_token" in piece:
        piece["handed_over_gb_s"] = piece["ktok_s"] * 1e3 * piece["bytes_a_token"] / 1e9
    if done.code == 0:
        shutil.rmtree(folder)  # gigabytes
    return done.code


def run_facts(folder: Path) -> Row:
    """What a run's own files say: bytes of features a token, and what they go over."""
    found: Row = {}
    if (folder / "ranks.json").exists():
        table = json.loads((folder / "ranks.json").read_text())
        found["data_over"] = table[0]["data"]
        found["devices"] = [rank["device"] for rank in table]
    if (folder / "resolved.json").exists():
        resolved = json.loads((folder / "resolved.json").read_text())
        drafter, sizes = resolved["drafter"], {str(x): x.itemsize for x in DTYPES.values()}
        width = len(drafter["target_layer_ids"]) * drafter["target_hidden_size"]
        found["bytes_a_token"] = width * sizes[resolved["dtype"]]
    return found


def steps_to_kill(topology: TopologyOptions) -> int:
    """Steps of a run in which no rank has come to its end when the target is killed.

    The drafters stand still in step 2 * SAVE_EVERY + 1, with batches in all buffers but no more;
    beyond these every target has one to capture.
    """
    assert isinstance(topology.targets, int)
    assert topology.drafters is not None
    ahead = topology.buffers - (-topology.targets // topology.drafters)
    return 2 * SAVE_EVERY + ahead


def blows_for(targets: int, drafters: int) -> list[Blow]:
    """Two deaths in a run that saves every SAVE_EVERY steps, of a batch for each drafter.

    The last drafter's in the step after the first checkpoint, its gradients unsummed; then that of
    the target that captures the first batch after the second one, meanwhile.
    """
    batch = 2 * SAVE_EVERY * drafters
    return [
        Blow(rank=drafters - 1, at=f"step {SAVE_EVERY + 1}", saved=SAVE_EVERY),
        Blow(drafters + batch % targets, at=f"capturing batch {batch}", saved=2 * SAVE_EVERY),
    ]


def measure_kills(job: Job, piece: Row) -> int:
    """One epoch with two deaths in it: seconds until all had ended, and the account of samples."""
    options, own, config = job.options, job.work / "kills", job.config
    N, M = options.targets, options.drafters
    batches = steps_to_kill(config.topology) * M
    store = documents_for(own / "store", config, SHAPES[options.shape], batches)
    schedule = schedule_of(config, Samples(store, np.arange(len(store))))
    run = RunOptions(dir=own / "run", checkpoint_every=SAVE_EVERY, export=False)
    data = dataclasses.replace(config.data, train=str(own / "store"))
    config = dataclasses.replace(config, data=data, epochs=1, run=run)
    saved = own / "run" / "checkpoints"
    piece |= {"samples": len(store), "batches": schedule.batches_of(1), "launches": []}
    for number, blow in enumerate([*blows_for(N, M), None]):
        begun = checkpoints(saved)
        row: Row = {"resumed_from": read_progress(begun[-1]).position if begun else 0}
        done = launch(config, own / f"launch-{number}", blow)
        row["exit_code"] = done.code
        if again := [r["time"] for r in records(own / "run") if r["time"] > done.began]:
            row["seconds_to_first_step"] = again[0] - done.began
        if blow is not None:
            role = "drafter" if blow.rank < M else "target"
            row |= {"killed": f"{role}, rank {blow.rank}", "at": blow.at}
        if done.struck is not None:
            row["seconds_until_all_ended"] = done.ended - done.struck
            row |= {"exited_with_0": done.left, "still_there": done.alive}
        piece["launches"].append(row)
        job.save()
        print(json.dumps(row), flush=True)
        if done.code == INTERRUPTED:
            return INTERRUPTED
        if blow is None and done.code:
            return done.code
        if blow is not None and (done.struck is None or done.code == 0):
            raise RuntimeError(f"the run should have died of a kill in {blow.at}")
        config = dataclasses.replace(config, run=dataclasses.replace(run, resume="auto"))
    piece |= account(saved, schedule, M, [r["step"] for r in records(own / "run")])
    if not piece["as_planned"]:
        return 1
    shutil.rmtree(own)
    return 0


def account(saved: Path, schedule: Schedule, drafters: int, steps: Sequence[int]) -> Row:
    """What the last checkpoint of a run of one epoch says it used, beside the uninterrupted plan.

    steps: of the records, those done again after a kill twice.
    """
    batches = schedule.batches_of(1)
    position, uses = used(checkpoints(saved)[-1])
    planned = planned_uses(schedule, batches).tolist()
    # Without a break; the last step may be of fewer batches.
    wanted = list(range(1, -(-batches // drafters) + 1))
    return {
        "steps": position,
        "planned_steps": wanted[-1],
        "steps_done_again": len(steps) - len(set(steps)),
        "uses_of_each_sample": sorted(set(uses)),
        "as_planned": bool(
            uses == planned and position == wanted[-1] and sorted(set(steps)) == wanted
        ),
    }


def measure_losses(job: Job, piece: Row) -> int:
    """Losses of the first steps of N:M, and of one target and one drafter on the same batches."""
    own = job.work / "losses"
    config = dataclasses.replace(job.config, steps=job.options.loss_steps)
    one = dataclasses.replace(
        config,
        topology=dataclasses.replace(config.topology, targets=1, drafters=1),
        batch=dataclasses.replace(config.batch, accumulate=job.options.drafters),
    )
    curves: dict[str, list[Row]] = {}
    for name, arranged in (("split", config), ("one_to_one", one)):
        run = dataclasses.replace(config.run, dir=own / name)
        done = launch(dataclasses.replace(arranged, run=run), own / f"{name}-notes")
        curves[name] = records(own / name)
        piece[f"{name}_losses"] = [r["loss"] for r in curves[name]]
        job.save()
        if done.code:
            return done.code
        shutil.rmtree(own / name)  # gigabytes
    blocks = [[r["blocks"] for r in curve] for curve in curves.values()]
    piece["same_blocks"] = blocks[0] == blocks[1]
    piece["largest_relative_difference"] = difference(
        piece["split_losses"], piece["one_to_one_losses"]
    )
    return 0 if piece["same_blocks"] else 1


PIECES: dict[str, Callable[[Job, Row], int]] = {
    "alone": measure_alone,
    "pace": measure_pace,
    "kills": measure_kills,
    "losses": measure_losses,
}
