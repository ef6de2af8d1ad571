"""`python -m dflash_ext.bench pipeline`: does handing over cost anything?

One target and one drafter, each timed alone on some of the run's batches, then as two ranks: the
pipeline should do the same batches at the pace of the slower one, in memory that does not grow.
Then five targets and three drafters of a tiny model as eight processes, on the GPUs and on the CPU:
both must use each sample once. Data are random tokens in documents of realistic lengths, weights
are random: speed and memory do not depend on them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro

from dflash_ext.blocks import draw_anchors
from dflash_ext.checkpoint import checkpoints, read_progress
from dflash_ext.config import (
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
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.errors import UserError, run_cli
from dflash_ext.launch import start_local, world_size
from dflash_ext.monitor import METRICS_FILE, read_metrics
from dflash_ext.ranks import Ranks
from dflash_ext.rates import product_tflops
from dflash_ext.record import save
from dflash_ext.run import resolve_device
from dflash_ext.samples import Samples, schedule_of
from dflash_ext.startup import build_side, load_target, release
from dflash_ext.transfer import FeatureBatch
from dflash_ext.watch import INTERRUPTED

WARMUP_STEPS = 20

QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
SHAPES = {"qwen3-8b": QWEN3_8B, "tiny": TINY}


@dataclass(frozen=True)
class Options:
    """Time a pipeline of one target and one drafter; count what five and three use."""

    json: Path
    """Where the result goes."""
    work: Path = Path("/tmp/dflash-pipeline")
    """Scratch folder for data, models and runs; emptied first."""
    shape: Literal["qwen3-8b", "tiny"] = "qwen3-8b"
    """Of the target and the drafter that are timed."""
    device: str = "auto"
    token_budget: int = 16384
    anchors_per_sequence: int = 64
    anchor_budget: int = 2048
    layers: int = 5
    """Of the drafter."""
    block_size: int = 16
    steps: int = 320
    """Of the timed run."""
    alone_batches: int = 40
    """Batches that each side is timed on alone: those of the steps after the warm-up."""
    parts: tuple[Literal["one_to_one", "five_to_three"], ...] = ("one_to_one", "five_to_three")


def write_documents(path: Path, tokens: int, vocab_size: int, longest: int) -> TokenStore:
    """A store of random tokens: lengths log-normal around 700, the first third not supervised."""
    draw = np.random.default_rng(0)
    with StoreWriter(path) as writer:
        written = 0
        while written < tokens:
            length = int(np.clip(draw.lognormal(np.log(700), 0.8), 16, longest))
            ids = draw.integers(0, vocab_size, length)
            writer.append(ids.tolist(), (np.arange(length) >= length // 3).tolist())
            written += length
    return TokenStore.open(path)


def write_shape(path: Path, shape: dict[str, int]) -> Path:
    """A directory with the config.json of a Qwen3 model."""
    from transformers import Qwen3Config

    values: dict[str, Any] = dict(shape)
    Qwen3Config(**values, tie_word_embeddings=False).save_pretrained(path)
    return path


def run_config(options: Options, work: Path, shape: dict[str, int], **changes: Any) -> TrainConfig:
    """A run on random data and weights, without evaluation."""
    config = TrainConfig(
        target=TargetOptions(
            path=str(work / "target"), random_weights=True, mask_token_id=shape["vocab_size"] - 1
        ),
        data=DataOptions(train=str(work / "store"), held_out=0, max_length=options.token_budget),
        drafter=DrafterOptions(
            init="random", num_layers=options.layers, block_size=options.block_size
        ),
        loss=LossOptions(gamma="10", chunk_rows=4096),
        optim=OptimOptions(name="adamw", lr=1e-4),
        batch=BatchOptions(
            token_budget=options.token_budget,
            max_documents=64,
            anchors_per_sequence=options.anchors_per_sequence,
            anchor_budget=options.anchor_budget,
        ),
        eval=EvalOptions(prompts_per_set=0, every=0),
        run=RunOptions(dir=work / "run", checkpoint_every=10**6, export=False),
        topology=TopologyOptions(targets=1, drafters=1, stall_seconds=90),
        steps=options.steps,
        device=options.device,
    )
    return dataclasses.replace(config, **changes)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alone(config: TrainConfig, first: int, count: int) -> dict[str, float]:
    """Seconds that each side needs by itself for the plan's batches [first, first + count).

    All that a side does for a batch, one after the other as in a run; the target, which never has
    to wait for its device, hands over to nobody. The drafter's features are random numbers of the
    right shape, so that the target rests. And the batches' tokens, in thousands.
    """
    device = resolve_device(config.device)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))  # as each of two ranks has
    target = load_target(config, str(config.target.path), [device])
    side = build_side(config, Ranks(device=device), target)
    store = TokenStore.open(str(config.data.train))
    schedule = schedule_of(config, Samples(store, np.arange(len(store))))
    trainer, taps = side.trainer, target.tap_ids
    width = trainer.drafter.config.feature_width
    values = torch.randn(config.batch.token_budget, width, device=device, dtype=target.dtype)

    def capture(batches: Sequence[int]) -> None:
        for i in batches:
            target.features(store.batch(schedule.batch(i)))

    def train(batches: Sequence[int]) -> None:
        for i in batches:
            batch = store.batch(schedule.batch(i))
            anchors = draw_anchors(
                batch,
                anchors_per_sequence=config.batch.anchors_per_sequence,
                seed=config.seed,
                epoch=0,
            )
            T, blocks = batch.num_tokens, trainer.blocks(batch, anchors)
            features = FeatureBatch(values[:T], taps, batch.sample_ids, batch.token_hash(), T)
            side.optimizer.step(trainer.micro_step(features, batch, blocks))

    found = {}
    for name, work in (("target", capture), ("drafter", train)):
        work(range(3))  # warms up
        synchronise(device)
        began = time.perf_counter()
        work(range(first, first + count))
        synchronise(device)
        found[name] = time.perf_counter() - began
    tokens = sum(store.lengths[schedule.batch(i)].sum() for i in range(first, first + count))
    return found | {"ktok": float(tokens) / 1e3}


def records(folder: Path) -> list[dict[str, Any]]:
    """Of the steps that a run logged, also if it failed."""
    found = read_metrics(folder) if (folder / METRICS_FILE).exists() else []
    return [record for record in found if record["kind"] == "train"]


def one_to_one(options: Options, work: Path) -> dict[str, Any]:
    """The pipeline's pace against that of its slower side; its memory from step to step."""
    shape, skip, count = SHAPES[options.shape], WARMUP_STEPS, options.alone_batches
    if options.steps < skip + count:
        raise UserError(
            f"--steps {options.steps} are too few: {skip} warm up, then --alone-batches {count} "
            "are compared"
        )
    write_shape(work / "target", shape)
    needed = int(1.02 * options.token_budget * (options.steps + 1))
    write_documents(work / "store", needed, shape["vocab_size"] - 8, options.token_budget // 4)
    config = run_config(options, work, shape)
    device = resolve_device(options.device)
    pace = alone(config, skip, count)
    peak = product_tflops(device)
    release(device)
    print(json.dumps({"alone": pace, "product_tflops": peak}), flush=True)
    began = time.time()
    code = start_local(config, world_size(config))
    steps = records(work / "run")
    result = {
        "shape": options.shape,
        "token_budget": options.token_budget,
        "exit_code": code,
        "alone_seconds": pace,
        "product_tflops": peak,
        **pace_of(steps, pace, skip, count),
    }
    if steps:
        result["seconds_from_launch_to_first_step"] = steps[0]["time"] - began
    shutil.rmtree(work / "run")  # gigabytes
    return result


def pace_of(
    steps: list[dict[str, Any]], alone: dict[str, float], skip: int, count: int
) -> dict[str, Any]:
    """What the records of a run of one target and one drafter say, after `skip` steps to warm up.

    alone: of the batches of the next `count` steps, so that both numbers are of the same work; one
    step trains on one feature batch. A run that ended early says what it can.
    """
    steady = steps[skip:]
    found: dict[str, Any] = {"steps": len(steps)}
    if not steady:
        return found
    ended = [r["time"] for r in steps]
    ktok = sum(r["ktok_s"] * r["seconds"] for r in steady)
    found["ktok_s"] = ktok / (ended[-1] - ended[skip - 1])
    if len(steady) >= count:
        side = max(("target", "drafter"), key=lambda name: alone[name])
        same = ended[skip + count - 1] - ended[skip - 1]
        found["slower_side"] = side
        found["same_batches_seconds"] = same
        found["share_of_slower_side"] = alone[side] / same
        # Of the whole run, by tokens: batches differ in their documents, so this is less sharp.
        found["share_over_all_steps"] = found["ktok_s"] * alone[side] / alone["ktok"]
    names = ("wait_target", "wait_drafter", "wait_transfer", "mfu_target", "mfu_drafter")
    for name in names:
        if name in steady[-1]:
            found[name] = float(np.mean([r[name] for r in steady]))
    for name in ("reserved_gib", "target_reserved_gib"):
        if name in steady[-1]:
            values = [r[name] for r in steady]
            found[name] = {
                "first": values[0],
                "last": values[-1],
                "spread": (max(values) - min(values)) / min(values),
                "steps": len(values),
                "every_20": values[::20],
            }
    found["seconds_of_steps"] = [round(b - a, 3) for a, b in pairwise(ended)]
    return found


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
        uses = torch.load(saved[-1] / "optimizer.pt", weights_only=True)["uses"].tolist()
        blocks = [r["blocks"] for r in steps]
        accounts.append((read_progress(saved[-1]).position, uses, blocks))
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
    shutil.rmtree(options.work, ignore_errors=True)
    result: dict[str, Any] = {"benchmark": "pipeline", "gpus": torch.cuda.device_count()}
    parts: dict[str, Callable[[Options, Path], dict[str, Any]]] = {
        "one_to_one": one_to_one,
        "five_to_three": five_to_three,
    }
    for name in options.parts:
        work = options.work / name
        work.mkdir(parents=True)
        try:
            result[name] = parts[name](options, work)
        except Exception as error:  # the other part may still work, and its time is paid for
            traceback.print_exc()
            result[name] = {"exit_code": 1, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        save(options.json, result)  # what is known is kept, whatever comes next
        if result[name]["exit_code"] == INTERRUPTED:
            return INTERRUPTED
    return int(any(result[name]["exit_code"] for name in options.parts))


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
