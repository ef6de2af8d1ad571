"""`python -m dflash_ext.evaluate RUN_OR_EXPORT --target … --prompts …`: accepted lengths, measured.

Every prompt is decoded three times: by the target alone, with the drafter, and with prompt lookup,
the baseline that needs no training. The three outputs are compared token by token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dflash_ext.data.prompts import load_prompts
from dflash_ext.data.registry import smollm2_dir
from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError, run_cli
from dflash_ext.export import CONFIG, load_export
from dflash_ext.generate import Generation, greedy_decode, prompt_lookup_decode, speculative_decode
from dflash_ext.target import Target

Progressed = Callable[[int, int], None]
"""Called with (decodings done, decodings in all)."""


@dataclass(frozen=True)
class MethodReport:
    """One way of decoding one prompt set."""

    prompts: int
    tokens: int
    """Generated in all."""
    seconds: float
    """Wall clock, reading the prompts included."""
    steps: int = 0
    """Verification steps (0 for plain greedy decoding)."""
    accept_len: float = 1.0
    """Mean tokens a step yields (1..B)."""
    full_block_rate: float = 0.0
    """Share of steps that yielded B tokens."""
    slot_acceptance: list[float | None] = dataclasses.field(default_factory=list)
    """For slots 1..B-1: share of drafts accepted among steps in which all slots before it were;
    None where no step came so far."""
    identical_to_greedy: int | None = None
    """Prompts whose tokens equal plain greedy decoding's; None if not compared."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class SetReport:
    """One prompt set: the drafter (None if there was none) beside its baselines."""

    name: str
    drafter: MethodReport | None
    greedy: MethodReport | None
    lookup: MethodReport | None

    @property
    def accept_len(self) -> float | None:
        """The drafter's accepted length; None without a drafter."""
        return None if self.drafter is None else self.drafter.accept_len

    def to_json(self) -> dict[str, Any]:
        """Plain values, `tokens_per_second` included."""
        methods = {"drafter": self.drafter, "greedy": self.greedy, "lookup": self.lookup}
        return {"name": self.name} | {
            name: None
            if report is None
            else dataclasses.asdict(report) | {"tokens_per_second": report.tokens_per_second}
            for name, report in methods.items()
        }


def summarise(
    generations: Sequence[Generation],
    block_size: int,
    reference: Sequence[Generation] | None = None,
) -> MethodReport:
    """Counts over generations; `reference` is plain greedy decoding of the same prompts."""
    reached, passed = [0] * block_size, [0] * block_size  # entry k: slot k, entry 0 unused
    lengths: list[int] = []
    for generation in generations:
        for i, length in enumerate(generation.accepted):
            lengths.append(length)
            for slot in range(1, length):
                reached[slot] += 1
                passed[slot] += 1
            # A step cut short by a stop token says nothing about the slots after it.
            cut = generation.stopped and i == len(generation.accepted) - 1
            if length < block_size and not cut:
                reached[length] += 1
    identical = None
    if reference is not None:
        identical = sum(a.tokens == b.tokens for a, b in zip(generations, reference, strict=True))
    steps = len(lengths)
    return MethodReport(
        prompts=len(generations),
        tokens=sum(len(g.tokens) for g in generations),
        seconds=sum(g.seconds for g in generations),
        steps=steps,
        accept_len=sum(lengths) / steps if steps else 1.0,
        full_block_rate=lengths.count(block_size) / steps if steps else 0.0,
        slot_acceptance=[p / r if r else None for p, r in zip(passed[1:], reached[1:])],
        identical_to_greedy=identical,
    )


def encode_prompt(target: Target, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Ids of a conversation through the target's chat template, ready for its answer."""
    tokenizer = target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"tokenizer of {target.path!r} has no chat template: use an instruction-tuned target"
        )
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def evaluate_prompts(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[dict[str, Any]]],
    *,
    max_new_tokens: int,
    compare_greedy: bool = True,
    lookup: bool = True,
    reference: Sequence[Generation] | None = None,
    block_size: int = 16,
    name: str = "",
    progress: Progressed | None = None,
) -> SetReport:
    """Decode a prompt set (each prompt a `messages` list) and count what was accepted.

    `compare_greedy` decodes with the target alone as well; `lookup` adds the prompt-lookup
    baseline, at the drafter's block size (`block_size` without a drafter). `reference` are greedy
    generations of the same prompts made before (`greedy_reference`), which saves that pass.
    """
    encoded = [encode_prompt(target, messages) for messages in prompts]
    stop = target.stop_ids
    block_size = block_size if drafter is None else drafter.config.block_size
    wanted = [compare_greedy and reference is None, drafter is not None, lookup]
    done, total = 0, sum(wanted) * len(encoded)

    def run(decode_one: Callable[[list[int]], Generation]) -> list[Generation]:
        nonlocal done
        generations = []
        for ids in encoded:
            generations.append(decode_one(ids))
            done += 1
            if progress is not None:
                progress(done, total)
        return generations

    greedy = reference
    if wanted[0]:
        greedy = run(lambda ids: greedy_decode(target, ids, max_new_tokens, stop))
    ours = theirs = None
    if drafter is not None:
        model = drafter
        ours = run(lambda ids: speculative_decode(target, model, ids, max_new_tokens, stop))
    if lookup:
        theirs = run(
            lambda ids: prompt_lookup_decode(
                target, ids, max_new_tokens, stop, block_size=block_size
            )
        )
    return SetReport(
        name=name,
        drafter=None if ours is None else summarise(ours, block_size, greedy),
        greedy=None if greedy is None else summarise(greedy, block_size),
        lookup=None if theirs is None else summarise(theirs, block_size, greedy),
    )


def greedy_reference(
    target: Target, prompts: Sequence[Sequence[dict[str, Any]]], max_new_tokens: int
) -> list[Generation]:
    """Plain greedy generations of a prompt set, to pass as `reference` more than once."""
    stop = target.stop_ids
    return [
        greedy_decode(target, encode_prompt(target, messages), max_new_tokens, stop)
        for messages in prompts
    ]


def results_table(reports: Sequence[SetReport]) -> Table:
    """The reports as a table for the terminal."""
    table = Table(title="Tokens per step and per second", box=SIMPLE_HEAD)
    table.add_column("prompts", no_wrap=True)
    for column in ("accepted", "full\nblocks", "prompt\nlookup", "equals\ngreedy"):
        table.add_column(column, justify="right")
    for method in ("", "\nlookup", "\ngreedy"):
        table.add_column(f"tok/s{method}", justify="right")

    def show(report: MethodReport | None, field: str, form: str) -> str:
        return "–" if report is None else format(getattr(report, field), form)

    for r in reports:
        ours = r.drafter or r.lookup
        same = None if ours is None else ours.identical_to_greedy
        table.add_row(
            r.name,
            show(r.drafter, "accept_len", ".2f"),
            show(r.drafter, "full_block_rate", ".1%"),
            show(r.lookup, "accept_len", ".2f"),
            "–" if same is None or ours is None else f"{same}/{ours.prompts}",
            show(r.drafter, "tokens_per_second", ".1f"),
            show(r.lookup, "tokens_per_second", ".1f"),
            show(r.greedy, "tokens_per_second", ".1f"),
        )
    return table


def find_export(run_or_export: Path) -> Path:
    """The export directory of a run folder, or the directory itself if it is an export."""
    for folder in (run_or_export, run_or_export / "export"):
        if (folder / CONFIG).is_file() and (folder / "model.safetensors").is_file():
            return folder
    raise UserError(
        f"{run_or_export} is neither an export (config.json, model.safetensors) nor a run folder "
        "with one in export/"
    )


def trained_target(run_or_export: Path) -> str:
    """The target a run was trained for, by its `resolved.json`; else the quickstart's."""
    resolved = run_or_export / "resolved.json"
    if resolved.is_file():
        return json.loads(resolved.read_text())["target"]
    return str(smollm2_dir())


@dataclass(frozen=True)
class Options:
    """Measure a drafter's accepted length on prompt sets, beside greedy and prompt lookup."""

    run_or_export: Annotated[Path, tyro.conf.Positional]
    """A training run's folder, or an exported drafter."""
    target: str | None = None
    """Directory or hub id of the target; none: the one the run was trained for, of a bare export
    the quickstart's SmolLM2-135M-Instruct."""
    prompts: tuple[str, ...] = ("humaneval", "gsm8k", "mtbench")
    """Prompt sets: names, or files (.jsonl with messages or prompt, .txt one a line)."""
    max_new_tokens: int = 128
    limit: int | None = 10
    """Prompts of each set, evenly spread over it."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the target. In fp32 all outputs are identical; in bf16 rounding may change some."""
    device: str = "auto"
    """auto: the first CUDA device if there is one, else the CPU."""
    json: Path | None = None
    """Also write the results to this file."""
    trust_remote_code: bool = False
    """Let the target's repository run its own code on this machine."""


def evaluate(options: Options, console: Console) -> list[SetReport]:
    """What the command does: load, decode, print the table, write the JSON."""
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens {options.max_new_tokens}: expected at least 1")
    folder = find_export(options.run_or_export)
    drafter = load_export(folder)
    sets = {name: load_prompts(name, options.limit) for name in options.prompts}
    path = options.target or trained_target(options.run_or_export)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(
        path,
        device=automatic if options.device == "auto" else options.device,
        dtype=options.dtype,
        tap_ids=drafter.config.target_layer_ids,
        trust_remote_code=options.trust_remote_code,
    )
    drafter.to(target.device)
    reports = []
    with Progress(console=console, transient=True) as bar:
        for name, prompts in sets.items():
            task = bar.add_task(name, total=None)
            reports.append(
                evaluate_prompts(
                    target,
                    drafter,
                    prompts,
                    max_new_tokens=options.max_new_tokens,
                    name=Path(name).name,  # a file without its folders
                    progress=lambda n, total, task=task: bar.update(  # type: ignore[misc]
                        task, completed=n, total=total
                    ),
                )
            )
    console.print(results_table(reports))
    if options.json is not None:
        content = {
            "export": str(folder),
            "target": path,
            "device": str(target.device),
            "dtype": options.dtype,
            "block_size": drafter.config.block_size,
            "max_new_tokens": options.max_new_tokens,
            "sets": [report.to_json() for report in reports],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return reports


def main() -> None:
    evaluate(tyro.cli(Options), Console())


if __name__ == "__main__":
    run_cli(main)
