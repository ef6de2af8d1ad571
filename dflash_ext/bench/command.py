"""What the measuring commands understand alike: where, how often, and where the numbers go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_ext.errors import UserError
from dflash_ext.record import save


def parser_of(name: str, description: str | None = None) -> argparse.ArgumentParser:
    """A parser of `python -m dflash_ext.bench NAME` with --device, --rounds and --json."""
    parser = argparse.ArgumentParser(
        prog=f"python -m dflash_ext.bench {name}", description=description
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--rounds", type=int, help="interleaved rounds")
    parser.add_argument("--json", type=Path, help="where to keep the numbers")
    return parser


def parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, rounds: int, cpu_rounds: int
) -> argparse.Namespace:
    """The options, device and rounds filled in. UserError for a device that is not there."""
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; use --device cpu")
    if args.rounds is None:
        args.rounds = rounds if args.device == "cuda" else cpu_rounds
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: expected at least 1")
    return args


def keep(path: Path | None, result: dict[str, Any]) -> None:
    """Save what there is, if asked to: after each row, so that a time limit loses nothing."""
    if path is not None:
        save(path, result)
