"""`python -m dflash_ext.bench launch`: host time per launch, per autograd call, per layout.

A tiny problem, so that on CUDA the device is always ahead and the queue never fills; small batches
are queued and the device is waited for outside the timing. On the CPU the operator computes in the
same call, so its numbers include the (tiny) work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_ext.bench import tables
from dflash_ext.bench.command import keep, parsed, parser_of
from dflash_ext.bench.problem import Problem, make_problem
from dflash_ext.bench.recorder import recorded
from dflash_ext.bench.shapes import Shape
from dflash_ext.bench.timing import Run, host_seconds, rounded
from dflash_ext.ops import attention_cpu, attention_cuda, layout
from dflash_ext.ops.attention import dflash_attention

TINY = Shape("tiny", (64,), 4, 16, 4, 1, 128)
BATCH = 20
"""Calls between two synchronisations: at most 100 kernels, a tenth of CUDA's queue."""


def launch_runs(device: str) -> tuple[dict[str, Run], list[Any]]:
    """What is timed, and the tensors that the raw launches point to."""
    problem = make_problem(TINY, device, torch.float32 if device == "cpu" else torch.bfloat16)
    with recorded(layout) as layout_calls:
        built = problem.build_layout()
    forward = partial(dflash_attention, *problem.leaves, built)
    with recorded(attention_cpu if device == "cpu" else attention_cuda) as forward_calls:
        out = forward()
    grad, one = torch.randn_like(out), torch.zeros(1, device=device)
    runs: dict[str, Run] = {
        "empty tensor": partial(torch.empty, 1, device=device),
        "one-element add": lambda: one.add_(1),
    }
    for name, run in (*layout_calls, *forward_calls):
        runs[f"raw call: {name}"] = run
    runs["build_layout"] = problem.build_layout
    runs["autograd forward"] = forward
    for name, call in (("", forward), (" of nothing", partial(_Nothing.apply, *problem.leaves))):
        runs[f"autograd forward + backward{name}"] = partial(_there_and_back, call, problem, grad)
    return runs, [problem, built, out]


def _there_and_back(call: Callable[[], Tensor], problem: Problem, grad: Tensor) -> object:
    return torch.autograd.grad(call(), problem.leaves, grad)


class _Nothing(torch.autograd.Function):
    """As many tensors in, out and back as the operator's, and no work: what is autograd's own."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*leaves)
        return torch.empty_like(leaves[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(leaf) for leaf in ctx.saved_tensors)


def measure(device: str, rounds: int) -> list[dict[str, Any]]:
    """Median microseconds of one call over interleaved batches."""
    runs, alive = launch_runs(device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(rounds + 3):  # three rounds warm up
        for name, run in runs.items():
            took = host_seconds(run, device, BATCH)
            if round_index >= 3:
                times[name].append(took)
    del alive
    medians = {name: statistics.median(t) * 1e6 for name, t in times.items()}
    add = medians["one-element add"]
    return [
        {"what": name, "microseconds": rounded(us), "over_add": rounded(us / add)}
        for name, us in medians.items()
    ]


def main(argv: list[str]) -> None:
    args = parsed(parser_of("launch", __doc__), argv, rounds=200, cpu_rounds=200)
    device = args.device
    rows = measure(device, args.rounds)
    print(tables.launch_table(rows))
    keep(args.json, {"benchmark": "launch", "device": device, "rows": rows})
