"""What became of every row, and how long the samples are."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_ext.data.store import TokenStore, split_indices

EXAMPLES = 3
"""Rows shown for each reason."""
SAMPLINGS = 8
"""Distinct sampling settings kept."""
_QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass
class PrepareReport:
    """What became of every row: rows == trained + sum(skipped.values())."""

    rows: int = 0
    trained: int = 0
    samples: int = 0
    """More than `trained` where a template made a conversation one sample per turn."""
    tokens: int = 0
    supervised_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """reason -> where the first rows skipped for it are, with details."""
    cut: dict[str, int] = field(default_factory=dict)
    """What `max_length` cut -> rows."""
    sampling: list[str] = field(default_factory=list)
    """Settings the answers were sampled with, as far as their rows tell: JSON, distinct."""
    cut_tokens: int = 0
    cut_turns: int = 0

    def skip(self, reason: str, where: str, detail: str) -> None:
        """Count one row that is not trained."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(f"{where}: {detail}" if detail else where)

    def add_sampling(self, settings: list[str]) -> None:
        """Keep distinct settings; more than a few are not worth listing."""
        known = set(self.sampling)
        for text in settings:
            if text not in known and len(self.sampling) < SAMPLINGS:
                self.sampling.append(text)

    def __str__(self) -> str:
        share = 100 * self.supervised_tokens / max(1, self.tokens)
        lines = [
            f"{self.rows} rows: {self.trained} trained ({self.samples} samples, {self.tokens} "
            f"tokens, {share:.1f} % supervised)"
        ]
        lines += [
            f"  {count} skipped: {reason} (first: {self.examples[reason][0]})"
            for reason, count in sorted(self.skipped.items(), key=lambda item: -item[1])
        ]
        if self.cut:
            kinds = ", ".join(f"{count} ({what})" for what, count in sorted(self.cut.items()))
            lines.append(
                f"  rows cut by max_length: {kinds}: {self.cut_tokens} tokens and "
                f"{self.cut_turns} whole answers left out"
            )
        lines += [f"  answers sampled with {settings}" for settings in self.sampling]
        return "\n".join(lines)


def summary(store: TokenStore, report: PrepareReport, held_out: int, seed: int) -> dict[str, Any]:
    """The report with lengths and the split: JSON-able."""
    train, held = split_indices(store.keys, held_out, seed=seed)
    lengths = store.lengths
    return {
        **asdict(report),
        "supervised_share": report.supervised_tokens / max(1, report.tokens),
        "anchor_candidates": int(store.candidates.sum()),
        "length_quantiles": {
            str(q): int(value) for q, value in zip(_QUANTILES, np.percentile(lengths, _QUANTILES))
        },
        "train": {"samples": len(train), "tokens_per_epoch": int(lengths[train].sum())},
        "held_out": {"samples": len(held), "tokens": int(lengths[held].sum())},
        "identity": store.identity,
    }


def text_of(summary: dict[str, Any]) -> str:
    """The lines `summary` adds to the printed report."""
    q = summary["length_quantiles"]
    train, held = summary["train"], summary["held_out"]
    return (
        f"  lengths: median {q['50']}, 95 % within {q['95']}, longest {q['100']}\n"
        f"  training: {train['samples']} samples, {train['tokens_per_epoch']} tokens an epoch; "
        f"held out by content hash: {held['samples']} samples, {held['tokens']} tokens"
    )


def save_histogram(lengths: np.ndarray, path: Path) -> None:
    """Write a PNG of sample lengths, int [n], in logarithmic bins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    low, high = max(1, int(lengths.min())), int(lengths.max()) + 1
    axes.hist(lengths, bins=np.unique(np.geomspace(low, high, 60)).tolist())
    axes.set_xscale("log")
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("samples")
    axes.set_title(f"{len(lengths):,} samples, {int(lengths.sum()):,} tokens")
    FigureCanvasAgg(figure).print_png(str(path))


def save_report(store: TokenStore, report: dict[str, Any]) -> None:
    """`report.json` and `lengths.png`, in the store's folder."""
    (store.path / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    save_histogram(store.lengths, store.path / "lengths.png")
