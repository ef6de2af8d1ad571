"""How a kernel is declared: its arguments, what its launcher makes of them, its tiles and grid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

# Spec type -> (Triton type, C++ type, PTX parameter type, what it is promised to be a multiple of).
# Addresses are multiples of 16 bytes, attention's strides of 16 elements, the row-wise operators'
# widths and strides of 8: the wrappers check it, and without the promises Triton would copy element
# by element. Counts such as N and T promise nothing.
TYPES = {
    "bf16*": ("*bf16", "uint64_t", "u64", 16),
    "f32*": ("*fp32", "uint64_t", "u64", 16),
    "fp8*": ("*fp8e4nv", "uint64_t", "u64", 16),
    "i32*": ("*i32", "uint64_t", "u64", 16),
    "i64*": ("*i64", "uint64_t", "u64", 16),
    # Read and written element by element, so that slices will do.
    "f32*any": ("*fp32", "uint64_t", "u64", 1),
    "i64*any": ("*i64", "uint64_t", "u64", 1),
    "stride": ("i32", "int32_t", "u32", 16),
    "i32x8": ("i32", "int32_t", "u32", 8),
    "i32": ("i32", "int32_t", "u32", 1),
    "f32": ("fp32", "float", "f32", 1),
    # One int32 that the launcher zeroes on the stream before the kernel starts.
    "counter*": ("*i32", "uint64_t", "u64", 16),
}


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor of a bf16 [rows, heads, columns] view, encoded by the launcher per launch.

    Host arguments <tensor>_ptr and, unless the view is contiguous, <tensor>_row and <tensor>_head
    (strides in elements). Extents and box are C++ expressions over the host arguments. The code is
    compiled for `block`; the box may differ from it where as many rows arrive (see hopper.py).
    """

    tensor: str
    rows: str
    heads: str
    box_rows: str
    box_heads: str
    block: tuple[int | str, ...]
    """Rows, heads, columns that the code is compiled for; a name is that constexpr's value."""
    contiguous: bool = False
    columns: str = "head_dim"
    rank: ClassVar[int] = 3


@dataclass(frozen=True)
class VectorMap:
    """A TMA descriptor of `length` (a C++ expression) contiguous fp32 numbers in boxes of `box`."""

    tensor: str
    length: str
    box: int
    rank: ClassVar[int] = 1


@dataclass(frozen=True)
class Computed:
    """An int32 argument that the launcher computes: a C++ expression over the host arguments."""

    expression: str


Argument = str | TensorMap | VectorMap | Computed


def pointers(names: str, kind: str) -> dict[str, Argument]:
    return {f"{name}_ptr": kind for name in names.split()}


UNUSED = Computed("0")
# Query heads in a tile where G need not be a power of two: the largest one that divides it.
HEAD_GROUP = "(G & -G)"


def used_if(needed: bool, arguments: dict[str, Argument]) -> dict[str, Argument]:
    """The arguments where the code uses them, else as integers that cost nothing."""
    return arguments if needed else dict.fromkeys(arguments, UNUSED)


@dataclass(frozen=True)
class Kernel:
    """One Triton function: its launch arguments in order, its grid, and its tile choices."""

    name: str
    fn: Any
    arguments: dict[str, Argument]
    """Name -> key of TYPES, or what the launcher makes, in the order of the Triton function."""
    grid: str
    """C++ expression for the number of programs over the host arguments, `tile` and, for persistent
    kernels, `multiprocessors` (both int64)."""
    tile: str
    """The constexpr that `grid` calls `tile`."""
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    """head_dim -> constexprs and num_warps; 0 stands for a kernel without a head_dim."""
    small: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Replacements where a thread block has 99 KiB of shared memory (sm_86, 89, 120, and PTX)."""
    only_sm: int = 0
    """Built for this one architecture, as everything in Gluon is; 0: for all."""
    min_sm: int = 0
    """Uses what older architectures lack; a call there is an error that names the device."""
    loop_spills: int = 0
    """Accesses to local memory that loops of products may have; the reason is where it is set."""
    extra_host: dict[str, str] = field(default_factory=dict)
    """Host arguments that only expressions use: name -> key of TYPES."""

    def constants(self, head_dim: int, small: bool) -> dict[str, Any]:
        chosen = dict(self.choices[head_dim])
        if small:
            chosen |= self.small.get(head_dim, {})
        if head_dim:
            chosen["D"] = head_dim
        return chosen

    @property
    def host(self) -> dict[str, str]:
        """What the launcher is called with: name -> key of TYPES."""
        host: dict[str, str] = {}
        for name, kind in self.arguments.items():
            if isinstance(kind, TensorMap):
                host[f"{kind.tensor}_ptr"] = "bf16*"
                if not kind.contiguous:
                    host |= {f"{kind.tensor}_{axis}": "stride" for axis in ("row", "head")}
            elif isinstance(kind, VectorMap):
                host[f"{kind.tensor}_ptr"] = "f32*"
            elif isinstance(kind, str):
                host[name] = kind
        return host | self.extra_host


def check_signature(kernel: Kernel) -> None:
    """The declared arguments must be the Triton function's own, in order."""
    constexprs = set(next(iter(kernel.choices.values()))) | {"D"}
    names = [n for n in kernel.fn.arg_names if n not in constexprs]
    if names != list(kernel.arguments):
        raise ValueError(f"{kernel.name}: declared {list(kernel.arguments)}, function has {names}")
