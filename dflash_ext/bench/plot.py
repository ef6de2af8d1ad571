"""`python -m dflash_ext.bench plot RESULT.json PICTURE.png`: speeds per shape, ours and anchors.

matplotlib (the extra `bench`) is imported here only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

from dflash_ext.errors import UserError


class Bars(NamedTuple):
    label: str
    colour: str
    heights: list[float | None]
    """One per shape, None where it was not measured."""


# (label, key for pass `p`); a contestant's colour is its place in the list, in every picture.
CUDA_BARS = (
    ("ours", "{p}_tflops"),
    ("ours, plain Triton", "triton_{p}_tflops"),
    ("compiled flex_attention", "flex_{p}_tflops"),
    ("the same, mask by intervals", "flex_intervals_{p}_tflops"),
    ("cuDNN, dense causal", "cudnn_{p}_tflops"),
)
CPU_BARS = (("ours", "{p}_gflops"), ("SDPA, dense mask", "sdpa_{p}_gflops"))


def bars(result: dict[str, Any], p: str) -> list[Bars]:
    """What to draw for one pass ("fwd" or "bwd"); contestants measured nowhere are left out."""
    contestants = CUDA_BARS if result["device"] == "cuda" else CPU_BARS
    every = (
        Bars(label, f"C{i}", [row.get(key.format(p=p)) for row in result["shapes"]])
        for i, (label, key) in enumerate(contestants)
    )
    return [one for one in every if any(h is not None for h in one.heights)]


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "a picture needs matplotlib, which is not installed: pip install matplotlib, or leave "
            "out --png and draw later from the JSON with `python -m dflash_ext.bench plot`"
        )


def draw(result: dict[str, Any], path: Path) -> None:
    """Forward and backward side by side into `path`; the ceiling is the product in our rounds."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cuda, rows = result["device"] == "cuda", result["shapes"]
    unit = "tflops" if cuda else "gflops"
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (p, title) in zip(
        figure.subplots(1, 2, sharey=True), (("fwd", "forward"), ("bwd", "backward"))
    ):
        groups = bars(result, p)
        width = 0.8 / len(groups)
        for i, group in enumerate(groups):
            places = [x - 0.4 + (i + 0.5) * width for x in range(len(rows))]
            heights = [h or 0.0 for h in group.heights]
            drawn = axes.bar(places, heights, width, label=group.label, color=group.colour)
            labels = ["" if h is None else f"{h:.3g}" for h in group.heights]
            axes.bar_label(drawn, labels, fontsize=7)
        for x, row in enumerate(rows):
            ceiling = row.get(f"product_{unit}")
            if ceiling is not None:
                name = "matrix product, in our rounds" if x == 0 else None
                axes.plot([x - 0.45, x + 0.45], [ceiling] * 2, "k--", linewidth=1, label=name)
        names = [", ".join(row[k] for k in ("shape", "dtype") if k in row) for row in rows]
        axes.set_xticks(range(len(rows)), [name.replace(", ", "\n") for name in names])
        axes.set_title(title)
        if not cuda:
            axes.set_yscale("log")  # SDPA with a dense mask is one to two orders below
    first = figure.axes[0]
    first.set_ylabel(f"useful {'TFLOP/s' if cuda else 'GFLOP/s'}")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    e = result["environment"]
    figure.suptitle(f"DFlash attention, {e['gpu'] or e['cpu']}, {e['date'][:10]}, {e['commit']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_ext.bench plot")
    parser.add_argument("result", type=Path, help="what `bench attention --json` wrote")
    parser.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    try:
        result = json.loads(args.result.read_text())
    except json.JSONDecodeError:
        result = {}
    if result.get("benchmark") != "attention" or not result.get("shapes"):
        raise UserError(f"{args.result} is no result of `python -m dflash_ext.bench attention`")
    draw(result, args.picture)
