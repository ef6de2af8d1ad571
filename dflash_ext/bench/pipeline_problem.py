"""What the parts of `bench pipeline` share: options, shapes, data, one side alone, run records."""

from __future__ import annotations

import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dflash_ext.bench.markdown import Row
from dflash_ext.bench.timing import synchronise
from dflash_ext.blocks import draw_anchors
from dflash_ext.checkpoint import read_progress
from dflash_ext.config import RunOptions, TrainConfig
from dflash_ext.data.store import StoreWriter, TokenStore
from dflash_ext.monitor import METRICS_FILE, read_metrics
from dflash_ext.ranks import Ranks
from dflash_ext.rates import drafter_operations
from dflash_ext.run import resolve_device
from dflash_ext.samples import Samples, schedule_of
from dflash_ext.startup import build_side, load_target
from dflash_ext.transfer import FeatureBatch

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
    """Time a pipeline of one target and one drafter; count what five and three use; headline."""

    json: Path
    """Where the result goes. Pieces of the same headline run that are there already are kept."""
    work: Path = Path("/tmp/dflash-pipeline")
    """Scratch folder for data, models and runs; emptied first."""
    shape: Literal["qwen3-8b", "tiny"] = "qwen3-8b"
    """Of the target and the drafter that are timed."""
    device: str = "auto"
    token_budget: int | None = None
    """None: 16,384, and the recipe's in the headline; so for all sizes until block_size."""
    anchors_per_sequence: int | None = None
    """None: 64."""
    anchor_budget: int | None = None
    """None: 2,048."""
    layers: int | None = None
    """Of the drafter; none: 5."""
    block_size: int | None = None
    """None: 16."""
    steps: int | None = None
    """Of the timed run; none: 320, and 40 in the headline, whose steps take ten times as long."""
    alone_batches: int | None = None
    """That each side is timed on alone: those of the steps after the warm-up. None: 40, and in the
    headline those of 6 steps."""
    parts: tuple[Literal["one_to_one", "five_to_three", "headline"], ...] = (
        "one_to_one",
        "five_to_three",
    )
    targets: int = 5
    """Of the headline."""
    drafters: int = 3
    """Of the headline."""
    headline_pieces: tuple[Literal["alone", "pace", "kills", "losses"], ...] = (
        "alone",
        "pace",
        "kills",
        "losses",
    )
    """What of the headline is measured: over several calls, or all in one. None of them: only what
    they would train on is written, for runs/sweep.sh."""
    loss_steps: int = 4
    """Of the headline's runs whose losses are compared."""


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


def documents_for(
    path: Path, config: TrainConfig, shape: dict[str, int], batches: int
) -> TokenStore:
    """`write_documents` that fill so many of the run's batches, each at most a quarter of one."""
    budget = config.batch.token_budget
    longest = min(config.data.max_length, budget // 4)
    return write_documents(path, int(1.02 * budget * batches), shape["vocab_size"] - 8, longest)


def write_shape(path: Path, shape: dict[str, int]) -> Path:
    """A directory with the config.json of a Qwen3 model."""
    from transformers import Qwen3Config

    values: dict[str, Any] = dict(shape)
    Qwen3Config(**values, tie_word_embeddings=False).save_pretrained(path)
    return path


def random_run(
    config: TrainConfig, options: Options, work: Path, shape: dict[str, int]
) -> TrainConfig:
    """`config` on `work`'s data and random weights, in the sizes asked for, without evaluation."""

    def given(**values: int | None) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    sizes = given(
        token_budget=options.token_budget,
        anchors_per_sequence=options.anchors_per_sequence,
        anchor_budget=options.anchor_budget,
    )
    batch = dataclasses.replace(config.batch, **sizes)
    return dataclasses.replace(
        config,
        target=dataclasses.replace(
            config.target,
            path=str(work / "target"),
            random_weights=True,
            mask_token_id=shape["vocab_size"] - 1,
        ),
        data=dataclasses.replace(
            config.data,
            train=str(work / "store"),
            held_out=0,
            max_length=min(config.data.max_length, batch.token_budget),
        ),
        drafter=dataclasses.replace(
            config.drafter, **given(num_layers=options.layers, block_size=options.block_size)
        ),
        batch=batch,
        eval=dataclasses.replace(config.eval, prompts_per_set=0, every=0),
        run=RunOptions(dir=work / "run", checkpoint_every=10**6, export=False),
        device=options.device,
    )


def alone(
    config: TrainConfig, first: int, count: int, ranks: int = 2
) -> tuple[dict[str, float], list[float]]:
    """Seconds that each side needs by itself for the plan's batches [first, first + count).

    All that a side does for a batch, one after the other as in a run; the target, which never has
    to wait for its device, hands over to nobody. The drafter's features are random numbers of the
    right shape, so that the target rests. And the batches' tokens, in thousands; beside it the
    drafter's operations of each batch, in units of 1e12. ranks: that share the cores in the run.
    """
    device = resolve_device(config.device)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    target = load_target(config, str(config.target.path), [device])
    side = build_side(config, Ranks(device=device), target)
    store = TokenStore.open(str(config.data.train))
    schedule = schedule_of(config, Samples(store, np.arange(len(store))))
    trainer, taps = side.trainer, target.tap_ids
    width = trainer.drafter.config.feature_width
    values = torch.randn(config.batch.token_budget, width, device=device, dtype=target.dtype)
    tera: dict[int, float] = {}

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
            tera[i] = drafter_operations(trainer.drafter.config, blocks) / 1e12
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
    timed = range(first, first + count)
    tokens = sum(store.lengths[schedule.batch(i)].sum() for i in timed)
    return found | {"ktok": float(tokens) / 1e3}, [tera[i] for i in timed]


def records(folder: Path) -> list[dict[str, Any]]:
    """Of the steps that a run logged, also if it failed."""
    found = read_metrics(folder) if (folder / METRICS_FILE).exists() else []
    return [record for record in found if record["kind"] == "train"]


def used(checkpoint: Path) -> tuple[int, list[int]]:
    """(steps behind it, uses of each sample) of a run's checkpoint."""
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True, mmap=True)
    return read_progress(checkpoint).position, state["uses"].tolist()


def flatness(values: Sequence[float]) -> Row:
    """How far memory, in GiB at each step, is from staying as it is."""
    return {
        "first": values[0],
        "last": values[-1],
        "spread": (max(values) - min(values)) / min(values),
        "steps": len(values),
        "every_20": values[::20],
    }


def pace_of(
    steps: list[dict[str, Any]], alone: dict[str, float] | None, skip: int, count: int
) -> dict[str, Any]:
    """What the records of a run say, after `skip` steps to warm up.

    alone: seconds that each side by itself needs for the batches of the next `count` steps, so that
    both numbers are of the same work; None: not known. A run that ended early says what it can.
    """
    steady = steps[skip:]
    found: dict[str, Any] = {"steps": len(steps)}
    if not steady:
        return found
    ended = [r["time"] for r in steps]
    ktok = sum(r["ktok_s"] * r["seconds"] for r in steady)
    found["ktok_s"] = ktok / (ended[-1] - ended[skip - 1])
    if alone is not None and len(steady) >= count:
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
            found[name] = flatness([r[name] for r in steady])
    found["seconds_of_steps"] = [round(b - a, 3) for a, b in pairwise(ended)]
    return found


def attempt(work: Callable[[], Row]) -> Row:
    """What `work` found, or the error that it ended with: what follows may still be measured."""
    try:
        return work()
    except Exception as error:  # the others may still work, and their time is paid for
        traceback.print_exc()
        return {"exit_code": 1, "error": f"{type(error).__name__}: {error}"}
