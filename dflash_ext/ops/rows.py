"""Rows of activations: what the row-wise operators (norm, rotary, swiglu) check and pass on alike.

A row is [..., width] with innermost stride 1 and free outer strides, so slices of a fused
projection are rows without a copy, to read from and to write into.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
# The kernels copy 16 bytes at a time and were promised widths and strides in these multiples.
POINTER_ALIGNMENT = 16
ALIGNMENT = 8  # elements


def has_kernels(x: Tensor) -> bool:
    """bf16 on CUDA. The CPU, and fp32 on CUDA (evaluation), take the same arithmetic from torch."""
    return x.is_cuda and x.dtype == torch.bfloat16


def check_device_and_dtype(name: str, x: Tensor) -> None:
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: device {x.device} is not supported: use cpu or cuda")
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}: dtype {x.dtype} is not supported: use one of {DTYPES}")


def check_rows(
    name: str, x: Tensor, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
) -> None:
    """x has this shape, the device of `like`, its dtype or `dtype`, and rows we can address."""
    dtype = like.dtype if dtype is None else dtype
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} is {tuple(x.shape)}, expected {shape}")
    if x.device != like.device or x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype} on {x.device}, expected {dtype} on {like.device}")
    if not x.numel():
        return
    if x.stride(-1) != 1:
        raise ValueError(f"{name} has innermost stride {x.stride(-1)}: call .contiguous()")
    if has_kernels(x):
        check_alignment(name, x)


def check_pointer(name: str, x: Tensor) -> None:
    if x.data_ptr() % POINTER_ALIGNMENT:
        raise ValueError(
            f"{name} starts {x.data_ptr() % POINTER_ALIGNMENT} bytes past a multiple of "
            f"{POINTER_ALIGNMENT}: the kernels need that alignment, call .clone()"
        )


def check_alignment(name: str, x: Tensor) -> None:
    """16 bytes at a time is possible, and strides fit the kernels' 32 bits."""
    check_pointer(name, x)
    if any(s % ALIGNMENT for s in outer_strides(x)) or x.shape[-1] % ALIGNMENT:
        raise ValueError(
            f"{name} is {tuple(x.shape)} with strides {x.stride()}: the kernels need a width and "
            f"strides in multiples of {ALIGNMENT} elements"
        )
    if any(s >= 2**31 for s in outer_strides(x)):
        raise ValueError(f"{name} has strides {x.stride()}: they must be below 2**31 elements")


def check_weight(weight: Tensor, width: int, like: Tensor) -> None:
    """The fp32 master of a norm's weight, [width]."""
    if tuple(weight.shape) != (width,) or weight.dtype != torch.float32:
        raise ValueError(
            f"weight is {weight.dtype} {tuple(weight.shape)}, expected the fp32 master ({width},)"
        )
    if weight.device != like.device:
        raise ValueError(f"weight is on {weight.device}, the rows are on {like.device}")
    if not weight.is_contiguous() or (has_kernels(like) and weight.data_ptr() % POINTER_ALIGNMENT):
        raise ValueError("weight must be contiguous and start at a multiple of 16 bytes")


def check_eps(eps: float) -> None:
    # Above 0, or a row of zeros would have no norm.
    if not (eps > 0 and math.isfinite(eps)):
        raise ValueError(f"eps {eps} must be finite and above 0")


def given_or_new(name: str, out: Tensor | None, like: Tensor) -> Tensor:
    """`out`, checked, or a new contiguous tensor of the shape of `like`."""
    if out is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    check_rows(name, out, tuple(like.shape), like)
    return out


def written(name: str, out: Tensor | None, value: Tensor, like: Tensor) -> Tensor:
    """`value` in the dtype of `like`; in `out`, checked, if that is given."""
    if out is None:
        return value.to(like.dtype)
    check_rows(name, out, tuple(like.shape), like)
    return out.copy_(value)


def readable(grad: Tensor) -> Tensor:
    """A gradient as autograd brings it (expanded, transposed, misaligned), as rows."""
    grad = grad.contiguous()
    if has_kernels(grad) and grad.data_ptr() % POINTER_ALIGNMENT:
        return grad.clone()
    return grad


def outer_strides(x: Tensor) -> list[int]:
    """Strides of all dimensions but the last; 0 where there is one index (torch's is arbitrary)."""
    return [s if n > 1 else 0 for n, s in zip(x.shape[:-1], x.stride())]


def place(x: Tensor, head_dim: int = 0) -> dict[str, int]:
    """Where a launch goes: the tensor's device, its current stream, and which image."""
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return {"device": x.device.index, "stream": stream, "head_dim": head_dim}


def operands(**tensors: Tensor) -> dict[str, int]:
    """Address and outer strides of each, named as in python/dflash_kernels/fused_variants.py."""
    made = {}
    for name, x in tensors.items():
        made[f"{name}_ptr"] = x.data_ptr()
        made |= {f"{name}_{axis}": s for axis, s in zip(("row", "head"), outer_strides(x))}
    return made


def resident_programs(x: Tensor, per_multiprocessor: int) -> int:
    """Programs that run at the same time: what a kernel with one partial sum a program starts."""
    device = torch.cuda.get_device_properties(x.device)
    return per_multiprocessor * device.multi_processor_count
