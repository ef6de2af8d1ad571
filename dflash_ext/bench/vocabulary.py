"""`python -m dflash_ext.bench vocabulary`: the vocabulary loss and what lies between its products.

The operator on one chunk of logits: bytes over time, as a share of a copy's rate in the same
rounds. The whole loss with its gradient, for each kind, beside cross-entropy through the logits of
all rows at once and beside the two matrix products alone; peak memory of each. Random weights; on
CUDA the shape of a Qwen3-8B drafter with 4 x 512 anchors of 16 slots, on the CPU a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_ext.bench.anchors import WrongResult
from dflash_ext.bench.command import keep, parsed, parser_of
from dflash_ext.bench.footprint import peak_of
from dflash_ext.bench.markdown import Row
from dflash_ext.bench.timing import Run, interleaved, tidy
from dflash_ext.loss import LOSSES, LossKind, Teacher, needs_teacher, vocabulary_loss
from dflash_ext.ops.soft_labels import Chunk, kl_divergence_, negative_log_acceptance_
from dflash_ext.ops.vocabulary import (
    LOGITS_DTYPES,
    logits_buffer,
    new_statistics,
    vocabulary_gradient_,
    vocabulary_statistics,
)

BURST = 0.06
LARGEST_DIFFERENCE = 0.02  # of loss and gradient: bf16 against bf16 in another order


class Size(NamedTuple):
    rows: int
    vocab: int
    hidden: int
    chunk_rows: int
    slots: int


CUDA_SIZE = Size(30_720, 151_936, 4_096, 4_096, 15)
CPU_SIZE = Size(480, 8_003, 128, 120, 15)


class Problem:
    """Supervised rows of a random drafter and a random target, with one frozen head."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.size, self.device = size, torch.device(device)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        new = partial(torch.randn, device=device, dtype=self.dtype)
        self.hidden = new(size.rows, size.hidden, requires_grad=True)
        self.head = new(size.vocab, size.hidden) * size.hidden**-0.5 * 2
        self.labels = torch.randint(size.vocab, (size.rows,), device=device)
        self.weights = torch.rand(size.rows, device=device) + 0.1
        rows = torch.arange(size.rows, device=device)
        self.teacher = Teacher(new(size.rows, size.hidden), rows, nn.Identity())

    def loss(self, kind: LossKind = "ce", logits_dtype: torch.dtype = torch.float32) -> Tensor:
        """Numerator; its gradient is in `hidden.grad` then."""
        output = vocabulary_loss(
            self.hidden,
            self.head,
            self.labels,
            self.weights,
            rows_per_block=(self.size.slots,) * (self.size.rows // self.size.slots),
            kind=kind,
            chunk_rows=self.size.chunk_rows,
            logits_dtype=logits_dtype,
            teacher=self.teacher if needs_teacher(kind) else None,
        )
        return self._backward(output.numerator)

    def naive(self) -> Tensor:
        """Cross-entropy through all logits at once."""
        logits = (self.hidden @ self.head.T).float()
        losses = F.cross_entropy(logits, self.labels, reduction="none")
        return self._backward((losses * self.weights).sum())

    def _backward(self, numerator: Tensor) -> Tensor:
        self.hidden.grad = None
        numerator.backward()
        return numerator.detach()

    def products(self) -> None:
        """The two matrix products, chunk by chunk as in the loss, and nothing else."""
        with torch.no_grad():
            logits = self.hidden.new_empty(self.size.chunk_rows, self.size.vocab)
            out = torch.empty_like(self.hidden)
            for start in range(0, self.size.rows, self.size.chunk_rows):
                rows = self.hidden[start : start + self.size.chunk_rows]
                part = torch.mm(rows, self.head.T, out=logits[: len(rows)])
                torch.mm(part, self.head, out=out[start : start + len(rows)])


def operator_rows(problem: Problem, rounds: int) -> list[Row]:
    """Each operator on one chunk, for each dtype of the logits that the device serves."""
    size, device = problem.size, problem.device
    dtypes = list(LOGITS_DTYPES) if device.type == "cuda" else [torch.float32]
    labels, weights = problem.labels[: size.chunk_rows], problem.weights[: size.chunk_rows]
    rows = []
    for dtype in dtypes:
        logits = logits_buffer(size.chunk_rows, size.vocab, dtype, device).normal_()
        # The gradient gets a chunk of its own: what it leaves are no logits any more.
        spent, other = (
            torch.empty_strided(logits.shape, logits.stride(), dtype=dtype, device=device).normal_()
            for _ in range(2)
        )
        stats = new_statistics(size.chunk_rows, device)
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        runs: dict[str, Run] = {
            "copy": partial(other.copy_, logits),
            "statistics": partial(vocabulary_statistics, logits, labels, stats),
            "gradient": partial(vocabulary_gradient_, spent, labels, stats, weights, half),
        }
        each = {"copy": 2 * dtype.itemsize, "statistics": dtype.itemsize}
        each["gradient"] = dtype.itemsize + half.itemsize
        if dtype == torch.float32:
            chunk = Chunk(spent, stats.lse, other, stats.lse, weights)
            runs["kl"] = partial(kl_divergence_, chunk, half)
            runs["lk"] = partial(negative_log_acceptance_, chunk, half)
            each |= {"kl": 2 * 4 + half.itemsize, "lk": 4 * 4 + half.itemsize}  # lk reads twice
        seconds = interleaved(runs, device.type, rounds, BURST)
        rate = {n: logits.numel() * each[n] / seconds[n] / 1e9 for n in runs}
        row: Row = {"logits": LOGITS_DTYPES[dtype], "rows": size.chunk_rows, "vocab": size.vocab}
        for name in runs:
            row |= {f"{name}_ms": seconds[name] * 1e3, f"{name}_gb_s": rate[name]}
        row |= {f"{n}_over_copy": rate[n] / rate["copy"] for n in runs if n != "copy"}
        rows.append(tidy(row))
    return rows


def check(problem: Problem) -> float:
    """Relative distance of the gradient from the naive one; WrongResult if that or loss is off."""
    theirs, expected = problem.naive(), problem.hidden.grad
    assert expected is not None
    ours, got = problem.loss(), problem.hidden.grad
    assert got is not None
    far = float((got.float() - expected.float()).norm() / expected.float().norm())
    loss = abs(float(ours / theirs) - 1)
    if not max(far, loss) <= LARGEST_DIFFERENCE:
        raise WrongResult(f"vocabulary loss: {loss:.2e} off the naive loss, gradient {far:.2e}")
    return far


def loss_row(problem: Problem, rounds: int) -> Row:
    """The whole loss of each kind, the composition and the products in the same rounds."""
    device, size = problem.device.type, problem.size
    runs: dict[str, Callable[[], Any]] = {kind: partial(problem.loss, kind) for kind in LOSSES}
    if device == "cuda":
        runs["ce_bf16_logits"] = partial(problem.loss, "ce", torch.bfloat16)
    runs |= {"naive": problem.naive, "products": problem.products}
    row: Row = {**size._asdict(), "gradient_distance": check(problem)}
    for name, run in runs.items():
        if (peak := peak_of(device, run)) is not None:
            row[f"{name}_peak_gib"] = peak
    seconds = interleaved(runs, device, rounds)
    row |= {f"{name}_ms": t * 1e3 for name, t in seconds.items()}
    row["ce_over_products"] = seconds["ce"] / seconds["products"]
    row["naive_over_ce"] = seconds["naive"] / seconds["ce"]
    return tidy(row)


def main(argv: list[str]) -> None:
    args = parsed(parser_of("vocabulary", __doc__), argv, rounds=7, cpu_rounds=7)
    device = args.device
    problem = Problem(CUDA_SIZE if device == "cuda" else CPU_SIZE, device)
    result: Row = {"benchmark": "vocabulary", "device": device, "rounds": args.rounds}
    for name, measure in (("loss", loss_row), ("operators", operator_rows)):
        found = measure(problem, args.rounds)
        result[name] = found
        for row in found if isinstance(found, list) else [found]:
            print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        keep(args.json, result)
