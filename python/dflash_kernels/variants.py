"""What is compiled, in one place: each kernel's arguments, its tiles per head_dim, and why.

A variant is (kernel, head_dim, architecture). B, the GQA ratio, windows and in-block causality are
run time arguments, so a head_dim costs three images per architecture and nothing else multiplies.
The Hopper kernels beside them (hopper_variants.py) exist for sm_90 alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from dflash_kernels import attention, layout
from dflash_kernels.hopper_variants import HOPPER_KERNELS
from dflash_kernels.spec import Argument, Kernel, pointers

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

_STRIDES: dict[str, Argument] = {
    f"{name}_{axis}": "stride"
    for name in ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")
    for axis in ("row", "head")
}
_SIZES: dict[str, Argument] = dict.fromkeys(
    ("num_blocks", "num_ctx", "num_kv_heads", "B", "G", "window", "causal"), "i32"
)


# KEY_TILE is fixed for every architecture because the layout's `ranges` are counted in it.
KEY_TILE = 64

KERNELS = (
    Kernel(
        name="attention_fwd",
        fn=attention.attention_fwd_kernel,
        arguments=pointers("q k_ctx v_ctx k_blk v_blk out", "bf16*")
        | pointers("lse", "f32*")
        | pointers("ctx_start ctx_end doc_first doc_last", "i32*")
        | _STRIDES
        | _SIZES
        | {"scale_log2": "f32"},
        grid="ceil_div(int64_t(num_blocks) * B * G, tile) * num_kv_heads",
        tile="M",
        choices={
            # 128 rows: at 64 the L2 would have to deliver about 8 TB/s (docs/kernel_notes.md).
            64: dict(M=128, BN=64, OWN=32, STAGES=3, num_warps=4),
            128: dict(M=128, BN=64, OWN=32, STAGES=3, num_warps=8),
            # 256 columns of fp32 accumulator: 64 rows over 8 warps keep it in registers.
            256: dict(M=64, BN=32, OWN=32, STAGES=2, num_warps=8),
        },
        small={128: dict(STAGES=2)},
    ),
    Kernel(
        name="attention_bwd_dq",
        fn=attention.attention_bwd_dq_kernel,
        arguments=pointers("q k_ctx v_ctx k_blk v_blk out dout", "bf16*")
        | pointers("lse delta", "f32*")
        | pointers("dq", "bf16*")
        | pointers("ctx_start ctx_end doc_first doc_last", "i32*")
        | _STRIDES
        | _SIZES
        | {"scale_log2": "f32", "scale": "f32"},
        grid="ceil_div(int64_t(num_blocks) * B * G, tile) * num_kv_heads",
        tile="M",
        choices={
            64: dict(M=64, BN=64, OWN=32, STAGES=2, num_warps=4),
            # H200, product TFLOP/s on shapes A/C/D: 500/456/560, against 480/421/503 for 64 rows
            # with 4 warps and 440/397/479 with 2 stages.
            128: dict(M=128, BN=64, OWN=32, STAGES=3, num_warps=8),
            256: dict(M=64, BN=32, OWN=32, STAGES=1, num_warps=8),
        },
        small={128: dict(M=64, BN=32, STAGES=2, num_warps=4)},
    ),
    Kernel(
        name="attention_bwd_dkv",
        fn=attention.attention_bwd_dkv_kernel,
        arguments=pointers("q k_ctx v_ctx k_blk v_blk dout", "bf16*")
        | pointers("lse delta", "f32*")
        | pointers("dk_ctx dv_ctx dk_blk dv_blk", "bf16*")
        | pointers("ctx_start ctx_end ranges", "i32*")
        | _STRIDES
        | _SIZES
        | {"scale_log2": "f32", "scale": "f32"},
        grid="(ceil_div(num_ctx, tile) + ceil_div(int64_t(num_blocks) * B, tile)) * num_kv_heads",
        tile="BN",
        choices={
            64: dict(BN=KEY_TILE, M=64, STAGES=2, num_warps=4),
            # H200, A/C/D: 364/329/433, against 322/261/394 for 64 rows, 200/171/224 for 8 warps
            # (two accumulators of 64 x 128 leave few registers for the tiles).
            128: dict(BN=KEY_TILE, M=32, STAGES=2, num_warps=4),
            256: dict(BN=KEY_TILE, M=32, STAGES=1, num_warps=8),
        },
        small={256: dict(M=16)},
    ),
    Kernel(
        name="attention_layout",
        fn=layout.attention_layout_kernel,
        arguments=pointers("ctx_start ctx_end ranges doc_first doc_last", "i32*")
        | dict.fromkeys(("num_blocks", "num_ctx", "B", "window"), "i32"),
        grid=f"ceil_div(num_ctx, {KEY_TILE}) + ceil_div(num_blocks, tile)",
        tile="GROUP",
        choices={0: dict(BN=KEY_TILE, GROUP=32, CHUNK=1024, num_warps=4)},
    ),
    *HOPPER_KERNELS,
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


def unit_variants(name: str, head_dim: int, architectures: tuple[int, ...]) -> list[Variant]:
    """What one compile job makes: an image per architecture, and the fallback PTX with sm_80."""
    kernel = kernel_named(name)
    own = [sm for sm in architectures if kernel.only_sm in (0, sm)]
    made = [Variant(kernel, head_dim, sm) for sm in own]
    if FALLBACK_PTX in own:
        made.append(Variant(kernel, head_dim, FALLBACK_PTX, ptx=True))
    return made


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
