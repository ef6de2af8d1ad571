"""What torch's releases change: the allocator's setting, products of groups of rows.

Shapes: S rows, E groups, I columns in, O columns out.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def share_device_memory() -> None:
    """Let batches of all sizes share device memory that stays as it is (torch's segments grow).

    In the environment, for this process and those it starts; before the first use of a device, and
    only where the user has not chosen settings of the allocator.
    """
    if not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        os.environ |= dict.fromkeys(_ALLOCATOR_SETTINGS, "expandable_segments:True")


def grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[S, O]: rows [ends[e - 1], ends[e]) of x [S, I] times weights[e]^T; weights [E, O, I]."""
    product = getattr(nn.functional, "grouped_mm", None) or torch._grouped_mm
    return product(x, weights.transpose(1, 2), offs=ends)


def scaled_grouped_mm(
    x: Tensor,
    x_scales: Tensor,
    weights: Tensor,
    weight_scales: Tensor,
    ends: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """`grouped_mm` of FP8 rows and matrices with scales fp32 [S] and [E, O], in `dtype`."""
    return torch._scaled_grouped_mm(
        x,
        weights.transpose(1, 2),
        x_scales,
        weight_scales,
        offs=ends,
        out_dtype=dtype,
        use_fast_accum=True,
    )


@functools.cache
def multiplies_in_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Does the product of this dtype (FP8: the scaled one) run on the device? It is tried."""
    x = torch.zeros(16, 16, device=device).to(dtype)
    ends = torch.full((1,), 16, dtype=torch.int32, device=device)
    try:
        if dtype == FP8:
            ones = torch.ones(16, device=device)
            scaled_grouped_mm(x, ones, x[None], ones[None], ends, torch.bfloat16)
        else:
            grouped_mm(x, x[None], ends)
    except (AttributeError, RuntimeError, TypeError):  # RuntimeError: also NotImplementedError
        return False
    return True
