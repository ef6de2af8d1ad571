"""The row-wise kernels as variants: what is compiled, and why these tiles.

All are bound by memory: a thread holds 16 elements of each operand, two copies of 16 bytes, so
that a multiprocessor has more bytes in flight than its share of the bandwidth times the latency
(docs/kernel_notes.md, "Row-wise operators").
"""

from __future__ import annotations

from dflash_kernels import norm, quantise, rotary, swiglu
from dflash_kernels.spec import Argument, Kernel, pointers

# Columns of the widest row that a norm's program holds, smallest first: the wrapper takes the first
# that fits. 5,120 in 8,192 leaves threads idle but costs no bandwidth.
NORM_BLOCKS = (4096, 8192)


def _sized(names: str, kind: str) -> dict[str, Argument]:
    return dict.fromkeys(names.split(), kind)


def _strides(names: str) -> dict[str, Argument]:
    return _sized(" ".join(f"{name}_row" for name in names.split()), "i32x8")


def _norm_fwd(block: int) -> Kernel:
    return Kernel(
        name=f"rms_norm_fwd_{block}",
        fn=norm.rms_norm_fwd_kernel,
        arguments=pointers("x residual", "bf16*")
        | pointers("weight", "f32*")
        | pointers("out total", "bf16*")
        | _strides("x residual out total")
        | {"width": "i32x8", "add": "i32", "eps": "f32"},
        grid="rows",
        tile="BLOCK",
        choices={0: dict(BLOCK=block, num_warps=block // 1024)},
        extra_host={"rows": "i32"},
    )


def _norm_bwd(block: int) -> Kernel:
    return Kernel(
        name=f"rms_norm_bwd_{block}",
        fn=norm.rms_norm_bwd_kernel,
        arguments=pointers("x", "bf16*")
        | pointers("weight", "f32*")
        | pointers("grad grad_total dx normed", "bf16*")
        | pointers("partial", "f32*")
        | _strides("x grad grad_total dx normed")
        | {"width": "i32x8"}
        | _sized("rows add_total want_normed", "i32")
        | {"eps": "f32"},
        grid="programs",
        tile="BLOCK",
        choices={0: dict(BLOCK=block, STAGES=3, num_warps=block // 512)},
        extra_host={"programs": "i32"},
    )


_SWIGLU_TILE = dict(BLOCK=2048, num_warps=4)
_SWIGLU_GRID = "int64_t(rows) * ceil_div(width, tile)"

_ROTARY = {
    D: dict(ROWS=2048 // D, num_warps=4)  # D/2 columns: 8 elements of each half a thread
    for D in (64, 128, 256)
}  # fmt: skip
_ROTARY_SIZES: dict[str, Argument] = {"table_row": "i32x8", "rows": "i32"} | _sized(
    "heads group", "i32"
)


def _head_strides(names: str) -> dict[str, Argument]:
    return _sized(" ".join(f"{n}_row {n}_head" for n in names.split()), "i32x8")


FUSED_KERNELS = (
    *(make(block) for block in NORM_BLOCKS for make in (_norm_fwd, _norm_bwd)),
    Kernel(
        name="swiglu_fwd",
        fn=swiglu.swiglu_fwd_kernel,
        arguments=pointers("gate up out", "bf16*") | _strides("gate up out") | {"width": "i32x8"},
        grid=_SWIGLU_GRID,
        tile="BLOCK",
        choices={0: _SWIGLU_TILE},
        extra_host={"rows": "i32"},
    ),
    Kernel(
        name="swiglu_bwd",
        fn=swiglu.swiglu_bwd_kernel,
        arguments=pointers("gate up dact dgate dup act", "bf16*")
        | _strides("gate up dact dgate dup act")
        | {"width": "i32x8", "want_act": "i32"},
        grid=_SWIGLU_GRID,
        tile="BLOCK",
        choices={0: _SWIGLU_TILE},
        extra_host={"rows": "i32"},
    ),
    Kernel(
        name="quantise_rows",
        fn=quantise.quantise_rows_kernel,
        arguments=pointers("x up", "bf16*")
        | pointers("out", "fp8*")
        | {"scale_ptr": "f32*any"}
        | {"x_row": "i32x8", "up_row": "i32x8", "out_row": "stride", "width": "stride"}
        | {"gated": "i32"},
        grid="rows",
        tile="BLOCK",
        choices={0: _SWIGLU_TILE},
        min_sm=90,  # products of FP8 rows with a scale each need it as well
        extra_host={"rows": "i32"},
    ),
    Kernel(
        name="head_norm_rope_fwd",
        fn=rotary.head_norm_rope_fwd_kernel,
        arguments=pointers("x", "bf16*")
        | pointers("weight cos sin", "f32*")
        | pointers("out", "bf16*")
        | _head_strides("x out")
        | _ROTARY_SIZES
        | {"normed": "i32", "eps": "f32"},
        grid="ceil_div(rows, tile) * ceil_div(heads, group)",
        tile="ROWS",
        choices=_ROTARY,
    ),
    Kernel(
        name="head_norm_rope_bwd",
        fn=rotary.head_norm_rope_bwd_kernel,
        arguments=pointers("x", "bf16*")
        | pointers("weight cos sin", "f32*")
        | pointers("grad dx", "bf16*")
        | pointers("partial", "f32*")
        | _head_strides("x grad dx")
        | _ROTARY_SIZES
        | {"eps": "f32"},
        grid="programs",
        tile="ROWS",
        choices={D: tile | dict(STAGES=3) for D, tile in _ROTARY.items()},
        extra_host={"programs": "i32"},
    ),
)
