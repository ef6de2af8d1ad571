"""`dflash_ext._C`'s row-wise launchers, with Triton's interpreter in the place of the driver.

What an operator passes is checked against the kernel's declaration and runs through its grid, so a
test of the operator is a test of the wrapper, the declaration and the kernel's arithmetic at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dflash_ext.ops import norm, quantise, rotary, rows, swiglu

PROGRAMS = 3
"""Programs of a kernel with partial sums: fewer than there are rows, so that each does several."""


def memory(address: int, dtype: torch.dtype) -> torch.Tensor:
    """What the interpreter takes for a pointer; it reads and writes at addresses, like a device."""
    bytes_ = (ctypes.c_uint8 * dtype.itemsize).from_address(address)
    return torch.frombuffer(bytes_, dtype=dtype)


def placed(x: torch.Tensor, head_dim: int = 0) -> dict[str, int]:
    """Stands for `rows.place`."""
    return dict(device=0, stream=7, head_dim=head_dim)


class Launchers:
    """Stands for `dflash_ext._C`: a call must name exactly what the kernel's launcher takes."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def run(self, kernel: Any, head_dim: int, host: dict[str, Any]) -> None:
        """What a launch does, once it is found to be right."""

    def __getattr__(self, name: str) -> Any:
        from dflash_kernels.variants import kernel_named

        kernel = kernel_named(name)

        def launch(*, device: int, stream: int, head_dim: int, **host: Any) -> None:
            assert (device, stream) == (0, 7)
            assert head_dim in kernel.choices
            assert set(host) == set(kernel.host)
            self.launched.append(name)
            self.run(kernel, head_dim, host)

        return launch


class Interpreter(Launchers):
    """Runs the kernels; rows are `dtype` where they have bf16."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def run(self, kernel: Any, head_dim: int, host: dict[str, Any]) -> None:
        constants = kernel.constants(head_dim, small=False)
        constants.pop("num_warps")
        grid = kernel.grid
        scope = {"ceil_div": lambda a, b: -(-a // b), "int64_t": int} | host
        programs = eval(grid, scope | {"tile": constants[kernel.tile]})
        if programs:
            arguments = [self.argument(kernel.host[n], host[n]) for n in kernel.arguments]
            kernel.fn[(programs,)](*arguments, **constants)

    def argument(self, kind: str, value: Any) -> Any:
        from dflash_kernels.spec import TYPES

        if kind != "f32":
            assert value % TYPES[kind][3] == 0, f"{value} breaks the promise of {kind}"
        if "*" in kind:
            types = {"bf16*": self.dtype, "fp8*": quantise.FP8}
            return memory(value, types.get(kind, torch.float32))
        return value


@contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Iterator[Interpreter]:
    """Within: the row-wise operators on CPU tensors of `dtype` run the Triton kernels; memory that
    torch hands out starts as NaN."""
    interpreter = Interpreter(dtype)
    with monkeypatch.context() as patch:
        for module in (norm, swiglu, rotary, quantise):
            patch.setattr(module, "_C", interpreter)
        patch.setattr(rows, "DTYPES", (dtype,))
        patch.setattr(rows, "has_kernels", lambda x: x.dtype == dtype)
        patch.setattr(rows, "place", placed)
        patch.setattr(rows, "resident_programs", lambda x, per: PROGRAMS)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        try:
            yield interpreter
        finally:
            torch.use_deterministic_algorithms(before)
