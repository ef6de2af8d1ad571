"""`python -m dflash_ext.evaluate RUN_OR_EXPORT --target … --prompts …`: accepted lengths, measured.

Every prompt is decoded by the target alone, with prompt lookup (the baseline that needs no
training), and with the drafter, by chains and by trees of several sizes. All outputs are compared
token by token.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dflash_ext.acceptance import MethodReport
from dflash_ext.comparison import (
    Comparison,
    DecodeOptions,
    Progressed,
    encode_prompt,
    short_names,
    tree_name,
)
from dflash_ext.data.prompts import load_prompts
from dflash_ext.data.registry import smollm2_dir
from dflash_ext.errors import UserError, parse_options, run_cli
from dflash_ext.evaluation_picture import draw_evaluation
from dflash_ext.export import CONFIG, WEIGHTS, load_export
from dflash_ext.metrics import TREE_BUDGETS
from dflash_ext.reader import require_trees, takes_trees
from dflash_ext.record import save
from dflash_ext.run import resolve_device
from dflash_ext.sampling import Sampling
from dflash_ext.target import Target

RESOLVED = "resolved.json"


@dataclass(frozen=True)
class SetReport:
    """One prompt set: the drafter beside its baselines."""

    name: str
    methods: dict[str, MethodReport]
    """"plain", "lookup", "chain", then "tree@N" from small to large."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, `tokens_per_second` included."""
        return {"name": self.name} | {name: m.to_json() for name, m in self.methods.items()}


def results_table(reports: Sequence[SetReport]) -> Table:
    """Accepted lengths and speeds for the terminal, a row per set."""
    table = Table(title="Tokens per step and per second", box=SIMPLE_HEAD)
    table.add_column("prompts", no_wrap=True)
    methods = list(reports[0].methods) if reports else []
    guided = [name for name in methods if name != "plain"]
    for name in guided:
        table.add_column(name.replace("@", "\n@"), justify="right")
    for column in ("full\nblocks", "calibration\nchain, trees", "equals\nplain"):
        table.add_column(column, justify="right")
    for name in methods:
        table.add_column(f"tok/s\n{name}", justify="right")
    for report in reports:
        found = report.methods
        table.add_row(
            report.name,
            *(f"{found[name].accept_len:.2f}" for name in guided),
            f"{found['chain'].full_block_rate:.1%}",
            " ".join(
                share(m.calibration) for n, m in found.items() if n not in ("plain", "lookup")
            ),
            f"{min(found[name].identical or 0 for name in guided)}/{found['chain'].prompts}",
            *(f"{m.tokens_per_second:.1f}" for m in found.values()),
        )
    return table


def slots_table(reports: Sequence[SetReport]) -> Table:
    """The chain's slots, two rows per set: accepted where reached, and recall@2 everywhere."""
    slots = len(reports[0].methods["chain"].slot_acceptance) if reports else 0
    table = Table(title="Slots: accepted where reached, text among the likeliest", box=SIMPLE_HEAD)
    table.add_column("prompts", no_wrap=True)
    table.add_column("", no_wrap=True)
    for slot in range(1, slots + 1):
        table.add_column(str(slot), justify="right")
    for report in reports:
        chain = report.methods["chain"]
        table.add_row(report.name, "accepted", *map(share, chain.slot_acceptance))
        for k in (1, 4, 16):
            if k in chain.recall:
                table.add_row("", f"recall@{k}", *map(share, chain.recall[k]))
    return table


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def find_export(run_or_export: Path) -> Path:
    """The export directory of a run folder, or the directory itself if it is an export."""
    for folder in (run_or_export, run_or_export / "export"):
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            return folder
    raise UserError(
        f"{run_or_export} is neither an export (config.json, model.safetensors) nor a run folder "
        "with one in export/"
    )


def trained_target(export: Path) -> str:
    """The target by the `resolved.json` of the run an export lies in; else the quickstart's."""
    above = export.absolute().parent, export.absolute().parents[1]  # the best one lies deeper
    resolved = next((f / RESOLVED for f in above if (f / RESOLVED).is_file()), None)
    if resolved is None:
        return str(smollm2_dir())
    try:
        return str(json.loads(resolved.read_text())["target"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{resolved} does not name the target: give it with --target") from None


def check_writable(file: Path) -> None:
    """Make the folder of a result and fail now, not after the work, if it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"cannot write {file}: expected a file in a folder you may write to")


@dataclass(frozen=True)
class Options:
    """Measure a drafter's accepted length on prompt sets, beside plain decoding and a baseline."""

    run_or_export: Annotated[Path, tyro.conf.Positional]
    """A training run's folder (or its best/), or an exported drafter."""
    target: str | None = None
    """Directory or hub id of the target; none: the one the run was trained for, of a bare export
    the quickstart's SmolLM2-135M-Instruct."""
    prompts: tuple[str, ...] = ("humaneval", "gsm8k", "mtbench")
    """Prompt sets: names, or files (.jsonl with messages or prompt, .txt one a line)."""
    trees: tuple[int, ...] | None = None
    """Guesses of the trees (DDTree) to decode with; none: 16, 64 and 256 on a GPU, 16 on the CPU,
    no trees where the target cannot verify them."""
    max_new_tokens: int = 128
    limit: int | None = 10
    """Prompts of each set, evenly spread over it."""
    batch: int = 1
    """Prompts decoded side by side. Text and accepted lengths do not depend on it, speeds do."""
    temperature: float = 0.0
    """0: greedy. Otherwise the text is plain sampling's with the same seed."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the target. In fp32 all outputs are identical; in bf16 rounding may change some."""
    device: str = "auto"
    """auto: the first CUDA device if there is one, else the CPU."""
    json: Path | None = None
    """Also write the results to this file."""
    png: Path | None = None
    """Also draw them into this picture."""
    trust_remote_code: bool = False
    """Let the target's repository run its own code on this machine."""


def trees_of(options: Options, target: Target) -> list[int]:
    """Sizes of the trees to decode with. UserError if the target cannot verify those asked for."""
    if options.trees:
        require_trees(target)
    if options.trees is not None:
        return sorted(set(options.trees))
    if not takes_trees(target):
        return []
    return list(TREE_BUDGETS) if target.device.type == "cuda" else [min(TREE_BUDGETS)]


def evaluate(options: Options, console: Console) -> list[SetReport]:
    """What the command does: load, decode, print the tables, write JSON and picture."""
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens {options.max_new_tokens}: expected at least 1")
    if options.batch < 1 or any(tree < 1 for tree in options.trees or ()):
        raise UserError(f"batch {options.batch}, trees {options.trees}: expected at least 1")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    device = resolve_device(options.device)
    for file in (options.json, options.png):
        if file is not None:
            check_writable(file)
    folder = find_export(options.run_or_export)
    drafter = load_export(folder)
    messages = {name: load_prompts(name, options.limit) for name in options.prompts}
    path = options.target or trained_target(folder)
    target = Target.load(
        path,
        device=device,
        dtype=options.dtype,
        tap_ids=drafter.config.target_layer_ids,
        trust_remote_code=options.trust_remote_code,
        accelerated=False,
    )
    drafter.to(target.device)
    decoding = DecodeOptions(options.max_new_tokens, options.batch, sampling)
    prompts = {name: [encode_prompt(target, m) for m in found] for name, found in messages.items()}
    comparison, B = Comparison(prompts, decoding), drafter.config.block_size
    trees = trees_of(options, target)
    methods = ["plain", "lookup", "chain", *map(tree_name, trees)]
    with Progress(console=console, transient=True) as bar:

        def shown(name: str) -> Progressed:
            task = bar.add_task(name, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        comparison.baselines(target, B, shown("plain, lookup"))
        comparison.drafter("chain", target, drafter, shown("chain"), record=True)
        for tree in trees:
            name = tree_name(tree)
            comparison.drafter(name, target, drafter, shown(name), tree=tree)
    reports = [
        SetReport(short, {m: comparison.report(m, name, B) for m in methods})
        for name, short in short_names(options.prompts).items()
    ]
    console.print(results_table(reports))
    console.print(slots_table(reports))
    result = {
        "benchmark": "evaluate",
        "export": str(folder),
        "target": path,
        "device": str(target.device),
        "dtype": options.dtype,
        "block_size": B,
        "decoding": dataclasses.asdict(decoding),
        "methods": methods,
        "sets": [report.to_json() for report in reports],
    }
    if options.json is not None:
        save(options.json, result)
    if options.png is not None:
        draw_evaluation(result, options.png)
    return reports


def main() -> None:
    evaluate(parse_options(Options, sys.argv[1:]), Console())


if __name__ == "__main__":
    run_cli(main)
