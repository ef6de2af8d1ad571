"""The small attention problem that the benchmark tests share."""

from __future__ import annotations

from dataclasses import replace

import torch

from dflash_ext.bench.problem import Problem, make_problem
from dflash_ext.bench.shapes import Shape

SMALL = Shape("A", (50, 7, 90), 11, 8, 2, 1, 64)


def small(window: int | None = None, causal: bool = False) -> Problem:
    return make_problem(replace(SMALL, window=window, causal=causal), "cpu", torch.float32)
