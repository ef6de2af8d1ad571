"""The plain Triton attention kernels as variants: what is compiled, and why these tiles.

Each that computes scores is declared twice: for every architecture with pointers, and for sm_90
with tensor maps, which cannot describe an empty tensor. At head_dim 256 these have dK and dV apart,
and the blocks' own keys have few rows and no use for them. Those around kept dS (attention_kept.py)
exist for sm_90 alone.
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


# head_dim -> constants
_Choices = dict[int, dict[str, int]]


def _key_map(name: str, choices: _Choices) -> TensorMap:
    return TensorMap(
        name,
        rows="num_ctx",
        heads="num_kv_heads",
        box_rows=_chosen("BN", choices),
        box_heads="1",
        block=("BN", 1, "D"),
    )


def _row_map(name: str, choices: _Choices, contiguous: bool = False) -> TensorMap:
    return TensorMap(
        name,
        rows=_ROWS,
        heads="num_kv_heads * G",
        box_rows=f"{_chosen('M', choices)} / {HEAD_GROUP}",
        box_heads=HEAD_GROUP,
        block=("M", 1, "D"),
        contiguous=contiguous,
    )


def _chosen(constant: str, choices: _Choices) -> str:
    """C++ for a constant of the image that a launcher starts; where there is none, of the last."""
    values = [str(tile[constant]) for tile in choices.values()]
    tests = [f"head_dim == {d} ? {v} : " for d, v in zip(choices, values, strict=True)]
    return f"({''.join(tests[:-1])}{values[-1]})"


def _name(kernel: str, tma: bool) -> str:
    return f"attention_tma_{kernel}" if tma else f"attention_{kernel}"


def _where(tma: bool, choices: _Choices, small: _Choices) -> dict[str, Any]:
    """The architectures, tiles and constants of a declaration."""
    made = {d: {**tile, "TMA": int(tma)} for d, tile in choices.items()}
    return {"choices": made, "only_sm": 90} if tma else {"choices": made, "small": small}


def _key_maps(tma: bool, choices: _Choices) -> dict[str, Argument]:
    return {f"{x}_map": _key_map(x, choices) if tma else UNUSED for x in ("k_ctx", "v_ctx")}


def _forward(tma: bool) -> Kernel:
    if tma:
        # Two programs a multiprocessor: one's softmax beside the other's products.
        choices = dict.fromkeys((64, 128), _tile(M=128, PAIR=1))
        # Two warpgroups of 64 rows: no registers for a second accumulator of 256 columns.
        choices[256] = _tile(M=128, PAIR=0, num_warps=8)
    else:
        choices = {
            # 128 rows: at 64 the L2 would have to deliver about 8 TB/s (kernel_notes.md).
            64: _tile(M=128, PAIR=0),
            128: _tile(M=128, PAIR=0, STAGES=3, num_warps=8),
            # 256 columns of fp32 accumulator: 64 rows over 8 warps keep it in registers.
            256: _tile(M=64, PAIR=0, num_warps=8),
        }
    return Kernel(
        name=_name("fwd", tma),
        fn=attention_forward.attention_fwd_kernel,
        arguments=_INPUTS
        | _key_maps(tma, choices)
        | pointers("out", "bf16*")
        | pointers("lse", "f32*")
        | _ORDER
        | _STRIDES
        | _sizes("num_blocks num_kv_heads B G")
        | _OPTIONS,
        grid=_ROW_TILES,
        tile="M",
        extra_host={"num_ctx": "i32"},
        **_where(tma, choices, small={128: dict(STAGES=2), 256: dict(BN=32)}),
    )


def _tile(**tile: int) -> dict[str, int]:
    """Own keys come in tiles of 32 (two blocks of 16); edge tiles are few: one stage."""
    return dict(BN=64, OWN=32, STAGES=2, EDGE_STAGES=1, num_warps=4) | tile


def _dq(tma: bool) -> Kernel:
    choices = dict.fromkeys((64, 128), _tile(M=64))
    if tma:
        # 64 rows a warpgroup, as wgmma takes them. Beside Q and dO, shared memory has room for two
        # slots of 32 keys; more own keys spill.
        choices[256] = _tile(M=128, BN=32, OWN=16, num_warps=8)
    else:
        # More rows spill: Q, dO and the accumulator are 256 columns wide.
        choices[256] = _tile(M=32, BN=32, STAGES=1, num_warps=8)
    return Kernel(
        name=_name("bwd_dq", tma),
        fn=attention_backward.attention_bwd_dq_kernel,
        arguments=_INPUTS
        | _key_maps(tma, choices)
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
        **_where(tma, choices, small={128: dict(BN=32)}),
    )


def _dkv(tma: bool, own: bool, keep: bool = False, only: str = "") -> Kernel:
    """own: of the blocks' own keys; apart, because each has loops that fill the registers.

    keep: dS as well, so that dQ is one product (hopper_kept.py). only: "dk" or "dv", for head_dim
    256 on sm_90, where both accumulators of the 64 keys that wgmma takes do not fit the registers.
    """
    choices = _key_tiles(tma, own, keep, only)
    maps = {"q_map": UNUSED, "dout_map": UNUSED}
    if tma:
        maps = {
            "q_map": _row_map("q", choices),
            "dout_map": _row_map("dout", choices, contiguous=True),
        }
    return Kernel(
        name=_name(("bwd_own" if own else f"bwd_{only or 'dkv'}") + ("_keep" if keep else ""), tma),
        fn=attention_backward.attention_bwd_dkv_kernel,
        arguments=_INPUTS
        | maps
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
        # Numbers that a loop does not change are read again in each of its turns.
        loop_spills=11 if only == "dk" else int(keep and not own),
        **_where(tma, choices, small={128: dict(M=32)}),
    )


def _key_tiles(tma: bool, own: bool, keep: bool, only: str) -> _Choices:
    """Edge tiles of 32 rows: their mask takes the registers that 64 rows would."""
    tile = dict(BN=KEY_TILE, M=64, EDGE=32, STAGES=2, EDGE_STAGES=2 if tma else 1, num_warps=4)
    tile |= dict(KEY_TILE=KEY_TILE, OWN=int(own), KEEP=int(keep))
    tile |= dict(DK=int(only != "dv"), DV=int(only != "dk"))
    if only == "dk":  # 32 rows spill nothing and take 1.45 times as long: wgmma reads K, V for each
        return {256: tile}
    if only == "dv":  # it needs no V: with 32 rows, two programs a multiprocessor
        return {256: tile | dict(M=32)}
    # 64 keys and rows fill the registers: two accumulators, scores and dP make 192.
    choices = dict.fromkeys((64, 128), tile)
    if not tma:
        choices[256] = tile | dict(BN=32, M=32, STAGES=1, num_warps=8)
    return choices


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
    *(_dkv(True, own=False, only=gradient) for gradient in ("dk", "dv")),
    *(_delta(pairs) for pairs in (False, True)),
)
