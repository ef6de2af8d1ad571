"""`python -m dflash_ext.bench step`: the whole drafter step beside its straightforward composition.

Published drafters' shapes with random weights. Per batch: forward, loss (with its gradient),
backward and optimizer; MFU (useful operations over the 8192^3 product's rate in the same rounds);
peak memory; the composition's time in the same rounds. Then `--walk` steps of random lengths and
anchor counts: does memory grow, and is a never-seen shape slower than the same one seen again?
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_ext.bench import anchors
from dflash_ext.bench.command import keep, parsed, parser_of
from dflash_ext.bench.composition import Composition, mixes, numerator, slot_embeddings
from dflash_ext.bench.footprint import gib, peak_of
from dflash_ext.bench.kernel_kinds import kinds_of, line
from dflash_ext.bench.markdown import Row
from dflash_ext.bench.step_problem import (
    DRAFTERS,
    Case,
    cases,
    random_batch,
    random_trainer,
)
from dflash_ext.bench.timing import Clock, synchronise, tidy, timer
from dflash_ext.blocks import Blocks
from dflash_ext.config import OptimOptions
from dflash_ext.errors import UserError
from dflash_ext.fp8 import fits_fp8
from dflash_ext.loss import LossOutput, quantised_head
from dflash_ext.memory import largest_ds
from dflash_ext.metrics import slot_sums
from dflash_ext.ops.kept import room_for_ds
from dflash_ext.optim import DrafterOptimizer
from dflash_ext.rates import drafter_operations
from dflash_ext.startup import release
from dflash_ext.torch_api import share_device_memory
from dflash_ext.trainer import Inputs, Trainer

LARGEST_DIFFERENCE = 0.02  # of the loss: bf16 against bf16 in another order


class TimedTrainer:
    """Marks around the parts of a trainer's micro-step; it stays the trainer's own code."""

    def __init__(self, trainer: Trainer, clock: Clock) -> None:
        self.trainer, self.clock = trainer, clock
        self._marks: dict[str, list[tuple[Any, Any]]] = {}
        trainer.hidden = self._marked("forward", trainer.hidden)  # type: ignore[method-assign]
        trainer.loss = self._marked("loss", trainer.loss)  # type: ignore[method-assign]

    def _marked(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **keywords: Any) -> Any:
            begin = self.clock.mark()
            result = run(*args, **keywords)
            self._marks.setdefault(name, []).append((begin, self.clock.mark()))
            return result

        return marked

    def step(self, problem: Any, optimizer: DrafterOptimizer | None) -> dict[str, float]:
        """ms of forward, loss, backward (with what is between) and optimizer of one step."""
        self._marks.clear()
        begin = self.clock.mark()
        sums = self.trainer.micro_step(*problem)
        middle = self.clock.mark()
        if optimizer is None:
            self.trainer.drafter.zero_grad()
        else:
            optimizer.step(sums)
        end = self.clock.mark()
        synchronise(self.trainer.device.type)
        ms = self.clock.ms
        found = {name: sum(ms(*pair) for pair in pairs) for name, pairs in self._marks.items()}
        found["step"] = ms(begin, middle)
        found["backward"] = found["step"] - found["forward"] - found["loss"]
        return found | {"optimizer": ms(middle, end)}


class Baseline:
    """The composition with the trainer's weights, on the same batch, in the dtype of its features.

    compiled: with compiled flex_attention; otherwise with SDPA and the dense mask.
    """

    def __init__(self, trainer: Trainer, inputs: Inputs, *, compiled: bool) -> None:
        config, features = trainer.drafter.config, inputs.features
        with features.device:
            self.model = Composition(config)
        self.model.load_state_dict(trainer.drafter.state_dict())
        self.model.to(features.dtype)
        self.inputs, self.head = inputs, trainer.head.to(features.dtype)
        self.embeds = slot_embeddings(inputs, trainer.embedding.to(features.dtype))
        blocks = inputs.blocks
        drafter = trainer.drafter
        layouts = drafter.layouts(blocks.ctx_start, blocks.ctx_end, features.shape[0])
        self.mixes = mixes(layouts, self.embeds.shape[0], compiled=compiled)

    def loss(self) -> Tensor:
        return numerator(self.model, self.inputs, self.embeds, self.head, self.mixes)

    def step(self) -> None:
        self.loss().backward()
        self.model.zero_grad()


def measure(case: Case, device: str, rounds: int, blocks_at_once: int, baseline: bool) -> Row:
    """One row. Raises RuntimeError if ours and the composition do not compute the same loss."""
    release(torch.device(device))  # what the case before left in cycles is no part of this peak
    config, clock = DRAFTERS[case.drafter], Clock(device)
    trainer = random_trainer(config, device, blocks_at_once)
    problem = random_batch(trainer, case.documents, case.anchors)
    blocks = problem[2]
    timed = TimedTrainer(trainer, clock)
    row: Row = {"case": case.name, "drafter": case.drafter, "tokens": case.tokens}
    row |= {"blocks": blocks.num_blocks, "rows": blocks.num_rows}
    timed.step(problem, None)
    row["peak_gib"] = peak_of(device, lambda: timed.step(problem, None))
    optimizer = DrafterOptimizer(trainer.drafter, OptimOptions(name="adamw", lr=1e-9), 1 << 20)
    timed.step(problem, optimizer)
    row["peak_with_optimizer_gib"] = peak_of(device, lambda: timed.step(problem, optimizer))
    runs: dict[str, Callable[[], float]] = {}
    if baseline:
        runs |= _baseline(row, trainer, problem, device)
    runs["product"] = anchors.timed_products(device)
    if device == "cuda" and fits_fp8(trainer.device):
        runs["fp8_head"] = _with_fp8_head(trainer, lambda: timed.step(problem, None)["step"])
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            times.setdefault(name, []).append(run())
        for name, ms in timed.step(problem, optimizer).items():
            times.setdefault(name, []).append(ms)
    medians = {name: statistics.median(values) for name, values in times.items()}
    product_rate = anchors.product_flops(device) / medians.pop("product") / 1e9
    row |= {f"{name}_ms": ms for name, ms in medians.items()}
    row["product_tflops"] = product_rate
    operations = drafter_operations(config, blocks)
    row["useful_tflop"] = operations / 1e12
    row["mfu"] = operations / medians["step"] / 1e9 / product_rate
    if "baseline" in medians:
        row["over_baseline"] = medians["baseline"] / medians["step"]
    row = tidy(row)
    if device == "cuda":
        row["kinds"] = {"step": kinds_of(lambda: timed.step(problem, None))}
    return row


def _with_fp8_head(trainer: Trainer, run: Callable[[], float]) -> Callable[[], float]:
    """`run` as with --loss.fp8-head; the FP8 copy of the head is made now."""
    head = quantised_head(trainer.head)

    def changed() -> float:
        trainer.head_fp8 = head
        try:
            return run()
        finally:
            trainer.head_fp8 = None

    return changed


def _baseline(
    row: Row, trainer: Trainer, problem: Any, device: str
) -> dict[str, Callable[[], float]]:
    """The composition's run, checked against ours; nothing where it does not fit the device."""
    features, batch, blocks = problem
    try:
        inputs = trainer.inputs(features, batch, blocks)
        other = Baseline(trainer, inputs, compiled=device == "cuda")
        ours = float(_numerator(trainer, problem))
        theirs = float(other.loss().detach())
        row["baseline_peak_gib"] = peak_of(device, other.step)
    except torch.OutOfMemoryError:
        row["baseline_failed"] = "out of memory"
        return {}
    row["loss_difference"] = abs(ours - theirs) / abs(theirs)
    if not row["loss_difference"] < LARGEST_DIFFERENCE:
        raise RuntimeError(f"{row['case']}: loss {ours:.6g}, the composition's is {theirs:.6g}")
    return {"baseline": timer(other.step, device)}


@torch.no_grad()
def _numerator(trainer: Trainer, problem: tuple[Any, Any, Blocks]) -> Tensor:
    features, batch, blocks = problem

    def part(blocks: Blocks) -> tuple[LossOutput, Blocks]:
        inputs = trainer.inputs(features, batch, blocks)
        return trainer.loss(trainer.hidden(inputs, supervised=True), inputs), inputs.blocks

    size = trainer.config.batch.blocks_at_once
    return torch.stack([slot_sums(*part(b))[0] for b in blocks.chunks(size)]).sum()


def walk(drafter: str, device: str, steps: int, blocks_at_once: int, largest: int) -> Row:
    """Random lengths and anchor counts: memory over the walk, first-seen against seen again."""
    release(torch.device(device))
    trainer = random_trainer(DRAFTERS[drafter], device, blocks_at_once)
    timed = TimedTrainer(trainer, Clock(device))
    optimizer = DrafterOptimizer(trainer.drafter, OptimOptions(name="adamw", lr=1e-9), 1 << 20)
    optimizer.allocate()
    draw = torch.Generator().manual_seed(0)

    def problem(seed: int, full: bool = False) -> Any:
        documents, left = list[int](), largest
        while left > 8:
            drawn = int(torch.randint(8, largest // 2, (1,), generator=draw))
            documents.append(min(left, largest // 4 if full else drawn))
            left -= documents[-1]
            if not full and torch.rand(1, generator=draw) < 0.1:
                break
        most = largest // 8
        count = most if full else int(torch.randint(1, most + 1, (1,), generator=draw))
        return random_batch(trainer, tuple(documents), count, seed)

    # The largest legal batch is step 0, as in training.
    options = dataclasses.replace(trainer.config.batch, token_budget=largest)
    with room_for_ds(largest_ds(trainer.drafter.config, options, largest // 2)):
        timed.step(problem(0, full=True), optimizer)
    reserved, ratios = [], []
    for seed in range(1, steps + 1):
        batch = problem(seed)
        first = timed.step(batch, optimizer)["step"]
        reserved.append(gib(torch.cuda.memory_reserved()) if device == "cuda" else 0.0)
        if seed % 10 == 0:
            ratios.append(first / timed.step(batch, optimizer)["step"])
    row: Row = {"drafter": drafter, "steps": steps, "largest_tokens": largest}
    if ratios:
        row |= {"first_over_seen": statistics.median(ratios), "worst_first_over_seen": max(ratios)}
    if device == "cuda":
        row |= {"reserved_first_gib": reserved[0], "reserved_last_gib": reserved[-1]}
        row["reserved_growth"] = max(reserved) / reserved[0] - 1
    return tidy(row)


def main(argv: Sequence[str]) -> None:
    parser = parser_of("step", __doc__)
    parser.add_argument(
        "--drafters", nargs="*", choices=sorted(DRAFTERS), help="none after it: the walk alone"
    )
    parser.add_argument("--blocks-at-once", type=int, default=1024)
    parser.add_argument("--walk", type=int, help="steps of random shapes (default 1000; CPU 20)")
    parser.add_argument("--no-baseline", action="store_true")
    args = parsed(parser, argv, rounds=7, cpu_rounds=3)
    if args.blocks_at_once < 1 or (args.walk or 0) < 0:
        raise UserError("--blocks-at-once must be at least 1, --walk at least 0")
    share_device_memory()  # as a training run does
    on_gpu = args.device == "cuda"
    result: Row = {"benchmark": "step", "rows": [], "walks": []}
    drafters = args.drafters
    if drafters is None:
        drafters = ("qwen3-8b", "qwen3.6-27b") if on_gpu else ("small",)
    for drafter in drafters:
        for case in cases(drafter):
            row = measure(case, args.device, args.rounds, args.blocks_at_once, not args.no_baseline)
            result["rows"].append(row)
            keep(args.json, result)
            print(line(row), flush=True)
    steps = args.walk if args.walk is not None else (1000 if on_gpu else 20)
    if steps:
        drafter, largest = ("qwen3-8b", 4096) if on_gpu else ("small", 512)
        # Of the largest batch's blocks half at once: steps of one turn and of two.
        at_once = min(args.blocks_at_once, largest // 16)
        result["walks"].append(walk(drafter, args.device, steps, at_once, largest))
        keep(args.json, result)
        print(line(result["walks"][0]), flush=True)
