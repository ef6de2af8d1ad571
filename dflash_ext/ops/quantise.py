"""Rows in FP8 with one scale each, and their product with a weight quantised the same way.

Shapes: x [T, K], weight [O, K]. FP8 is E4M3 (4 bits of exponent, 3 of mantissa; largest number 448,
Micikevicius et al., 2022). With s = max |row| / 448, a row is stored as round(row / s) and s, and
(x W^T)[t, o] = s_x[t] s_W[o] sum_k x8[t, k] W8[o, k]. Naive references at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_ext import _C
from dflash_ext.ops import rows
from dflash_ext.torch_api import FP8

TOP = 448.0
"""Largest FP8 number."""
ALIGNMENT = 16
"""Of K and O: what the products' memory accesses need."""
CAPABILITY = (9, 0)
"""Of the oldest device whose products take a scale for each row."""


class Quantised(NamedTuple):
    values: Tensor
    """FP8 [T, K], contiguous."""
    scales: Tensor
    """fp32 [T]."""


def quantise_rows(x: Tensor, up: Tensor | None = None) -> Quantised:
    """x [T, K], or silu(x) * up with `up` of the same shape, in FP8 with a scale a row.

    fp32 or bf16, row strides free, K a multiple of 16; arithmetic in fp32, rounded once. A row of
    zeros has scale 1. Without a gradient. ValueError names what is supported.
    """
    rows.check_device_and_dtype("x", x)
    if x.dim() != 2 or not x.shape[1] or x.shape[1] % ALIGNMENT:
        raise ValueError(f"x is {tuple(x.shape)}, expected [T, K], K a multiple of {ALIGNMENT}")
    for name, part in (("x", x), ("up", up)):
        if part is not None:
            rows.check_rows(name, part, tuple(x.shape), x)
    if not rows.has_kernels(x):
        return quantise_rows_reference(x, up)
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _C.quantise_rows(
        **rows.place(x),
        **rows.operands(x=x, up=x if up is None else up, out=out),
        scale_ptr=scales.data_ptr(),
        width=x.shape[1],
        rows=x.shape[0],
        gated=int(up is not None),
    )
    return Quantised(out, scales)


def scaled_product(
    x: Quantised, weight: Quantised, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    """x W^T, [T, O] in `dtype`: torch's own FP8 product on CUDA, its arithmetic in fp32 elsewhere.

    K and O multiples of 16; `out`, contiguous in `dtype`, takes the result if given.
    """
    if x.values.is_cuda:
        return torch._scaled_mm(
            x.values,
            weight.values.T,
            scale_a=x.scales[:, None],
            scale_b=weight.scales[None],
            out_dtype=dtype,
            use_fast_accum=True,
            **({} if out is None else {"out": out}),
        )
    product = x.values.float() @ weight.values.float().T
    product = product * x.scales[:, None] * weight.scales
    return product.to(dtype) if out is None else out.copy_(product)


def quantise_rows_reference(x: Tensor, up: Tensor | None = None) -> Quantised:
    """Naive, in fp32. Also what runs where there is no kernel."""
    value = x.float() if up is None else torch.nn.functional.silu(x.float()) * up.float()
    largest = value.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / TOP, 1.0)
    return Quantised((value / scales[:, None]).clamp(-TOP, TOP).to(FP8), scales)
