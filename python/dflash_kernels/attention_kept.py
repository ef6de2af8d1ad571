"""Plain Triton around kept dS: see hopper_kept.py for what an image is and where it lies."""

import triton
import triton.language as tl

IMAGE = tl.constexpr(64 * 64)


@triton.jit
def first_image(t, seen, see_lo, log_rows):
    """Image of row group 0 of context tile t, were there one: add the group.

    seen, see_lo: of the tile; 2**log_rows: rows that a block has in a head group.
    """
    return ((seen << log_rows) >> 6) + 2 * t - ((see_lo << log_rows) >> 6)


@triton.jit
def keep(ds, images_ptr, image, half, kept, ROWS: tl.constexpr):
    """Store dS^T [64 keys, ROWS] as an image, or as one half of it (ROWS 32): hopper_kept.py."""
    tl.static_assert(ROWS == 32 or ROWS == 64)
    V: tl.constexpr = ROWS // 16
    x = ds.reshape([4, 2, 8, V, 2, 4, 2]).permute((0, 3, 2, 5, 4, 1, 6)).reshape([4, V * 256])
    at = tl.arange(0, 4)[:, None] * 1024 + half * 512 + tl.arange(0, V * 256)[None, :]
    tl.store(images_ptr + image.to(tl.int64) * IMAGE + at, x, mask=kept)


@triton.jit
def attention_bwd_delta_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    ranges_ptr,
    seen_ptr,
    num_rows,
    num_ctx,
    num_kv_heads,
    G,
    tiles_seen,
    D: tl.constexpr,
    M: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """delta = rowsum(out * dout) of each row, fp32 [Hkv, tokens, G]; with PAIRS (lse, delta).

    NaN, and with it dQ and dK, if the blocks see more than the `tiles_seen` context tiles that the
    host counted with: dK/dV then keeps nothing of tiles whose images have no room.
    """
    row = tl.program_id(0) * M + tl.arange(0, M)  # token, head: as rows lie in `out`
    inside = row < num_rows
    at = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    out = tl.load(out_ptr + at, mask=inside[:, None], other=0.0)
    dout = tl.load(dout_ptr + at, mask=inside[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    last = tl.cdiv(num_ctx, KEY_TILE) - 1
    seen = tl.load(seen_ptr + last) + tl.load(ranges_ptr + last * 4 + 3)
    seen -= tl.load(ranges_ptr + last * 4)
    delta = tl.where(seen <= tiles_seen, delta, float("nan"))
    heads = num_kv_heads * G
    token = row // heads
    head = row - token * heads
    kv_head = head // G
    at = (kv_head * (num_rows // heads) + token) * G + head - kv_head * G
    if PAIRS:
        lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
        tl.store(delta_ptr + 2 * at.to(tl.int64), lse, mask=inside)
        tl.store(delta_ptr + 2 * at.to(tl.int64) + 1, delta, mask=inside)
    else:
        tl.store(delta_ptr + at, delta, mask=inside)
