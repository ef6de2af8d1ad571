"""Markdown tables of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
Rows = Sequence[Row]
# A column: heading, key in the row, format. A heading may stand twice.
Columns = Sequence[tuple[str, str, str]]


def markdown(columns: Columns, rows: Rows) -> str:
    """A Markdown table; what was not measured is a dash."""
    lines = [
        "| " + " | ".join(heading for heading, _, _ in columns) + " |",
        "|---" * len(columns) + "|",
    ]
    for row in rows:
        cells = (form.format(row[key]) if key in row else "–" for _, key, form in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
