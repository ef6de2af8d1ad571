"""The picture of an evaluation: accepted length per set and method, slots, speed.

matplotlib is imported here only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_evaluation(result: dict[str, Any], path: Path) -> None:
    """Draw the content of an evaluation's JSON (evaluate.py) into `path`, in three panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sets, methods = result["sets"], result["methods"]
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, slots, speeds = figure.subplots(1, 3)
    _bars(lengths, sets, [m for m in methods if m != "plain"], methods, "accept_len", "{:.2f}")
    lengths.set_ylabel("tokens per step of the target")
    lengths.set_title("accepted length")
    lengths.axhline(1, color="k", linewidth=0.8, linestyle="--")
    for i, one in enumerate(sets):
        chain = one["chain"]
        numbers = range(1, len(chain["slot_acceptance"]) + 1)
        values = [float("nan") if v is None else v for v in chain["slot_acceptance"]]
        slots.plot(numbers, values, "o-", color=f"C{i}", label=f"{one['name']}: accepted")
        for k, style in (("1", "--"), ("16", ":")):
            if recalled := chain["recall"].get(k):
                values = [float("nan") if v is None else v for v in recalled]
                slots.plot(numbers, values, style, color=f"C{i}", label=f"recall@{k}")
    slots.set_ylim(0, 1)
    slots.xaxis.get_major_locator().set_params(integer=True)
    slots.set_xlabel("slot")
    slots.set_title("accepted where reached; text among the k likeliest")
    slots.legend(fontsize=7)
    _bars(speeds, sets, methods, methods, "tokens_per_second", "{:.0f}")
    speeds.set_ylabel("tokens per second")
    speeds.set_title(f"speed, batch {result['decoding']['batch']}, {result['device']}")
    figure.suptitle(f"{result['export']} with {result['target']} in {result['dtype']}", fontsize=9)
    figure.savefig(path, dpi=120)


def _bars(
    axes: Any, sets: list[Any], shown: list[str], methods: list[str], key: str, form: str
) -> None:
    """A group of bars per set; a method's colour is its place among all, in every panel."""
    width = 0.8 / len(shown)
    for i, method in enumerate(shown):
        places = [x - 0.4 + (i + 0.5) * width for x in range(len(sets))]
        heights = [one[method][key] for one in sets]
        colour = f"C{methods.index(method)}"
        drawn = axes.bar(places, heights, width, label=method, color=colour)
        axes.bar_label(drawn, [form.format(h) for h in heights], fontsize=7)
    axes.set_xticks(range(len(sets)), [one["name"] for one in sets])
    axes.legend(fontsize=7)
