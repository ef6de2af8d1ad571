"""The plain Triton attention kernels as variants: what is compiled, and why these tiles.

Each that computes scores is declared twice: for every architecture with pointers, and for sm_90
with tensor maps, which cannot describe an empty tensor and have no use at head_dim 256. Those
around kept dS (attention_kept.py) exist for sm_90 alone.
"""

from __future__ import annotations

from typing import Any

from dflash_kernels import attention_backward, attention_forward, attention_kept
from dflash_kernels.spec import (
    HEAD_GROUP,
    UNUSED,
    Argument,
    Computed,
    Kernel,
    TensorMap,
    pointers,
    used_if,
)

# KEY_TILE is fixed for every architecture because the layout's `ranges` are counted in it.
KEY_TILE = 64
MAP_TILE = 64  # rows that one tensor map copies: keys, or rows of queries

_ROWS = "int64_t(num_blocks) * B"
_ROW_TILES = f"ceil_div({_ROWS} * G, tile) * num_kv_heads"
_CONTEXT_TILES = "ceil_div(num_ctx, tile) * num_kv_heads"
_OWN_TILES = f"ceil_div({_ROWS}, tile) * num_kv_heads"
_STRIDES: dict[str, Argument] = {
    f"{name}_{axis}": "stride"
    for name in ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")
    for axis in ("row", "head")
}
_OPTIONS: dict[str, Argument] = {"window": "i32", "causal": "i32", "scale_log2": "f32"}
_INPUTS = pointers("q k_ctx v_ctx k_blk v_blk", "bf16*")
_ORDER = pointers("ctx_start ctx_end doc_first doc_last", "i32*")


def _sizes(names: str) -> dict[str, Argument]:
    return dict.fromkeys(names.split(), "i32")


def _key_map(name: str) -> TensorMap:
    return TensorMap(
        name,
        rows="num_ctx",
        heads="num_kv_heads",
        box_rows=str(MAP_TILE),
        box_heads="1",
        block=("BN", 1, "D"),
    )


def _row_map(name: str, contiguous: bool = False) -> TensorMap:
    return TensorMap(
        name,
        rows=_ROWS,
        heads="num_kv_heads * G",
        box_rows=f"{MAP_TILE} / {HEAD_GROUP}",
        box_heads=HEAD_GROUP,
        block=("M", 1, "D"),
        contiguous=contiguous,
    )


def _name(kernel: str, tma: bool) -> str:
    return f"attention_tma_{kernel}" if tma else f"attention_{kernel}"


def _where(tma: bool, choices: dict[int, dict[str, Any]], **small: Any) -> dict[str, Any]:
    """The architectures, tiles and constants of a declaration."""
    made = {d: {**tile, "TMA": int(tma)} for d, tile in choices.items()}
    return {"choices": made, "only_sm": 90} if tma else {"choices": made, **small}


def _forward(tma: bool) -> Kernel:
    maps = {f"{x}_map": _key_map(x) if tma else UNUSED for x in ("k_ctx", "v_ctx")}
    return Kernel(
        name=_name("fwd", tma),
        fn=attention_forward.attention_fwd_kernel,
        arguments=_INPUTS
        | maps
        | pointers("out", "bf16*")
        | pointers("lse", "f32*")
        | _ORDER
        | _STRIDES
        | _sizes("num_blocks num_kv_heads B G")
        | _OPTIONS,
        grid=_ROW_TILES,
        tile="M",
        extra_host={"num_ctx": "i32"},
        **(
            # Two programs a multiprocessor: one's softmax beside the other's products.
            _where(True, dict.fromkeys((64, 128), _tile(M=128, PAIR=1)))
            if tma
            else _where(
                False,
                {
                    # 128 rows: at 64 the L2 would have to deliver about 8 TB/s (kernel_notes.md).
                    64: _tile(M=128, PAIR=0),
                    128: _tile(M=128, PAIR=0, STAGES=3, num_warps=8),
                    # 256 columns of fp32 accumulator: 64 rows over 8 warps keep it in registers.
                    256: _tile(M=64, PAIR=0, num_warps=8),
                },
                small={128: dict(STAGES=2), 256: dict(BN=32)},
            )
        ),
    )


def _tile(**tile: int) -> dict[str, int]:
    """Own keys come in tiles of 32 (two blocks of 16); edge tiles are few: one stage."""
    return dict(BN=MAP_TILE, OWN=32, STAGES=2, EDGE_STAGES=1, num_warps=4) | tile


def _dq(tma: bool) -> Kernel:
    maps = {f"{x}_map": _key_map(x) if tma else UNUSED for x in ("k_ctx", "v_ctx")}
    return Kernel(
        name=_name("bwd_dq", tma),
        fn=attention_backward.attention_bwd_dq_kernel,
        arguments=_INPUTS
        | maps
        | pointers("out dout", "bf16*")
        | pointers("lse delta", "f32*")
        | pointers("dq", "bf16*")
        | _ORDER
        | _STRIDES
        | _sizes("num_blocks num_kv_heads B G")
        | _OPTIONS
        | {"scale": "f32"},
        grid=_ROW_TILES,
        tile="M",
        extra_host={"num_ctx": "i32"},
        **(
            _where(True, dict.fromkeys((64, 128), _tile(M=64)))
            if tma
            else _where(
                False,
                {
                    64: _tile(M=64),
                    128: _tile(M=64),
                    # More rows spill: Q, dO and the accumulator are 256 columns wide.
                    256: _tile(M=32, BN=32, STAGES=1, num_warps=8),
                },
                small={128: dict(BN=32)},
            )
        ),
    )


def _dkv(tma: bool, own: bool, keep: bool = False) -> Kernel:
    """own: of the blocks' own keys; apart, because each has loops that fill the registers.

    keep: dS as well, so that dQ is one product (hopper_kept.py).
    """
    rows = {"q_map": _row_map("q"), "dout_map": _row_map("dout", contiguous=True)}
    unused = dict.fromkeys(rows, UNUSED)
    return Kernel(
        name=_name(("bwd_own" if own else "bwd_dkv") + ("_keep" if keep else ""), tma),
        fn=attention_backward.attention_bwd_dkv_kernel,
        arguments=_INPUTS
        | (rows if tma else unused)
        | pointers("dout", "bf16*")
        | pointers("delta", "f32*")
        | pointers("dk_ctx dv_ctx dk_blk dv_blk", "bf16*")
        | used_if(keep, pointers("images", "bf16*"))
        | pointers("ctx_start ctx_end ranges", "i32*")
        | used_if(keep, pointers("seen", "i32*"))
        | _STRIDES
        | _sizes("num_blocks num_ctx num_kv_heads")
        | used_if(keep, _sizes("head_images ctx_images"))
        | _sizes("B G")
        | {"heads": Computed(HEAD_GROUP if tma else "1")}
        | _OPTIONS
        | {"scale": "f32"},
        grid=_OWN_TILES if own else _CONTEXT_TILES,
        tile="BN",
        extra_host={"lse_ptr": "f32*"},
        # A number that a loop does not change is read again in each of its turns.
        loop_spills=int(keep and not own),
        **(
            # 64 keys and rows fill the registers: two accumulators, scores and dP make 192.
            _where(True, dict.fromkeys((64, 128), _keys(own, keep, M=MAP_TILE, EDGE_STAGES=2)))
            if tma
            else _where(
                False,
                {
                    64: _keys(own, keep, M=64),
                    128: _keys(own, keep, M=64),
                    256: _keys(own, keep, BN=32, M=32, STAGES=1, num_warps=8),
                },
                small={128: dict(M=32)},
            )
        ),
    )


def _keys(own: bool, keep: bool, **tile: int) -> dict[str, int]:
    """Edge tiles of 32 rows: their mask takes the registers that 64 rows would."""
    shared = dict(BN=KEY_TILE, EDGE=32, STAGES=2, EDGE_STAGES=1, num_warps=4)
    return shared | dict(KEY_TILE=KEY_TILE, OWN=int(own), KEEP=int(keep)) | tile


def _delta(pairs: bool) -> Kernel:
    """Where dS is kept, dK/dV comes first, and what it needs of the forward's output before it."""
    return Kernel(
        name="attention_bwd_delta_pairs" if pairs else "attention_bwd_delta",
        fn=attention_kept.attention_bwd_delta_kernel,
        arguments=pointers("out dout", "bf16*")
        | pointers("lse delta", "f32*")
        | pointers("ranges seen", "i32*")
        | {"num_rows": Computed(f"int32_t({_ROWS} * num_kv_heads * G)")}
        | _sizes("num_ctx num_kv_heads G tiles_seen"),
        grid=f"ceil_div({_ROWS} * num_kv_heads * G, tile)",
        tile="M",
        only_sm=90,
        # 16 KB a tile of each of the two, of which several programs keep enough on their way.
        choices={
            d: dict(M=8192 // d, KEY_TILE=KEY_TILE, PAIRS=int(pairs), num_warps=4)
            for d in (64, 128)
        },
        extra_host=_sizes("num_blocks B"),
    )


ATTENTION_KERNELS = (
    *(
        kernel
        for tma in (False, True)
        for kernel in (_forward(tma), _dq(tma), _dkv(tma, own=False), _dkv(tma, own=True))
    ),
    *(_dkv(True, own, keep=True) for own in (False, True)),
    *(_delta(pairs) for pairs in (False, True)),
)
