"""The Hopper (sm_90) kernels as variants: what is compiled, and why these tiles."""

from __future__ import annotations

from typing import Any

from dflash_kernels import hopper_dkv, hopper_dq, hopper_forward, hopper_kept
from dflash_kernels.spec import (
    HEAD_GROUP,
    Argument,
    Computed,
    Kernel,
    TensorMap,
    VectorMap,
    pointers,
    used_if,
)

HEAD_DIMS = (64, 128)
# Own keys that a consumer's 64 rows attend to, rounded up to a product's worth: 64 / G tokens, or
# all of a block that is split over both consumers (`hopper_own_tile` in
# dflash_ext/ops/attention_call.py).
OWN_TILES = (16, 32, 64)
# 240 + 240 + 24 registers a thread are what three warpgroups share; with 232 instead of 240 ptxas
# serialises the products of dK/dV (its message C7512).
_WARPS = dict(CONSUMER_REGISTERS=240, PRODUCER_REGISTERS=24, num_warps=4)

_ROWS = "int64_t(num_blocks) * B"
_SIZES: dict[str, Argument] = {
    "num_blocks": "i32",
    "num_kv_heads": "i32",
    "window": "i32",
    "causal": "i32",
    "log_b": Computed("log2_of(B)"),
    "log_g": Computed("log2_of(G)"),
}
_BLOCK_AND_RATIO = {"B": "i32", "G": "i32"}
_ROW_TILES = "ceil_div(int64_t(num_blocks) * B * G, 128) * num_kv_heads"
_KEY_TILES = f"(ceil_div(num_ctx, 128) + ceil_div({_ROWS}, 128)) * num_kv_heads"


def _row_maps(names: str, contiguous: bool = False, heads: str = "G") -> dict[str, Argument]:
    """Tiles of 64 query rows: 64 / G tokens of the G heads of a group, or of as many as `heads`."""
    return {
        f"{name}_map": TensorMap(
            name,
            rows=_ROWS,
            heads="num_kv_heads * G",
            box_rows=f"64 / {heads}",
            box_heads=heads,
            block=(16, 4, "D"),
            contiguous=contiguous,
        )
        for name in names.split()
    }


def _key_maps(names: str, box: int, contiguous: bool = False) -> dict[str, Argument]:
    """Tiles of `box` keys of one head; `own` keys are the tensors called `blk` outside."""
    return {
        f"{name}_map": TensorMap(
            name.replace("own", "blk"),
            rows="num_ctx" if name.endswith("ctx") else _ROWS,
            heads="num_kv_heads",
            box_rows=str(box),
            box_heads="1",
            block=(box, 1, "D"),
            contiguous=contiguous,
        )
        for name in names.split()
    }


def _persistent(items: str) -> dict[str, Any]:
    """One program per multiprocessor; each draws items until there are none."""
    return {
        "grid": f"std::min<int64_t>({items}, multiprocessors)",
        "tile": "D",
        "only_sm": 90,
    }


def _forward(own: int, keys: int = 128) -> Kernel:
    return Kernel(
        name=f"hopper_fwd_own{own}",
        fn=hopper_forward.hopper_fwd_kernel,
        arguments=_row_maps("q")
        | _key_maps("k_own v_own", own)
        | _key_maps("k_ctx v_ctx", keys)
        | _row_maps("out", contiguous=True)
        | pointers("lse", "f32*")
        | pointers("counter", "counter*")
        | pointers("ctx_start ctx_end doc_first doc_last", "i32*")
        | {"num_items": Computed(f"int32_t({_ROW_TILES})")}
        | _SIZES
        | {"scale_log2": "f32"},
        **_persistent(_ROW_TILES),
        choices={
            # The third K stage pays for the slot that an item's own keys take in the ring.
            d: dict(BN=keys, OWN=own, K_STAGES=2, V_STAGES=3, **_WARPS)
            for d in HEAD_DIMS
        },
        extra_host=_BLOCK_AND_RATIO | {"num_ctx": "i32"},
    )


def _dq(own: int, keys: int = 128) -> Kernel:
    return Kernel(
        name=f"hopper_bwd_dq_own{own}",
        fn=hopper_dq.hopper_bwd_dq_kernel,
        arguments=_row_maps("q")
        | _row_maps("dout out", contiguous=True)
        | _key_maps("k_own v_own", own)
        | _key_maps("k_ctx v_ctx", keys)
        | _row_maps("dq", contiguous=True)
        | pointers("lse delta", "f32*")
        | pointers("counter", "counter*")
        | pointers("ctx_start ctx_end doc_first doc_last", "i32*")
        | {"num_items": Computed(f"int32_t({_ROW_TILES})")}
        | _SIZES
        | {"scale_log2": "f32", "scale": "f32"},
        **_persistent(_ROW_TILES),
        # 64 keys a tile would leave room for the next item's Q and dO beside this one's, but the
        # products from shared memory then wait for it: D 581 instead of 690 TFLOP/s.
        choices={d: dict(BN=keys, OWN=own, STAGES=2, **_WARPS) for d in HEAD_DIMS},
        # In the loop over edge tiles (one or two an item, between 24 products each) the rarer own
        # tiles leave up to three registers too few.
        loop_spills=0 if own == 16 else 6,
        extra_host=_BLOCK_AND_RATIO | {"num_ctx": "i32"},
    )


_IMAGES = pointers("images", "bf16*")
_SEEN = pointers("seen", "i32*")
_IMAGE_COUNTS: dict[str, Argument] = {"head_images": "i32", "ctx_images": "i32"}


def _dkv(keep: bool) -> Kernel:
    """keep: dS as well, so that dQ is one product (hopper_kept.py)."""
    sizes = dict(_SIZES)
    return Kernel(
        name="hopper_bwd_dkv_keep" if keep else "hopper_bwd_dkv",
        fn=hopper_dkv.hopper_bwd_dkv_kernel,
        arguments=_row_maps("q")
        | _row_maps("dout", contiguous=True)
        | {
            f"{name}_map": VectorMap(name, f"{_ROWS} * num_kv_heads * G", 64)
            for name in ("lse", "delta")
        }
        | _key_maps("k_own v_own k_ctx v_ctx", 64)
        | _key_maps("dk_own dv_own dk_ctx dv_ctx", 64, contiguous=True)
        | used_if(keep, _IMAGES)
        | pointers("counter", "counter*")
        | pointers("ctx_start ctx_end ranges", "i32*")
        | used_if(keep, _SEEN)
        | {"num_items": Computed(f"int32_t({_KEY_TILES})"), "num_blocks": sizes.pop("num_blocks")}
        | {"num_ctx": "i32"}
        | used_if(keep, _IMAGE_COUNTS)
        | sizes
        | {"scale_log2": "f32", "scale": "f32"},
        **_persistent(_KEY_TILES),
        choices={d: dict(STAGES=3, KEEP=int(keep), **_WARPS) for d in HEAD_DIMS},
        # Numbers that the loop does not change, read again in each turn.
        loop_spills=3 * keep,
        extra_host=_BLOCK_AND_RATIO,
    )


def _dq_kept() -> Kernel:
    """For any G: its head groups are the largest power of two of heads that divides G."""
    groups = f"G / {HEAD_GROUP}"
    row_tiles = f"ceil_div({_ROWS} * {HEAD_GROUP}, 128) * num_kv_heads * ({groups})"
    return Kernel(
        name="attention_bwd_dq_kept",
        fn=hopper_kept.attention_bwd_dq_kept_kernel,
        arguments=_key_maps("k_own k_ctx", 64)
        | {
            "images_map": TensorMap(
                "images",
                rows=f"int64_t(head_images) * num_kv_heads * ({groups}) * 64",
                heads="1",
                box_rows="64",
                box_heads="1",
                block=(64, 1, 64),
                contiguous=True,
                columns="64",
            ),
        }
        | _row_maps("dq", contiguous=True, heads=HEAD_GROUP)
        | pointers("counter", "counter*")
        | pointers("ctx_start ctx_end doc_first doc_last ranges seen", "i32*")
        | {
            "num_items": Computed(f"int32_t({row_tiles})"),
            "num_blocks": "i32",
            "num_ctx": "i32",
            "num_head_groups": Computed(f"num_kv_heads * ({groups})"),
            "groups_per_kv_head": Computed(groups),
        }
        | _IMAGE_COUNTS
        | {
            "window": "i32",
            "causal": "i32",
            "log_b": Computed("log2_of(B)"),
            "log_h": Computed(f"log2_of{HEAD_GROUP}"),
        }
        | {"scale": "f32"},
        **_persistent(row_tiles),
        # 32 or 24 KB a stage: several trips to DRAM (26 KB each) are on their way.
        choices={d: dict(STAGES=6 if d == 128 else 8, **_WARPS) for d in HEAD_DIMS},
        extra_host=_BLOCK_AND_RATIO | {"num_kv_heads": "i32"},
    )


HOPPER_KERNELS = (
    *(_forward(own) for own in OWN_TILES),
    *(_dq(own) for own in OWN_TILES),
    _dkv(keep=False),
    _dkv(keep=True),
    _dq_kept(),
)
