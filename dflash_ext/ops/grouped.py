"""Experts of a mixture: rows sorted by expert, products of each group with a matrix of its own.

The grouped products are torch's, where it has any. Shapes: T tokens, k experts a token, S = T * k
rows, E experts, I columns in, O columns out, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dflash_ext.ops.quantise import Quantised, scaled_product
from dflash_ext.torch_api import grouped_mm, multiplies_in_groups, scaled_grouped_mm


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
        return grouped_mm(x, weights, ends)
    out = x.new_empty(len(x), weights.shape[1])
    for rows, weight in zip(_groups(ends), weights):
        torch.mm(x[rows], weight.T, out=out[rows])
    return out


def grouped_scaled_product(
    x: Quantised, weights: Quantised, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """`grouped_product` of FP8 rows and matrices with a scale a row each, in `dtype`.

    weights: values [E, O, I], scales [E, O]; I and O multiples of 16. Off CUDA emulated in fp32.
    """
    if x.values.is_cuda:
        return scaled_grouped_mm(*x, *weights, ends, dtype)
    out = x.scales.new_empty((len(x.scales), weights.values.shape[1]), dtype=dtype)
    for rows, *weight in zip(_groups(ends), *weights):
        part = Quantised(x.values[rows], x.scales[rows])
        out[rows] = scaled_product(part, Quantised(*weight), dtype)
    return out


def _groups(ends: Tensor) -> Iterator[slice]:
    begin = 0
    for end in ends.tolist():
        yield slice(begin, end)
        begin = end


def groups_run_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Do the grouped products of this dtype, bf16 or FP8, run there?"""
    return device.type == "cpu" or multiplies_in_groups(device, dtype)
