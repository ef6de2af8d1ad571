"""`python -m dflash_ext.prepare SOURCES... --target DIR_OR_HUB_ID --out STORE`: data to tokens.

Run again with more sources it adds what is new; run again after a kill it continues.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro

from dflash_ext.data.prepared import Progress, State, prepare
from dflash_ext.data.report import PrepareReport, save_report, summary, text_of
from dflash_ext.data.rows import ChatOptions
from dflash_ext.data.store import TokenStore
from dflash_ext.data.templates import load_tokenizer
from dflash_ext.errors import UserError, parse_options, run_cli
from dflash_ext.monitor import Monitor, Stage


@dataclass(frozen=True)
class PrepareConfig:
    sources: tyro.conf.Positional[tuple[str, ...]]
    """Files (.jsonl, .json, also .gz and .zst; .parquet, .arrow), folders, globs, or
    hf:owner/name[:config][@split] for a data set of the hub."""
    out: Path
    """The store: made, continued or extended."""
    target: str | None = None
    """Directory or hub id whose tokenizer and chat template count; none: the quickstart's."""
    chat: Annotated[ChatOptions, tyro.conf.arg(name="")] = field(default_factory=ChatOptions)
    workers: int = 0
    """Processes that tokenise; 0: one for each core."""
    held_out: int = 0
    """Rows the report counts as held out, chosen by content hash as in training."""
    seed: int = 0
    """Of that choice."""
    verify: bool = False
    """Check every byte of the finished store; without sources, only do that."""
    trust_remote_code: bool = False
    """Let the target's repository run its own code on this machine."""

    def check(self) -> None:
        """UserError for what cannot be asked for."""
        for name in ("workers", "held_out"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} {getattr(self, name)}: expected 0 or more")
        if not self.sources and not self.verify:
            raise UserError("no source was named: give files, folders, globs or hf:owner/name")


def shown(stage: Stage) -> Progress:
    """Progress in MB of the sources, which is what their ends are known in."""

    def show(state: State) -> None:
        seconds = max(state.seconds, 1e-9)
        note = (
            f"MB  {state.rows} rows, {state.rows / seconds:.0f} rows/s, "
            f"{state.tokens / seconds / 1e6:.2f} M tokens/s"
        )
        stage.update(round(state.done / 1e6), max(1, round(state.total / 1e6)), note)

    return show


def run(config: PrepareConfig) -> int:
    """Prepare, report, verify as asked; returns the exit code."""
    config.check()
    if config.sources:
        tokenizer = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
        # A monitor keeps metrics in a folder; here the store's report is all there is to keep.
        with TemporaryDirectory() as scratch, Monitor(Path(scratch)).stage("prepare") as stage:
            prepare(
                config.sources,
                tokenizer,
                config.out,
                config.chat,
                workers=config.workers,
                progress=shown(stage),
            )
    store = TokenStore.open(config.out, verify=config.verify)
    report = PrepareReport(**store.info.get("report", {}))
    print(f"{config.out}: {report}")
    found = summary(store, report, config.held_out, config.seed)
    print(text_of(found))
    if config.sources:
        save_report(store, found)
        print(f"  report: {config.out / 'report.json'}, {config.out / 'lengths.png'}")
    if config.verify:
        print("  verified: every checksum is right")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if arguments is None else arguments)
    return run(parse_options(PrepareConfig, args, prog="python -m dflash_ext.prepare"))


if __name__ == "__main__":
    run_cli(main)
