"""`python -m dflash_ext.bench once`: one forward and backward of one shape, for a profiler."""

from __future__ import annotations

import argparse

import torch

from dflash_ext.bench.problem import make_problem
from dflash_ext.bench.shapes import CUDA_SHAPES, sweeps
from dflash_ext.errors import UserError
from dflash_ext.ops.attention import dflash_attention
from dflash_ext.ops.attention_call import attention_path, forced_path
from dflash_ext.ops.kept import room_for_ds


def main(argv: list[str]) -> None:
    shapes = {s.name: s for s in (*CUDA_SHAPES, *(shape for _, shape in sweeps()))}
    parser = argparse.ArgumentParser(prog="python -m dflash_ext.bench once")
    parser.add_argument("--shape", choices=shapes, default="A")
    parser.add_argument("--path", choices=("triton",), default=None, help="force a kernel path")
    parser.add_argument("--recompute", action="store_true", help="dS again for dQ, not kept")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise UserError("`bench once` is for a profiler on a GPU, and torch sees none here")
    problem = make_problem(shapes[args.shape], "cuda", torch.bfloat16)
    layout = problem.build_layout()
    with forced_path(args.path), room_for_ds(None if args.recompute else 0):
        path = attention_path(problem.leaves, layout)
        out = dflash_attention(*problem.leaves, layout)
        torch.autograd.grad(out, problem.leaves, torch.ones_like(out))
    torch.cuda.synchronize()
    print(f"shape {args.shape}, path {path}")
