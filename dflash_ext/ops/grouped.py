"""Experts of a mixture: rows sorted by expert, products of each group with a matrix of its own.

The grouped products are torch's, where it has any. Shapes: T tokens, k experts a token, S = T * k
rows, E experts, I columns in, O columns out, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dflash_ext.ops.quantise import FP8, Quantised, scaled_product


def mixed(
    chosen: Tensor,
    weights: Tensor,
    experts: int,
    products: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """[T, H]: for each token the sum of what its experts make of it.

    chosen int64 [T, k], each token's experts; weights [T, k], their shares. products(token, ends,
    share) -> [S, H]: row s is token[s] (int64 [S]) through its expert, times share[s]; the rows of
    expert e are [ends[e - 1], ends[e]), ends int32 [E].
    """
    T, k = chosen.shape
    order, ends = by_expert(chosen.flatten(), experts)
    made = products(order // k, ends, weights.flatten().index_select(0, order))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(T * k, device=order.device))
    return made.index_select(0, place).view(T, k, -1).sum(1)


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Rows in the order of their experts, int64 [S], and where each expert's end, int32 [E].

    chosen: int64 [S] in 0..E-1. Stable, so that bits repeat.
    """
    # A GPU sorts a byte of the keys at a time.
    kind = torch.uint8 if experts <= 256 else torch.int16
    ids, order = torch.sort(chosen.to(kind), stable=True)
    every = torch.arange(experts, dtype=kind, device=chosen.device)
    return order, torch.searchsorted(ids, every, right=True, out_int32=True)


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[S, O]: rows [ends[e - 1], ends[e]) of x [S, I] times weights[e]^T.

    weights [E, O, I], in the dtype of x; ends int32 [E], rising to S. On CUDA bf16, with I and O
    multiples of 8 and no wait of the host; the CPU multiplies group after group.
    """
    if x.is_cuda:
        return _of_torch()(x, weights.transpose(1, 2), offs=ends)
    out, begin = x.new_empty(len(x), weights.shape[1]), 0
    for weight, end in zip(weights, ends.tolist()):
        torch.mm(x[begin:end], weight.T, out=out[begin:end])
        begin = end
    return out


def grouped_scaled_product(
    x: Quantised, weights: Quantised, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """`grouped_product` of FP8 rows and matrices with a scale a row each, in `dtype`.

    weights: values [E, O, I], scales [E, O]; I and O multiples of 16. Off CUDA emulated in fp32.
    """
    if x.values.is_cuda:
        return _scaled_of_torch(x, weights, ends, dtype)
    out, begin = x.scales.new_empty((len(x.scales), weights.values.shape[1]), dtype=dtype), 0
    for values, scales, end in zip(weights.values, weights.scales, ends.tolist()):
        rows = Quantised(x.values[begin:end], x.scales[begin:end])
        out[begin:end] = scaled_product(rows, Quantised(values, scales), dtype)
        begin = end
    return out


def _scaled_of_torch(x: Quantised, weights: Quantised, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_grouped_mm(
        x.values,
        weights.values.transpose(1, 2),
        x.scales,
        weights.scales,
        offs=ends,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def _of_torch() -> Any:
    return getattr(nn.functional, "grouped_mm", None) or torch._grouped_mm


@functools.cache
def torch_multiplies_in_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Does torch's own grouped product run there? Releases differ in where: it is tried."""
    try:
        x = torch.zeros(8, 8, dtype=dtype, device=device)
        _of_torch()(x, x[None], offs=torch.full((1,), 8, dtype=torch.int32, device=device))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def multiplies_in_groups(device: torch.device) -> bool:
    """Does `grouped_product` run there?"""
    return device.type == "cpu" or torch_multiplies_in_groups(device, torch.bfloat16)


@functools.cache
def multiplies_fp8_in_groups(device: torch.device) -> bool:
    """Does `grouped_scaled_product` run there?"""
    if device.type == "cpu":
        return True
    x = Quantised(torch.zeros(16, 16, device=device).to(FP8), torch.ones(16, device=device))
    weights = Quantised(x.values[None], x.scales[None])
    ends = torch.full((1,), 16, dtype=torch.int32, device=device)
    try:
        _scaled_of_torch(x, weights, ends, torch.bfloat16)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return True
