"""`python -m dflash_ext.bench attention`: the operator against what torch offers, in the same run.

On CUDA: shapes A-D beside the bf16 8192^3 matrix product and our own plain Triton path, and beside
torch's compiled flex_attention on the same mask and cuDNN's dense causal attention; sweeps over one
dimension at a time; first call against the hundredth. On the CPU: the C++ operator
against scaled_dot_product_attention with the dense mask.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from dflash_ext.bench import anchors, command, plot, tables
from dflash_ext.bench.command import parsed, parser_of
from dflash_ext.bench.first_call import first_calls
from dflash_ext.bench.markdown import Row
from dflash_ext.bench.problem import (
    BACKWARD_FLOPS,
    FORWARD_FLOPS,
    Problem,
    forced_runs,
    kept_bytes,
    make_problem,
    operator_runs,
    recomputed_run,
    useful_pairs,
    without_window,
)
from dflash_ext.bench.shapes import CPU_SHAPES, CUDA_SHAPES, Shape, missed, sweeps
from dflash_ext.bench.timing import Run, interleaved, rounded, tidy
from dflash_ext.errors import UserError
from dflash_ext.ops.attention_call import attention_path
from dflash_ext.ops.layout import AttentionLayout
from dflash_ext.record import environment

BURST = 0.06  # seconds at a stretch: at the power limit, as training is, if the one before was
MORE = 3  # times as many rounds where few percent decide
PASSES = {"fwd": FORWARD_FLOPS, "bwd": BACKWARD_FLOPS}


def own_numbers(work: int, seconds: Mapping[str, float]) -> Row:
    """Our speeds, and their ratios to the product's, from the medians of one measurement.

    `work` is visible pairs * Hq * D; both speeds are of useful FLOP/s.
    """
    product = anchors.product_flops("cuda") / seconds["product"] / 1e12
    row: Row = {"product_tflops": product}
    for p, flops in PASSES.items():
        row[f"{p}_ms"] = seconds[p] * 1e3
        for name in ("", "triton ", "recomputed ", "triton recomputed "):
            if f"{name}{p}" in seconds:
                key = f"{name}{p}".replace(" ", "_")
                row[f"{key}_tflops"] = flops * work / seconds[f"{name}{p}"] / 1e12
                row[f"{key}_over_product"] = row[f"{key}_tflops"] / product
    return row | {"layout_ms": seconds["layout"] * 1e3}


def anchor_numbers(work: int, seconds: Mapping[str, float]) -> Row:
    """The anchors' speeds, and ours in units of theirs in the same rounds.

    Of useful FLOP/s for cuDNN (the faster of its two lengths), of time for flex.
    """
    row: Row = {}
    for p, flops in PASSES.items():
        dense = [
            flops / FORWARD_FLOPS * anchors.cudnn_flops(n) / seconds[f"cudnn {n} {p}"] / 1e12
            for n in anchors.CUDNN_LENGTHS
            if f"cudnn {n} {p}" in seconds
        ]
        if dense:
            row[f"cudnn_{p}_tflops"] = max(dense)
            row[f"{p}_over_cudnn"] = flops * work / seconds[p] / 1e12 / max(dense)
        for name in ("flex", "flex intervals"):
            if f"{name} {p}" in seconds:
                key = name.replace(" ", "_")
                row[f"{key}_{p}_tflops"] = flops * work / seconds[f"{name} {p}"] / 1e12
                row[f"{p}_over_{key}"] = seconds[f"{name} {p}"] / seconds[p]
    return row


def window_overhead(pairs: int, plain_pairs: int, seconds: Mapping[str, float]) -> Row:
    """How much longer a visible pair takes with the window than without it (0.05: 5 % longer)."""
    row: Row = {"plain_pairs": plain_pairs}
    for p in PASSES:
        row[f"{p}_overhead"] = (seconds[p] / pairs) / (seconds[f"plain {p}"] / plain_pairs) - 1
    return row


class CudaBench:
    """The measurement on one GPU: `result` is filled section by section and kept after each."""

    def __init__(self, rounds: int, keep: Callable[[Row], None], dense: bool) -> None:
        self.rounds = rounds
        self.keep = keep
        self.result: Row = {"shapes": [], "sweeps": [], "first_calls": [], "failed": []}
        self.product = {"product": anchors.product_run("cuda")}
        self.dense: dict[str, Run] = {}
        for length in anchors.CUDNN_LENGTHS if dense else ():
            self.dense |= self._anchor(f"cudnn {length}", partial(anchors.cudnn_runs, length))

    def _anchor(self, name: str, set_up: Callable[[], dict[str, Run]]) -> dict[str, Run]:
        """An anchor's contestants; one that fails is said and kept, and does not end the run."""
        try:
            return set_up()
        except anchors.WrongResult:
            raise
        except Exception as error:
            line = f"{name}: {type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"anchor failed: {line}", flush=True)
            self.result["failed"].append(line)
            return {}

    def row(self, shape: Shape, flex: bool = False, triton: bool = False, times: int = 1) -> Row:
        """One shape beside every contestant; a window also beside the same pairs without it.

        Ours and the product have rounds of their own, `times` as many: every contestant runs at the
        card's power limit, at a clock of its own, and a burst inherits that of the one before it.
        Behind flex, which leaves the highest, both are 12 to 24 % faster (docs/kernel_notes.md).
        """
        problem = make_problem(shape, "cuda", torch.bfloat16)
        layout = problem.build_layout()
        both = operator_runs(problem, layout)
        build = {"layout": both.pop("layout")}
        ours = self.product | both | (self._paths(problem, layout) if triton else {})
        seconds = interleaved(ours, "cuda", times * self.rounds, BURST)
        # Apart, because a burst of it leaves the card idle.
        seconds |= interleaved(build, "cuda", self.rounds, BURST)
        pairs, path = useful_pairs(layout), attention_path(problem.leaves, layout)
        work = pairs * shape.Hq * shape.D
        row: Row = {"shape": shape.name, "what": shape.what, "path": path, "pairs": pairs}
        row |= own_numbers(work, seconds) | {"kept_gb": kept_bytes(problem, layout) / 1e9}
        others = self.dense | (self._flex(problem, layout, row) if flex else {})
        if others:
            row |= anchor_numbers(work, interleaved(both | others, "cuda", self.rounds, BURST))
        plain = without_window(problem)
        if plain.shape != problem.shape:
            row |= self._window(plain, both, pairs)
        ratios = ", ".join(f"{p} {row[f'{p}_over_product']:.3f}" for p in PASSES)
        print(f"{shape.name}: {path}, × product {ratios}", flush=True)
        return tidy(row)

    def _paths(self, problem: Problem, layout: AttentionLayout) -> dict[str, Run]:
        """Ours on the plain path, and both paths' backward with dS recomputed."""
        forced = partial(forced_runs, problem, layout, "triton")
        runs = self._anchor(f"plain Triton {problem.shape.name}", forced)
        runs["recomputed bwd"] = recomputed_run(problem, layout, None)
        runs["triton recomputed bwd"] = recomputed_run(problem, layout, "triton")
        return runs

    def _flex(self, problem: Problem, layout: AttentionLayout, row: Row) -> dict[str, Run]:
        """Flex with either mask; what the one by documents costs before it runs goes into `row`."""
        runs: dict[str, Run] = {}
        masks = {
            "flex intervals": anchors.flex_visible(layout),
            "flex": anchors.flex_by_document(problem),
        }

        def set_up(name: str) -> dict[str, Run]:
            made, costs = anchors.flex_runs(name, masks[name], problem, layout)
            row.update(costs if name == "flex" else {})
            return made

        for name in masks:
            runs |= self._anchor(f"{name} {problem.shape.name}", partial(set_up, name))
        return runs

    def _window(self, plain: Problem, both: dict[str, Run], pairs: int) -> Row:
        """`both` passes of a window over `pairs` against those of `without_window`."""
        layout = plain.build_layout()
        runs = operator_runs(plain, layout)
        against = both | {f"plain {p}": runs[p] for p in PASSES}
        seconds = interleaved(against, "cuda", MORE * self.rounds, BURST)
        row = window_overhead(pairs, useful_pairs(layout), seconds)
        return row | {"plain_path": attention_path(plain.leaves, layout)}

    def shapes(self, flex: bool) -> None:
        for shape in CUDA_SHAPES:
            row = self.row(shape, flex=flex, triton=True, times=MORE)
            self.result["shapes"].append(row)
            for line in missed(row):
                print(f"floor missed: {line}", flush=True)
            self.keep(self.result)
            torch.cuda.empty_cache()
        print(tables.attention_table(self.result["shapes"]), flush=True)

    def sweeps(self) -> None:
        for sweep, shape in sweeps():
            self.result["sweeps"].append({"sweep": sweep} | self.row(shape))
            self.keep(self.result)
        print(tables.sweep_table(self.result["sweeps"]), flush=True)
        print(tables.window_table(self.result["sweeps"]), flush=True)

    def first_calls(self) -> None:
        self.result["first_calls"] = first_calls()
        self.keep(self.result)
        print(tables.first_call_table(self.result["first_calls"]), flush=True)


def cpu_row(shape: Shape, dtype: torch.dtype, rounds: int) -> Row:
    problem = make_problem(shape, "cpu", dtype)
    layout = problem.build_layout()
    runs = {"product": anchors.product_run("cpu")} | operator_runs(problem, layout)
    t = interleaved(runs | anchors.sdpa_runs(problem, layout), "cpu", rounds)
    work = useful_pairs(layout) * shape.Hq * shape.D
    row: Row = {
        "shape": shape.name,
        "dtype": str(dtype).removeprefix("torch."),
        "path": attention_path(problem.leaves, layout),
        "product_gflops": anchors.product_flops("cpu") / t["product"] / 1e9,
    }
    for p, flops in PASSES.items():
        row |= {f"{p}_ms": t[p] * 1e3, f"{p}_gflops": flops * work / t[p] / 1e9}
        row[f"sdpa_{p}_gflops"] = flops * work / t[f"sdpa {p}"] / 1e9
        row[f"{p}_over_sdpa"] = t[f"sdpa {p}"] / t[p]
    row["over_sdpa"] = (t["sdpa fwd"] + t["sdpa bwd"]) / (t["fwd"] + t["bwd"])
    return tidy(row)


def bench_cpu(shapes: Sequence[Shape], rounds: int) -> Row:
    dtypes = (torch.float32, torch.bfloat16)
    rows = []
    for shape in shapes:
        for dtype in dtypes:
            rows.append(cpu_row(shape, dtype, rounds))
            row = rows[-1]
            print(f"{shape.name}, {row['dtype']}: × SDPA {row['over_sdpa']:.1f}", flush=True)
    print(tables.cpu_table(rows), flush=True)
    return {"shapes": rows}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("attention", __doc__)
    for name, what in (
        ("flex", "torch's compiled flex_attention on A-D"),
        ("dense", "cuDNN's dense causal attention in every row"),
        ("sweeps", "one dimension at a time around a base shape"),
        ("first-calls", "first against hundredth call of never-seen shapes"),
    ):
        parser.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, help=f"{what} (CUDA: on)"
        )
    parser.add_argument("--png", type=Path, default=None, help="draw the speeds into this file")
    args = parsed(parser, argv, rounds=5, cpu_rounds=3)
    for name in ("flex", "dense", "sweeps", "first_calls"):
        given = getattr(args, name)
        if args.device == "cuda":
            setattr(args, name, given is not False)
        elif given is not None:
            option = name.replace("_", "-")
            raise UserError(f"--{option} and --no-{option} are for CUDA: leave it out on the CPU")
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    if args.png:
        plot.require_matplotlib()  # before the measurement, not after it
    torch.manual_seed(0)
    started = time.perf_counter()
    options = {
        k: v for k, v in vars(args).items() if k not in ("json", "png", "device") and v is not None
    }
    result: Row = {"environment": environment(), "benchmark": "attention"}
    result |= {"device": args.device, "options": options}

    def keep(sections: Row) -> None:
        result.update(sections, seconds=rounded(time.perf_counter() - started))
        command.keep(args.json, result)

    if args.device == "cpu":
        keep(bench_cpu(CPU_SHAPES, args.rounds))
    else:
        bench = CudaBench(args.rounds, keep, args.dense)
        bench.shapes(args.flex)
        if args.sweeps:
            bench.sweeps()
        if args.first_calls:
            bench.first_calls()
    if args.png:
        plot.draw(result, args.png)
