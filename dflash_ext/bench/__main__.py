"""`python -m dflash_ext.bench NAME [options]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dflash_ext.bench import attention, data, launch, once, pipeline, plot, step, tables
from dflash_ext.errors import UserError, run_cli

BENCHMARKS: dict[str, Callable[[list[str]], int | None]] = {
    "attention": attention.main,
    "data": data.main,
    "launch": launch.main,
    "once": once.main,
    "pipeline": pipeline.main,
    "plot": plot.main,
    "step": step.main,
    "tables": tables.main,
}


def main() -> int | None:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        got = sys.argv[1] if len(sys.argv) > 1 else "nothing"
        raise UserError(f"benchmark {got!r} is unknown: expected one of {sorted(BENCHMARKS)}")
    return BENCHMARKS[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    run_cli(main)
