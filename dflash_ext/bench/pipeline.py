"""`python -m dflash_ext.bench pipeline`: does handing over cost anything?

One target and one drafter, each timed alone on some of the run's batches, then as two ranks: the
pipeline should do the same batches at the pace of the slower one, in memory that does not grow.
Then five targets and three drafters of a tiny model as eight processes, on the GPUs and on the CPU:
both must use each sample once. On request the recipe `eight_gpu` itself (headline.py). Data are
random tokens in documents of realistic lengths, weights are random: speed and memory do not depend
on them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from dflash_ext.bench.headline import earlier, headline
from dflash_ext.bench.markdown import Row
from dflash_ext.bench.pipeline_problem import (
    SHAPES,
    TINY,
    Options,
    alone,
    attempt,
    documents_for,
    pace_of,
    random_run,
    records,
    used,
    write_documents,
    write_shape,
)
from dflash_ext.checkpoint import checkpoints
from dflash_ext.config import (
    BatchOptions,
    DataOptions,
    DrafterOptions,
    LossOptions,
    OptimOptions,
    RunOptions,
    TopologyOptions,
    TrainConfig,
)
from dflash_ext.errors import UserError, run_cli
from dflash_ext.launch import start_local, world_size
from dflash_ext.rates import product_tflops
from dflash_ext.record import save
from dflash_ext.run import resolve_device
from dflash_ext.startup import release
from dflash_ext.torch_api import share_device_memory
from dflash_ext.watch import INTERRUPTED

WARMUP_STEPS, STEPS, ALONE_BATCHES = 20, 320, 40


def run_config(options: Options, work: Path, shape: dict[str, int], **changes: Any) -> TrainConfig:
    """A run on random data and weights, without evaluation."""
    budget = 16384
    config = TrainConfig(
        data=DataOptions(max_length=budget),
        drafter=DrafterOptions(init="random", num_layers=5, block_size=16),
        loss=LossOptions(gamma="10", chunk_rows=4096),
        optim=OptimOptions(name="adamw", lr=1e-4),
        batch=BatchOptions(
            token_budget=budget, max_documents=64, anchors_per_sequence=64, anchor_budget=2048
        ),
        topology=TopologyOptions(targets=1, drafters=1, stall_seconds=90),
        steps=options.steps or STEPS,
    )
    return dataclasses.replace(random_run(config, options, work, shape), **changes)


def one_to_one(options: Options, work: Path) -> dict[str, Any]:
    """The pipeline's pace against that of its slower side; its memory from step to step."""
    shape, skip, count = SHAPES[options.shape], WARMUP_STEPS, options.alone_batches or ALONE_BATCHES
    config = run_config(options, work, shape)
    if config.steps < skip + count:
        raise UserError(
            f"--steps {config.steps} are too few: {skip} warm up, then --alone-batches {count} "
            "are compared"
        )
    write_shape(work / "target", shape)
    documents_for(work / "store", config, shape, config.steps + 1)
    device = resolve_device(options.device)
    pace, _ = alone(config, skip, count)
    peak = product_tflops(device)
    release(device)
    print(json.dumps({"alone": pace, "product_tflops": peak}), flush=True)
    began = time.time()
    code = start_local(config, world_size(config))
    steps = records(work / "run")
    result = {
        "shape": options.shape,
        "token_budget": config.batch.token_budget,
        "exit_code": code,
        "alone_seconds": pace,
        "product_tflops": peak,
        **pace_of(steps, pace, skip, count),
    }
    if steps:
        result["seconds_from_launch_to_first_step"] = steps[0]["time"] - began
    shutil.rmtree(work / "run")  # gigabytes
    return result


def five_to_three(options: Options, work: Path) -> dict[str, Any]:
    """Eight processes over gloo, on the device and on the CPU: what each epoch used."""
    write_shape(work / "target", TINY)
    store = write_documents(work / "store", 60_000, TINY["vocab_size"] - 8, 1024)
    found: dict[str, Any] = {"samples": len(store), "exit_code": 0}
    accounts = []
    tiny = dataclasses.replace(
        options,
        token_budget=2048,
        anchors_per_sequence=8,
        anchor_budget=128,
        layers=1,
        block_size=4,
    )
    for name in dict.fromkeys((resolve_device(options.device).type, "cpu")):
        config = run_config(
            tiny,
            work,
            TINY,
            device=name,
            epochs=2,
            run=RunOptions(dir=work / name, checkpoint_every=10, export=False),
            topology=TopologyOptions(targets=5, drafters=3, stall_seconds=200),
        )
        began = time.time()
        code = start_local(config, world_size(config))
        found["exit_code"] = found["exit_code"] or code
        steps, saved = records(work / name), checkpoints(work / name / "checkpoints")
        found[name] = {"seconds": time.time() - began, "exit_code": code, "steps": len(steps)}
        if code or not saved:
            continue
        position, uses = used(saved[-1])
        blocks = [r["blocks"] for r in steps]
        accounts.append((position, uses, blocks))
        found[name] |= {
            "uses_of_each_sample": sorted(set(uses)),
            "blocks_of_each_step": blocks,
            "first_loss": steps[0]["loss"],
            "last_loss": steps[-1]["loss"],
        }
    if len(accounts) == 2:
        found["accounting_equal"] = accounts[0] == accounts[1]
    return found


def main(arguments: Sequence[str]) -> int:
    """1 if a part failed; the others' results are kept, as is what the failed one had found."""
    options = tyro.cli(
        Annotated[Options, tyro.conf.arg(name="")],
        args=list(arguments),
        prog="python -m dflash_ext.bench pipeline",
    )
    before = earlier(options)
    share_device_memory()  # for what runs in this process; ranks do so themselves
    shutil.rmtree(options.work, ignore_errors=True)
    result: dict[str, Any] = {"benchmark": "pipeline", "gpus": torch.cuda.device_count()}

    def keep(name: str, found: Row) -> None:
        """What is known is kept, whatever comes next."""
        result[name] = found
        save(options.json, result)

    def pieces(options: Options, work: Path) -> Row:
        return headline(options, work, before, partial(keep, "headline"))

    parts: dict[str, Callable[[Options, Path], dict[str, Any]]] = {
        "one_to_one": one_to_one,
        "five_to_three": five_to_three,
        "headline": pieces,
    }
    for name in options.parts:
        work = options.work / name
        work.mkdir(parents=True)
        keep(name, attempt(partial(parts[name], options, work)))
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        if result[name]["exit_code"] == INTERRUPTED:
            return INTERRUPTED
    return int(any(result[name]["exit_code"] for name in options.parts))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
