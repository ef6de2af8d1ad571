"""Products of rows that lie in groups, each group with a matrix of its own: torch's, if it has any.

Shapes: S rows, E groups, I columns in, O columns out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn


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
