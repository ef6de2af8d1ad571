"""`python -m dflash_ext.regenerate SOURCES... --endpoint URL | --target DIR --out FILE.jsonl`.

A drafter learns to foresee its target, so it should read its target's own answers. The prompts of
any data are answered anew, by a server that speaks the OpenAI API or by the target in this process.
Run again after a kill it goes on, and asks nothing twice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import tyro

from dflash_ext.data.regeneration import NO_ANSWER, Item, Progress, Report, read_items
from dflash_ext.data.rows import ChatOptions, SkipRow
from dflash_ext.errors import UserError, parse_options, run_cli
from dflash_ext.monitor import Monitor


@dataclass(frozen=True)
class Options:
    """The target's own answers to the prompts of your data, as rows for dflash_ext.prepare."""

    sources: tyro.conf.Positional[tuple[str, ...]]
    """Data as for dflash_ext.prepare (answers in it are ignored), .txt with one prompt a line, a
    prompt set (humaneval, gsm8k, mtbench), or with --target a token store (its samples' first
    prompts)."""
    out: Path
    """The rows, .jsonl, in the order of the prompts."""
    endpoint: str | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1. A key is read from
    DFLASH_API_KEY. Prompts are sent there and nowhere else."""
    model: str | None = None
    """The endpoint's name of the target; none: the only one it serves."""
    target: str | None = None
    """Directory or hub id of the target, to run it in this process."""
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 2048
    """Of one answer. One that is cut there is kept, without an end of turn."""
    seed: int = 0
    limit: int | None = None
    """Only the first so many conversations."""
    template_kwargs: str = "{}"
    """A JSON object for the chat template, such as {"enable_thinking": false}."""
    concurrency: int = 64
    """Requests to the endpoint at the same time."""
    timeout: float = 600.0
    """Seconds for one response of the endpoint."""
    attempts: int = 8
    """Requests before a conversation is given up: pauses double, Retry-After is obeyed."""
    batch_size: int = 32
    """Conversations side by side in this process."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    device: str = "auto"
    """auto: the first CUDA device if there is one, else the CPU."""
    trust_remote_code: bool = False
    """Let the target's repository run its own code on this machine."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UserError("no source was named: give files, folders, globs, prompt sets")
        if (self.endpoint is None) == (self.target is None):
            raise UserError("expected either --endpoint URL or --target DIR")
        if self.target is not None and self.model is not None:
            raise UserError("--model names a model of an --endpoint; with --target leave it out")
        if self.out.suffix != ".jsonl":
            raise UserError(f"--out {self.out}: expected a name that ends with .jsonl")
        positive = ("max_tokens", "concurrency", "attempts", "batch_size", "timeout")
        for name in (*positive, *(["limit"] if self.limit is not None else [])):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} {getattr(self, name)}: expected more than 0")
        if not 0 <= self.temperature < 100:
            raise UserError(f"temperature {self.temperature}: expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p}: expected more than 0, at most 1")
        ChatOptions(template_kwargs=self.template_kwargs)

    def sampling(self, model: str) -> dict[str, Any]:
        """What every row says about how it was made."""
        out = {
            "model": model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }
        if self.template_kwargs != "{}":
            out["template_kwargs"] = self.template_kwargs
        return out


def regenerate(options: Options, told: Progress) -> Report:
    """Ask, then write the rows. `told(done, total, note)` of conversations."""
    partial = options.out.with_name(options.out.name + ".part")
    if options.out.exists() and not partial.exists():
        raise UserError(f"{options.out} exists already; remove it, or name another output")

    def items() -> Iterator[Item]:
        return read_items(options.sources, options.limit)

    first = next(items(), None)
    if options.endpoint is not None and first is not None and isinstance(first.prompt, list):
        raise UserError(
            "a token store holds ids and no messages: give an endpoint the data the store was made "
            "from, or use --target"
        )
    total = sum(not isinstance(item.prompt, SkipRow) for item in items())
    if options.endpoint is not None:
        from dflash_ext.data.from_endpoint import by_endpoint

        return by_endpoint(options, items, partial, total, told)
    from dflash_ext.data.in_process import by_target  # with torch and a model

    return by_target(options, items, partial, total, told)


def main(arguments: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_options(Options, args, prog="python -m dflash_ext.regenerate")
    # A monitor keeps metrics in a folder; here there are none.
    with TemporaryDirectory() as scratch, Monitor(Path(scratch)).stage("regenerate") as stage:
        report = regenerate(options, stage.update)
    record = {"report": asdict(report), "options": asdict(options)}
    saved = options.out.with_suffix(".report.json")
    saved.write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(f"{options.out}: {report}\n  report: {saved}")
    if NO_ANSWER in report.skipped:
        print("  run it again to ask anew for those without an answer")
    return 0


if __name__ == "__main__":
    run_cli(main)
