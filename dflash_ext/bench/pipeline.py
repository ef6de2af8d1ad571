"""`python -m dflash_ext.bench.pipeline`: does handing over cost anything?

One target and one drafter, each timed alone on the same batches, then as two ranks: the pipeline
should move at the pace of the slower one, in memory that does not grow. Then five targets and three
drafters of a tiny model as eight processes, on the GPUs and on the CPU: both must use each sample
once. Data are random tokens in documents of realistic lengths, weights are random: speed and memory
do not depend on them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from dflash_ext.ranks import Ranks
from dflash_ext.rates import product_tflops
from dflash_ext.record import save
from dflash_ext.run import resolve_device
from dflash_ext.samples import Samples, schedule_of
from dflash_ext.startup import build_side, load_target
from dflash_ext.transfer import FeatureBatch

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
    alone_batches: int = 24
    """Batches that each side is timed on alone."""
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
        run=RunOptions(dir=work / "run", checkpoint_every=10**6),
        topology=TopologyOptions(targets=1, drafters=1, stall_seconds=200),
        steps=options.steps,
        device=options.device,
    )
    return dataclasses.replace(config, **changes)


def timed(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def alone(config: TrainConfig, count: int) -> dict[str, float]:
    """Seconds per thousand target tokens of each side, on the plan's first batches.

    The drafter's features are random numbers of the right shape, so that the target rests.
    """
    device = resolve_device(config.device)
    target = load_target(config, str(config.target.path), device)
    side = build_side(config, Ranks(device=device), target)
    store = TokenStore.open(str(config.data.train))
    samples = Samples(store, np.arange(len(store)))
    schedule, trainer = schedule_of(config, samples), side.trainer
    shape, taps = trainer.drafter.config, target.tap_ids
    values = torch.randn(config.batch.token_budget, shape.feature_width, device=device)
    values = values.to(target.dtype)
    seconds, tokens = {"target": 0.0, "drafter": 0.0}, 0
    for i in range(count + 3):
        batch = store.batch(schedule.batch(i))
        anchors = draw_anchors(
            batch,
            anchors_per_sequence=config.batch.anchors_per_sequence,
            seed=config.seed,
            epoch=0,
        )
        blocks, T = trainer.blocks(batch, anchors), batch.num_tokens
        features = FeatureBatch(values[:T], taps, batch.sample_ids, batch.token_hash(), T)

        def draft() -> None:
            side.optimizer.step(trainer.micro_step(features, batch, blocks))  # noqa: B023

        found = {
            "target": timed(lambda: target.features(batch), device),  # noqa: B023
            "drafter": timed(draft, device),
        }
        if i >= 3:  # the first ones warm up
            tokens += T
            seconds = {name: seconds[name] + found[name] for name in seconds}
    return {name: total / tokens * 1e3 for name, total in seconds.items()} | {
        "tokens_per_batch": tokens / count
    }


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "train"]


def one_to_one(options: Options, work: Path) -> dict[str, Any]:
    """The pipeline's pace against that of its slower side; its memory from step to step."""
    shape = SHAPES[options.shape]
    write_shape(work / "target", shape)
    needed = int(1.02 * options.token_budget * (options.steps + 1))
    write_documents(work / "store", needed, shape["vocab_size"] - 8, options.token_budget // 4)
    config = run_config(options, work, shape)
    device = resolve_device(options.device)
    pace = alone(config, options.alone_batches)
    peak = product_tflops(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    began = time.time()
    if start_local(config, world_size(config)):
        raise UserError("the pipeline failed: see above")
    steps = records(work / "run")
    steady = [r for r in steps if r["step"] > WARMUP_STEPS]
    first, last = steps[WARMUP_STEPS - 1]["time"], steady[-1]["time"]
    tokens = sum(r["ktok_s"] * r["seconds"] for r in steady)  # thousands
    found = (last - first) / tokens
    slower = max(pace["target"], pace["drafter"])
    result: dict[str, Any] = {
        "shape": options.shape,
        "token_budget": options.token_budget,
        "steps": len(steps),
        "alone_ms_per_ktok": {name: 1e3 * pace[name] for name in ("target", "drafter")},
        "pipeline_ms_per_ktok": 1e3 * found,
        "slower_side": "target" if pace["target"] > pace["drafter"] else "drafter",
        "share_of_slower_side": slower / found,
        "ktok_s": 1 / found,
        "seconds_from_launch_to_first_step": steps[0]["time"] - began,
        "product_tflops": peak,
    }
    names = ("wait_target", "wait_drafter", "wait_transfer", "mfu_target", "mfu_drafter")
    for name in names:
        if name in steady[-1]:
            result[name] = float(np.mean([r[name] for r in steady]))
    for name in ("reserved_gib", "target_reserved_gib"):
        if name in steady[-1]:
            values = [r[name] for r in steady]
            result[name] = {
                "first": values[0],
                "last": values[-1],
                "spread": (max(values) - min(values)) / min(values),
                "every_20": values[::20],
            }
    shutil.rmtree(work / "run")  # gigabytes
    return result


def five_to_three(options: Options, work: Path) -> dict[str, Any]:
    """Eight processes over gloo, on the device and on the CPU: what each epoch used."""
    write_shape(work / "target", TINY)
    store = write_documents(work / "store", 60_000, TINY["vocab_size"] - 8, 1024)
    found: dict[str, Any] = {"samples": len(store)}
    counts = {}
    device = resolve_device(options.device).type
    for name in dict.fromkeys((device, "cpu")):
        tiny = dataclasses.replace(
            options, token_budget=2048, anchors_per_sequence=8, anchor_budget=128, layers=1
        )
        config = run_config(
            dataclasses.replace(tiny, block_size=4),
            work,
            TINY,
            device=name,
            epochs=2,
            run=RunOptions(dir=work / name, checkpoint_every=10),
            topology=TopologyOptions(targets=5, drafters=3, stall_seconds=200),
        )
        began = time.time()
        code = start_local(config, world_size(config))
        if code:
            raise UserError(f"five to three on {name} ended with exit code {code}: see above")
        last = checkpoints(work / name / "checkpoints")[-1]
        uses = torch.load(last / "optimizer.pt", weights_only=True)["uses"]
        counts[name] = uses
        steps = records(work / name)
        found[name] = {
            "seconds": time.time() - began,
            "steps": read_progress(last).position,
            "uses_of_each_sample": sorted(set(uses.tolist())),
            "blocks_of_each_step": [r["blocks"] for r in steps],
            "first_loss": steps[0]["loss"],
            "last_loss": steps[-1]["loss"],
        }
    first, second = (found[n]["blocks_of_each_step"] for n in (device, "cpu"))
    found["accounting_equal"] = bool(torch.equal(counts[device], counts["cpu"]) and first == second)
    return found


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(
        Annotated[Options, tyro.conf.arg(name="")],
        args=list(arguments),
        prog="python -m dflash_ext.bench.pipeline",
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
        result[name] = parts[name](options, work)
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        save(options.json, result)  # what is known is kept, whatever comes next


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
