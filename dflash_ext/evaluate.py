"""`python -m dflash_ext.evaluate RUN_OR_EXPORT --target … --prompts …`: accepted lengths, measured.

Every prompt is decoded three times: by the target alone, with the drafter, and with prompt lookup,
the baseline that needs no training. The three outputs are compared token by token.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dflash_ext.data.prompts import load_prompts
from dflash_ext.data.registry import smollm2_dir
from dflash_ext.data.rows import SkipRow
from dflash_ext.data.templates import render
from dflash_ext.drafter import Drafter
from dflash_ext.errors import UserError, run_cli
from dflash_ext.export import CONFIG, WEIGHTS, load_export
from dflash_ext.generate import Generation, plain_decode, prompt_lookup_decode, speculative_decode
from dflash_ext.record import save
from dflash_ext.run import resolve_device
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
    """Forwards of the target after the one that read the prompt."""
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
    """One prompt set: the drafter beside its baselines."""

    name: str
    drafter: MethodReport
    greedy: MethodReport
    lookup: MethodReport

    def to_json(self) -> dict[str, Any]:
        """Plain values, `tokens_per_second` included."""
        methods = {"drafter": self.drafter, "greedy": self.greedy, "lookup": self.lookup}
        return {"name": self.name} | {
            name: dataclasses.asdict(report) | {"tokens_per_second": report.tokens_per_second}
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
    """Ids of a conversation through the target's chat template, ready for its answer.

    UserError if the target has no template, or its template refuses the conversation.
    """
    tokenizer = target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"tokenizer of {target.path!r} has no chat template: use an instruction-tuned target"
        )
    try:
        text = render(tokenizer, list(messages), generation=True)
    except SkipRow as error:
        raise UserError(
            f"prompt {messages[-1]['content'][:60]!r} of roles "
            f"{', '.join(m['role'] for m in messages)}: {error} (target {target.path!r})"
        ) from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def evaluate_prompts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    name: str,
    progress: Progressed,
) -> SetReport:
    """Decode a prompt set (`encode_prompt` of each) in all three ways and count what was accepted.

    Prompt lookup proposes as many tokens a step as the drafter.
    """
    stop, block_size = target.stop_ids, drafter.config.block_size
    done = 0

    def run(decode_one: Callable[[list[int]], Generation]) -> list[Generation]:
        nonlocal done
        generations = []
        for ids in prompts:
            generations.append(decode_one(ids))
            done += 1
            progress(done, 3 * len(prompts))
        return generations

    greedy = run(lambda ids: plain_decode(target, ids, max_new_tokens, stop))
    ours = run(lambda ids: speculative_decode(target, drafter, ids, max_new_tokens, stop))
    lookup = run(
        lambda ids: prompt_lookup_decode(target, ids, max_new_tokens, stop, block_size=block_size)
    )
    return SetReport(
        name=name,
        drafter=summarise(ours, block_size, greedy),
        greedy=summarise(greedy, 1),
        lookup=summarise(lookup, block_size, greedy),
    )


def results_table(reports: Sequence[SetReport]) -> Table:
    """The reports as a table for the terminal."""
    table = Table(title="Tokens per step and per second", box=SIMPLE_HEAD)
    table.add_column("prompts", no_wrap=True)
    for column in ("accepted", "full\nblocks", "prompt\nlookup", "equals\ngreedy"):
        table.add_column(column, justify="right")
    for method in ("", "\nlookup", "\ngreedy"):
        table.add_column(f"tok/s{method}", justify="right")

    for r in reports:
        table.add_row(
            r.name,
            f"{r.drafter.accept_len:.2f}",
            f"{r.drafter.full_block_rate:.1%}",
            f"{r.lookup.accept_len:.2f}",
            f"{r.drafter.identical_to_greedy}/{r.drafter.prompts}",
            *(f"{m.tokens_per_second:.1f}" for m in (r.drafter, r.lookup, r.greedy)),
        )
    return table


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
    resolved = export.absolute().parent / "resolved.json"
    if not resolved.is_file():
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
    device = resolve_device(options.device)
    if options.json is not None:
        check_writable(options.json)
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
    )
    sets = {name: [encode_prompt(target, m) for m in found] for name, found in messages.items()}
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
        save(options.json, content)
    return reports


def main() -> None:
    evaluate(tyro.cli(Options), Console())


if __name__ == "__main__":
    run_cli(main)
