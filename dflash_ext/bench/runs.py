"""`python -m dflash_ext.bench runs FOLDER ...`: training runs beside each other.

Of each run folder: which options differ from the first one's, what its held-out blocks said while
it trained, by seconds of training (validation and saving not counted), and where it ended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_ext.bench.command import keep
from dflash_ext.bench.markdown import Columns, Row, Rows, markdown
from dflash_ext.bench.plot import require_matplotlib
from dflash_ext.bench.timing import tidy
from dflash_ext.errors import UserError
from dflash_ext.monitor import read_metrics
from dflash_ext.run import OPTIONS_FILE

SHOWN = ("accept_len", "tree_accept_len@16", "tree_accept_len@64", "full_block_rate", "loss")
# What says nothing about how a drafter is trained.
_PLACES = ("run.", "device", "eval.")
RUNS: Columns = [
    ("run", "name", "{}"),
    ("other than the first", "changes", "{}"),
    ("steps", "steps", "{}"),
    ("training s", "train_seconds", "{:.0f}"),
    ("accepted length", "accept_len", "{:.2f}"),
    ("tree of 64", "tree_accept_len@64", "{:.2f}"),
    ("loss", "loss", "{:.2f}"),
]


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


def changes(options: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The options of a run that are not the first run's, by their dotted names."""
    mine, theirs = flat(options), flat(first)
    return {
        name: value
        for name, value in mine.items()
        if value != theirs.get(name) and not name.startswith(_PLACES)
    }


def curve(folder: Path) -> list[Row]:
    """A point for each validation: step, seconds of training until then, SHOWN."""
    seconds: dict[int, float] = {}
    points: dict[int, Row] = {}
    for record in read_metrics(folder):
        step = record["step"]
        if record["kind"] == "train":  # of a step done again after a kill the last record counts
            seconds[step] = record["seconds"]
        elif record["kind"] == "validation" and "accept_len" in record:
            points[step] = {name: record[name] for name in SHOWN if name in record}
    return [
        tidy({"step": step, "train_seconds": sum(s for k, s in seconds.items() if k <= step)} | row)
        for step, row in sorted(points.items())
    ]


def row_of(folder: Path, first: dict[str, Any], until: int | None = None) -> Row:
    """UserError if the folder is not that of a run that validated.

    until: the row's numbers are of the last validation not after this step, of a whole curve.
    """
    try:
        options = json.loads((folder / OPTIONS_FILE).read_text())
        points = curve(folder)
    except OSError as error:
        raise UserError(
            f"{folder} is no run folder: expected {Path(error.filename).name} in it "
            f"({error.strerror})"
        ) from None
    shown = [point for point in points if until is None or point["step"] <= until]
    if not shown:
        raise UserError(f"{folder}: the run has not validated yet, or holds nothing out")
    row: Row = {"name": folder.name, "changes": changes(options, first or options)}
    return row | {"options": options, "curve": points} | shown[-1] | {"steps": shown[-1]["step"]}


def runs_table(result: Row) -> str:
    return markdown(RUNS, [_shown(row) for row in result["rows"]])


def _shown(row: Row) -> Row:
    said = ", ".join(f"{name} {value}" for name, value in row["changes"].items())
    return dict(row) | {"changes": said or "–"}


def draw(rows: Rows, path: Path) -> None:
    """Accepted length of the held-out blocks over seconds of training, a line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, losses = figure.subplots(1, 2)
    for i, row in enumerate(rows):
        x = [point["train_seconds"] for point in row["curve"]]
        label = f"{row['name']}: {_shown(row)['changes']}" if row["changes"] else row["name"]
        for name, style in (("accept_len", "-"), ("tree_accept_len@64", ":")):
            y = [point.get(name, float("nan")) for point in row["curve"]]
            lengths.plot(x, y, style, color=f"C{i}", label=label if style == "-" else None)
        losses.plot(x, [point["loss"] for point in row["curve"]], color=f"C{i}")
    lengths.set_ylabel("accepted length, held-out blocks (dotted: a tree of 64)")
    losses.set_ylabel("held-out loss")
    for axes in (lengths, losses):
        axes.set_xlabel("seconds of training")
    lengths.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_ext.bench runs", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="run folders, the reference first")
    parser.add_argument("--until", type=int, metavar="STEP", help="compare runs at this step")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    parser.add_argument("--png", type=Path, help="draw the curves into this file")
    args = parser.parse_args(argv)
    if args.png:
        require_matplotlib()
    rows: list[Row] = []
    for folder in args.folders:
        rows.append(row_of(folder, rows[0]["options"] if rows else {}, args.until))
    for row in rows[1:]:
        del row["options"]  # what differs is enough
    keep(args.json, {"benchmark": "runs", "rows": rows})
    print(runs_table({"rows": rows}))
    if args.png:
        draw(rows, args.png)
