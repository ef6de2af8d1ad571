"""`python -m dflash_ext.bench NAME [options]`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from dflash_ext.errors import UserError, run_cli

BENCHMARKS = (
    "attention",
    "data",
    "fused",
    "launch",
    "once",
    "pipeline",
    "plot",
    "runs",
    "step",
    "tables",
    "target",
    "vocabulary",
)
"""Modules of this package; each has a `main(arguments)`."""


def main() -> int | None:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        got = sys.argv[1] if len(sys.argv) > 1 else "nothing"
        raise UserError(f"benchmark {got!r} is unknown: expected one of {sorted(BENCHMARKS)}")
    benchmark: Any = importlib.import_module(f"dflash_ext.bench.{sys.argv[1]}")
    code: int | None = benchmark.main(sys.argv[2:])
    return code


if __name__ == "__main__":
    run_cli(main)
