"""What stands between the two matrix products of the vocabulary loss, over one chunk of logits.

Shapes: R rows of the chunk, V vocabulary. The statistics of a row decide its weight, its gradient
then replaces its logits. On CUDA both are kernels; on the CPU, and for fp32 gradients, plain torch
in place. The references beside them are the truth, not fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ext import _C
from dflash_ext.ops.rows import place

LOGITS_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
# The kernels load 16 bytes at a time and were promised rows that start at multiples of them.
ROW_ALIGNMENT = 16


class Statistics(NamedTuple):
    """Of each row, [R]."""

    lse: Tensor
    """fp32: log of the sum of exponentials."""
    at_label: Tensor
    """fp32: the label's logit."""
    prediction: Tensor
    """int64: index of the largest logit, the lowest on ties."""
    rank: Tensor
    """int64: number of logits larger than the label's."""


def new_statistics(rows: int, device: torch.device) -> Statistics:
    """Statistics of `rows` rows, not yet computed."""
    lse, at_label = torch.empty((2, rows), dtype=torch.float32, device=device)
    prediction, rank = torch.empty((2, rows), dtype=torch.int64, device=device)
    return Statistics(lse, at_label, prediction, rank)


def logits_buffer(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised [rows, vocab_size] that the operators below and `torch.mm(out=)` take."""
    alignment = ROW_ALIGNMENT if by_kernel(device) else 1
    width = -(-vocab_size // alignment) * alignment
    return torch.empty((rows, width), dtype=dtype, device=device)[:, :vocab_size]


def by_kernel(device: torch.device) -> bool:
    """Do the CUDA kernels serve logits there?"""
    return device.type == "cuda"


def vocabulary_statistics(logits: Tensor, labels: Tensor, out: Statistics) -> None:
    """Fill `out` (each [R], fp32 or int64) with the statistics of `logits` at `labels`.

    logits fp32 or bf16 [R, V], on CUDA of `logits_buffer`; labels int64 [R] in 0..V-1. Arithmetic
    in fp32. ValueError, naming what is supported, before anything is launched.
    """
    check_logits(logits, floats=out[:2], integers=(labels, *out[2:]))
    if by_kernel(logits.device):
        tensors = {"logits": logits, "labels": labels, **out._asdict()}
        launch(f"vocabulary_statistics_{LOGITS_DTYPES[logits.dtype]}", tensors)
        return
    x, label = logits.float(), labels[:, None]
    at_label = x.gather(1, label)
    out.at_label.copy_(at_label[:, 0])
    out.prediction.copy_(x.argmax(1))
    # Ones in fp32, exact below 2^24: torch's CPU takes three times as long to sum bools.
    out.rank.copy_(torch.gt(x, at_label, out=torch.empty_like(x)).sum(1))
    out.lse.copy_(x.logsumexp(1))


def row_lse(logits: Tensor) -> Tensor:
    """fp32 [R]: log-sum-exp of rows of logits, as in `vocabulary_statistics`."""
    if not by_kernel(logits.device):
        return logits.logsumexp(1)
    stats = new_statistics(logits.shape[0], logits.device)
    vocabulary_statistics(logits, torch.zeros_like(stats.rank), stats)
    return stats.lse


def vocabulary_gradient_(
    logits: Tensor, labels: Tensor, stats: Statistics, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """weights * (softmax - onehot), [R, V] in `dtype`; the logits are gone.

    logits, labels, stats as of `vocabulary_statistics`, weights fp32 [R]. Over CUDA logits a bf16
    gradient lies in the same memory, in rows as far apart as the logits' were; else fp32 logits
    are replaced in place and converted last.
    """
    check_logits(logits, floats=(*stats[:2], weights), integers=(labels,))
    if by_kernel(logits.device) and dtype == torch.bfloat16:
        tensors = {"logits": logits, "labels": labels, "weights": weights}
        tensors |= {"lse": stats.lse, "at_label": stats.at_label}
        tensors["grad"] = grad = over(logits, dtype)
        launch(f"vocabulary_gradient_{LOGITS_DTYPES[logits.dtype]}", tensors)
        return grad
    weight = weights[:, None]
    grad = logits.float().sub_(stats.lse[:, None]).exp_().mul_(weight)
    return grad.scatter_add_(1, labels[:, None], -weight).to(dtype)


def over(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, V] of a 2-byte dtype in the memory of `logits`, each row from its start."""
    return logits.view(dtype)[:, : logits.shape[1]]


def statistics_reference(logits: Tensor, labels: Tensor) -> Statistics:
    """`vocabulary_statistics` spelled out, in the dtype of the logits."""
    label = labels[:, None]
    at_label = logits.gather(1, label)
    lse = at_label - logits.log_softmax(1).gather(1, label)
    above = (logits > at_label).long().sum(1)
    return Statistics(lse[:, 0], at_label[:, 0], logits.argmax(1), above)


def gradient_reference(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """d/d logits of sum(weights * cross-entropy), by autograd, in the dtype of the logits."""
    with torch.enable_grad():
        x = logits.detach().clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(x, labels, reduction="none")
        (grad,) = torch.autograd.grad((weights * loss).sum(), x)
    return grad


def check_logits(
    logits: Tensor, *, floats: Sequence[Tensor], integers: Sequence[Tensor] = ()
) -> None:
    """ValueError unless the operators take these logits, and these fp32 and int64 [R] beside."""
    if logits.dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits in {logits.dtype} are not supported: use {list(LOGITS_DTYPES)}")
    if logits.dim() != 2 or logits.shape[1] < 1 or (len(logits) and logits.stride(1) != 1):
        raise ValueError(
            f"logits must be [rows, vocabulary] with innermost stride 1, got {tuple(logits.shape)} "
            f"with strides {logits.stride()}"
        )
    rows, device = logits.shape[0], logits.device
    for values, dtype in ((floats, torch.float32), (integers, torch.int64)):
        for x in values:
            where = x.shape == (rows,) and x.device == device and x.is_contiguous()
            if not where or x.dtype != dtype:
                raise ValueError(
                    f"values of {rows} rows on {device} must be contiguous [{rows}] there, in "
                    f"{dtype}, got {tuple(x.shape)} in {x.dtype} on {x.device}"
                )
    if by_kernel(logits.device) and rows:
        _check_rows(logits)


def _check_rows(logits: Tensor) -> None:
    stride = logits.stride(0)
    if logits.data_ptr() % 16 or stride % ROW_ALIGNMENT:
        raise ValueError(
            f"logits at {logits.data_ptr() % 16} bytes past a multiple of 16, {stride} elements a "
            f"row: rows must start at multiples of 16 bytes and {ROW_ALIGNMENT} elements, take "
            "them from logits_buffer"
        )
    if not logits.shape[1] <= stride < 2**30:
        raise ValueError(f"logits of {logits.shape[1]} columns, {stride} a row: rows overlap")


def launch(kernel: str, tensors: dict[str, Tensor]) -> None:
    """Run a kernel over the rows of tensors["logits"], on their device and its current stream."""
    logits = tensors["logits"]
    getattr(_C, kernel)(
        **place(logits),
        **{f"{name}_ptr": x.data_ptr() for name, x in tensors.items()},
        row_stride=logits.stride(0),
        V=logits.shape[1],
        num_rows=logits.shape[0],
    )
