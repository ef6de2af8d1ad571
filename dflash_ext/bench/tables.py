"""`python -m dflash_ext.bench tables`: the README's numbers, generated from benchmarks/*.json."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_ext.errors import UserError

BEGIN = "<!-- numbers: written by `python -m dflash_ext.bench tables`, do not edit -->"
END = "<!-- end of numbers -->"

# A column: heading, key in the row, format. A heading may stand twice.
Columns = Sequence[tuple[str, str, str]]

ATTENTION_CUDA = [
    ("shape", "shape", "{}"),
    ("forward ms", "fwd_ms", "{:.2f}"),
    ("TFLOP/s", "fwd_tflops", "{:.0f}"),
    ("× product", "fwd_over_product", "{:.2f}"),
    ("× flex", "fwd_speedup_over_flex", "{:.2f}"),
    ("backward ms", "bwd_ms", "{:.2f}"),
    ("TFLOP/s", "bwd_tflops", "{:.0f}"),
    ("× product", "bwd_over_product", "{:.2f}"),
    ("× flex", "bwd_speedup_over_flex", "{:.2f}"),
    ("layout ms", "layout_ms", "{:.3f}"),
]
ATTENTION_CPU = [
    ("shape", "shape", "{}"),
    ("dtype", "dtype", "{}"),
    ("forward ms", "fwd_ms", "{:.1f}"),
    ("backward ms", "bwd_ms", "{:.1f}"),
    ("forward + backward, × SDPA with dense mask", "speedup_over_sdpa", "{:.1f}"),
]
QUICKSTART = [
    ("prompts", "prompts", "{}"),
    ("before", "before", "{:.2f}"),
    ("after", "after", "{:.2f}"),
    ("prompt lookup", "prompt lookup", "{:.2f}"),
    ("equals greedy", "equals greedy", "{}"),
]
TRAINING = [
    ("step", "step", "{}"),
    ("seconds of training", "train_seconds", "{:.0f}"),
    ("loss", "loss", "{:.2f}"),
    ("accepted length", "accept_len", "{:.2f}"),
    ("tree of 16", "tree@16", "{:.2f}"),
    ("tree of 64", "tree@64", "{:.2f}"),
    ("tree of 256", "tree@256", "{:.2f}"),
]
# Result file -> (title, columns).
TABLES: dict[str, tuple[str, Columns]] = {
    "attention_h200.json": ("Attention, bf16, 32/8 heads, D 128, B 16", ATTENTION_CUDA),
    "attention_cpu.json": ("Attention on the CPU, 9/3 heads, D 64", ATTENTION_CPU),
    "quickstart_cpu.json": ("Quickstart on the CPU: accepted length", QUICKSTART),
    "quickstart_h200.json": ("Quickstart on one GPU: held-out metrics while training", TRAINING),
}


def markdown(columns: Columns, rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows that have every column."""
    lines = [
        "| " + " | ".join(heading for heading, _, _ in columns) + " |",
        "|---" * len(columns) + "|",
    ]
    for row in rows:
        if all(key in row for _, key, _ in columns):
            cells = (form.format(row[key]) for _, key, form in columns)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe(result: dict[str, Any]) -> str:
    """Where and when a result was measured, in one line."""
    e = result["environment"]
    machine = e["gpu"] or f"{e['cpu']}, {e['cores']} cores"
    text = f"{machine}, {e['date'][:10]}, torch {e['torch']}, commit `{e['commit']}`"
    return text + (f"; {result['note']}" if result.get("note") else "")


def numbers(folder: Path) -> str:
    """The README section for every known result file in `folder`."""
    parts = []
    for name, (title, columns) in TABLES.items():
        if (folder / name).exists():
            result = json.loads((folder / name).read_text())
            table = markdown(columns, result["rows"])
            parts.append(f"**{title}** ({describe(result)})\n\n{table}")
    return "\n\n".join(parts)


def with_numbers(readme: str, folder: Path) -> str:
    """`readme` with the section between the markers replaced."""
    if BEGIN not in readme or END not in readme:
        raise UserError(f"the README has no section between {BEGIN!r} and {END!r}")
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n\n{numbers(folder)}\n\n{END}{rest.split(END)[1]}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_ext.bench tables")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks"))
    args = parser.parse_args(argv)
    if not args.readme.exists():
        raise UserError(f"{args.readme} does not exist: run this in the repository's root")
    args.readme.write_text(with_numbers(args.readme.read_text(), args.results))
