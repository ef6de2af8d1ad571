"""What is compiled, in one place: each kernel's arguments, its tiles per head_dim, and why.

A variant is (kernel, head_dim, architecture). B, the GQA ratio, windows and in-block causality are
run time arguments, so a head_dim costs a few images per architecture and nothing else multiplies.
The Hopper kernels beside them (hopper_variants.py) exist for sm_90 alone.
"""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_kernels import layout
from dflash_kernels.attention_variants import ATTENTION_KERNELS, KEY_TILE
from dflash_kernels.fused_variants import FUSED_KERNELS
from dflash_kernels.hopper_variants import HOPPER_KERNELS
from dflash_kernels.spec import Kernel, pointers
from dflash_kernels.vocabulary_variants import VOCABULARY_KERNELS

HEAD_DIMS = (64, 128, 256)
DEFAULT_ARCHITECTURES = (80, 86, 90, 100, 120)
FALLBACK_PTX = 80  # PTX of this architecture serves devices that have no image of their own

# Largest dynamic shared memory of one thread block, bytes (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"; 1 KiB of each multiprocessor is reserved per block).
SMALL = 99 * 1024
SHARED_MEMORY_LIMIT = {
    80: 163 * 1024,
    86: SMALL,
    89: SMALL,
    90: 227 * 1024,
    100: 227 * 1024,
    120: SMALL,
}

KERNELS = (
    *ATTENTION_KERNELS,
    Kernel(
        name="attention_layout",
        fn=layout.attention_layout_kernel,
        arguments=pointers("ctx_start ctx_end ranges seen doc_first doc_last", "i32*")
        | dict.fromkeys(("num_blocks", "num_ctx", "B", "window"), "i32"),
        grid=f"ceil_div(num_ctx, {KEY_TILE}) + ceil_div(num_blocks, tile)",
        tile="GROUP",
        choices={0: dict(BN=KEY_TILE, GROUP=32, CHUNK=1024, num_warps=4)},
    ),
    *HOPPER_KERNELS,
    *FUSED_KERNELS,
    *VOCABULARY_KERNELS,
)


@dataclass(frozen=True)
class Variant:
    kernel: Kernel
    head_dim: int
    sm: int
    ptx: bool = False
    """The fallback for devices without an image of their own: must fit the smallest of them."""

    @property
    def stem(self) -> str:
        tail = f"_d{self.head_dim}" if self.head_dim else ""
        return f"{self.kernel.name}{tail}_sm{self.sm}{'_ptx' if self.ptx else ''}"

    @property
    def constants(self) -> dict[str, Any]:
        return self.kernel.constants(self.head_dim, self.shared_limit <= SMALL)

    @property
    def shared_limit(self) -> int:
        return SMALL if self.ptx else SHARED_MEMORY_LIMIT[self.sm]

    @property
    def tile(self) -> int:
        return int(self.constants[self.kernel.tile])


def kernel_named(name: str) -> Kernel:
    return next(k for k in KERNELS if k.name == name)


def units() -> list[tuple[str, int]]:
    """(kernel, head_dim) pairs: one compile job each, for all architectures."""
    return [(k.name, d) for k in KERNELS for d in k.choices]


# The compile step's own files, without this one, of which `unit_digest` says what matters.
COMPILER = ("compile", "gates", "prefetch", "spec")


def unit_sources(name: str) -> list[Path]:
    """The files that hold a kernel's code: its own module and what that imports of ours."""
    found: list[Path] = []
    waiting = [kernel_named(name).fn.__module__]
    while waiting:
        file = Path(__file__).with_name(waiting.pop().rpartition(".")[2] + ".py")
        if file not in found:
            found.append(file)
            imports = ast.walk(ast.parse(file.read_text()))
            names = [i.module for i in imports if isinstance(i, ast.ImportFrom) and i.module]
            waiting += [n for n in names if n.startswith("dflash_kernels.")]
    return found


def unit_variants(name: str, head_dim: int, architectures: tuple[int, ...]) -> list[Variant]:
    """What one compile job makes: an image per architecture, and the fallback PTX with sm_80."""
    kernel = kernel_named(name)
    own = [sm for sm in architectures if kernel.only_sm in (0, sm) and sm >= kernel.min_sm]
    made = [Variant(kernel, head_dim, sm) for sm in own]
    if FALLBACK_PTX in own:
        made.append(Variant(kernel, head_dim, FALLBACK_PTX, ptx=True))
    return made


def unit_digest(made: list[Variant]) -> str:
    """Changes with what one compile job is told: arguments, grid, tiles, limits."""
    told = [(v.stem, v.constants, v.shared_limit, replace(v.kernel, fn=None)) for v in made]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def variants(architectures: tuple[int, ...]) -> list[Variant]:
    return [v for name, head_dim in units() for v in unit_variants(name, head_dim, architectures)]


def parse_architectures(text: str | None) -> tuple[int, ...]:
    """DFLASH_SM, for example "90" or "80,90a 120": sorted numbers. Raises ValueError."""
    if not text:
        return DEFAULT_ARCHITECTURES
    chosen = {re.sub(r"^sm_?|a$", "", word) for word in re.split(r"[,;\s]+", text.strip())}
    known = sorted(SHARED_MEMORY_LIMIT)
    if not chosen <= {str(sm) for sm in known}:
        raise ValueError(f"DFLASH_SM={text!r}: expected a list of {known}")
    return tuple(sorted(int(sm) for sm in chosen))
