"""dK and dV of DFlash attention on Hopper; see hopper.py for the structure.

Like dQ (hopper_dq.py) it recomputes P from the forward's lse, so that nothing is accumulated across
programs and every result is reproducible to the bit. With KEEP it stores dS as well, and dQ is one
product (hopper_kept.py); without, seven products are executed for the five that count.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dflash_kernels.attention_kept import first_image
from dflash_kernels.hopper import (
    CONSUMERS,
    HALF,
    TILE,
    Blocks,
    draw_item,
    half_of_slot,
    new_items,
    new_ring,
    scores,
    store_half,
)
from dflash_kernels.hopper_kept import keep


@gluon.jit
def _context_half(t, WG: gl.constexpr, num_ctx):
    """Which 64 context rows are a consumer's of tile t; the last ones if there are none left."""
    return gl.minimum(2 * t + WG, (num_ctx + HALF - 1) // HALF - 1)


@gluon.jit
def _row_groups(blocks, t, WG: gl.constexpr, ctx_tiles, num_ctx, ranges_ptr):
    """Groups of 64 rows that see any of a consumer's 64 keys of tile t, [lo, hi), or all of them.

    Tiles are context tiles first, then tiles of the blocks' own keys. Never empty, like a tile's
    interval: a group that sees nothing is walked instead.
    """
    log_rows = blocks.log_b + blocks.log_g
    if t < ctx_tiles:
        half = _context_half(t, WG, num_ctx)
        lo = (gl.load(ranges_ptr + half * 4) << log_rows) // HALF
        hi = ((gl.load(ranges_ptr + half * 4 + 3) << log_rows) + HALF - 1) // HALF
        full_lo = ((gl.load(ranges_ptr + half * 4 + 1) << log_rows) + HALF - 1) // HALF
        full_hi = (gl.load(ranges_ptr + half * 4 + 2) << log_rows) // HALF
    else:
        groups = (blocks.num_rows() + HALF - 1) // HALF
        lo = gl.minimum((2 * (t - ctx_tiles) + WG) << blocks.log_g, groups - 1)
        hi = gl.minimum(lo + (1 << blocks.log_g), groups)
        full_lo = hi
        full_hi = hi
    return lo, gl.maximum(hi, lo + 1), full_lo, full_hi


@gluon.jit
def _images(
    blocks, t, WG: gl.constexpr, lo, hi, ctx_tiles, num_ctx, ranges_ptr, seen_ptr, ctx_images
):
    """Image of row group 0 of a consumer's 64 keys in its head, and whether they keep any.

    Keys beyond the last have none, nor have those of a layout that sees more than was promised: the
    kernel that made delta has then turned dQ and dK into NaN.
    """
    log_rows = blocks.log_b + blocks.log_g
    half = 2 * t + WG
    if t < ctx_tiles:
        kept = half * HALF < num_ctx
        half = _context_half(t, WG, num_ctx)
        seen = gl.load(seen_ptr + half)
        image = first_image(half, seen, gl.load(ranges_ptr + half * 4), log_rows)
        kept = kept & (image + hi <= ctx_images)
    else:
        kept = (half - 2 * ctx_tiles) * HALF < (blocks.num_blocks << blocks.log_b)
        image = ctx_images
    return image, kept


@gluon.jit
def _schedule_key_tiles(
    items,
    blocks,
    counter_ptr,
    ranges_ptr,
    num_items,
    num_ctx,
    num_kv_heads,
):
    ctx_tiles = (num_ctx + TILE - 1) // TILE
    r = 0
    item = gl.program_id(0)
    while item < num_items:
        t = item // num_kv_heads
        lo, hi, _, _ = _row_groups(blocks, t, 0, ctx_tiles, num_ctx, ranges_ptr)
        lo_1, hi_1, _, _ = _row_groups(blocks, t, 1, ctx_tiles, num_ctx, ranges_ptr)
        items.wait_empty(r)
        items.write(r, 0, item)
        items.write(r, 1, t)
        items.write(r, 2, gl.minimum(lo, lo_1))
        items.write(r, 3, gl.maximum(hi, hi_1))
        items.send(r)
        # Key tiles are few and long, hence drawn late: a program that sits on one keeps it from
        # those that would be free for it sooner.
        items.wait_wanted(r)
        item = draw_item(counter_ptr)
        r += 1
    items.end(r)


@gluon.jit
def _load_both_halves(keys_map, ring, r, first, kv_head, D: gl.constexpr):
    """128 keys (or values) from `first` on into slot r, one consumer's 64 after the other's."""
    ring.wait_empty(r)
    full = ring.full_barrier(r)
    mbarrier.expect(full, TILE * D * 2)
    slot = ring.slot(r)._reinterpret(gl.bfloat16, [CONSUMERS, HALF, 1, D], keys_map.layout)
    for g in gl.static_range(CONSUMERS):
        at = [first + g * HALF, kv_head, 0]
        tma.async_copy_global_to_shared(keys_map, at, full, slot.index(g))


@gluon.jit
def _load_for_dkv(
    q_map,
    dout_map,
    lse_map,
    delta_map,
    k_own_map,
    v_own_map,
    k_ctx_map,
    v_ctx_map,
    items,
    k_ring,
    v_ring,
    q_ring,
    do_sm,
    lse_sm,
    delta_sm,
    blocks,
    num_ctx,
    num_kv_heads,
    D: gl.constexpr,
):
    ctx_tiles = (num_ctx + TILE - 1) // TILE
    num_rows = blocks.num_rows()
    position = 0
    r = 0
    item = items.take(0)
    while item >= 0:
        t = items.read(r, 1)
        lo = items.read(r, 2)
        hi = items.read(r, 3)
        items.release(r)
        kv_head = item % num_kv_heads
        if t < ctx_tiles:
            _load_both_halves(k_ctx_map, k_ring, r, t * TILE, kv_head, D)
            _load_both_halves(v_ctx_map, v_ring, r, t * TILE, kv_head, D)
        else:
            _load_both_halves(k_own_map, k_ring, r, (t - ctx_tiles) * TILE, kv_head, D)
            _load_both_halves(v_own_map, v_ring, r, (t - ctx_tiles) * TILE, kv_head, D)
        for i in range(hi - lo):
            group = hi - 1 - i
            if group == gl.minimum(lo + 2, hi - 1):
                items.want_next()
            q_ring.wait_empty(position)
            s = position % q_ring.stages
            full = q_ring.full_barrier(position)
            mbarrier.expect(full, 2 * HALF * D * 2 + 2 * HALF * 4)
            rows_from = [(group * HALF) >> blocks.log_g, kv_head << blocks.log_g, 0]
            row_from = [kv_head * num_rows + group * HALF]
            tma.async_copy_global_to_shared(q_map, rows_from, full, q_ring.slot(position))
            tma.async_copy_global_to_shared(lse_map, row_from, full, lse_sm.index(s))
            tma.async_copy_global_to_shared(dout_map, rows_from, full, do_sm.index(s))
            tma.async_copy_global_to_shared(delta_map, row_from, full, delta_sm.index(s))
            position += 1
        r += 1
        item = items.take(r)


@gluon.jit
def _probability_t(
    s, group, lse, key_from, own_tile, full_lo, full_hi, blocks, scale_log2, S: gl.constexpr
):
    """P^T [keys, rows] of one group of rows, exactly 0 where a row does not see the key."""
    p = gl.exp2(s * scale_log2 - lse[None, :])
    if (group < full_lo) | (group >= full_hi):
        # One row a thread, and the interval of its keys in 16 bits: the accumulators leave no room
        # for the four numbers of each of the sixteen rows that a thread's part of P^T has.
        THREAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        row = group * HALF + gl.arange(0, HALF, layout=THREAD)
        token, block, lower, end = blocks.rows(row)
        if own_tile:
            lower = block << blocks.log_b
            end = gl.where(blocks.causal == 0, lower + (1 << blocks.log_b), token + 1)
            end = gl.where(row < blocks.num_rows(), end, lower)
        lower = gl.minimum(gl.maximum(lower - key_from, 0), HALF)
        end = gl.minimum(gl.maximum(end - key_from, 0), HALF)
        packed = gl.convert_layout(lower | (end << 8), gl.SliceLayout(0, S))
        key = gl.arange(0, HALF, layout=gl.SliceLayout(1, S))
        visible = key[:, None] >= (packed & 255)[None, :]
        p = gl.where(visible & (key[:, None] < (packed >> 8)[None, :]), p, 0.0)
    return p


@gluon.jit
def _recomputed(x):
    """x, but opaque: what follows from it is computed anew in a loop instead of kept, and spilled.

    The wgmma descriptors of the keys do not change in the loop over rows; sixteen registers for
    them are more than the accumulators leave.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _differentiate_kv(shared, WG: gl.constexpr, D: gl.constexpr, KEEP: gl.constexpr):
    (
        dk_own_map,
        dv_own_map,
        dk_ctx_map,
        dv_ctx_map,
        items,
        k_ring,
        v_ring,
        q_ring,
        do_sm,
        lse_sm,
        delta_sm,
        blocks,
        ranges_ptr,
        seen_ptr,
        images_ptr,
        head_images,
        ctx_images,
        num_ctx,
        num_kv_heads,
        scale_log2,
        scale,
    ) = shared
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ctx_tiles = (num_ctx + TILE - 1) // TILE
    base = 0  # ring position of the item's first group
    r = 0
    item = items.take(0)
    while item >= 0:
        t = items.read(r, 1)
        first = items.read(r, 2)
        stop = items.read(r, 3)
        items.release(r)
        kv_head = item % num_kv_heads
        own_tile = t >= ctx_tiles
        lo, hi, full_lo, full_hi = _row_groups(blocks, t, WG, ctx_tiles, num_ctx, ranges_ptr)
        k_ring.wait_full(r)
        v_ring.wait_full(r)
        k = half_of_slot(k_ring.slot(r), WG, D)
        v = half_of_slot(v_ring.slot(r), WG, D)
        key_from = t * TILE + WG * HALF
        if own_tile:
            key_from = key_from - ctx_tiles * TILE
        # From the last group down: the tiles of a document end with the same blocks, so programs
        # that run together read the same rows at the same time.
        for i in range(stop - hi):  # only the other consumer's keys are seen there
            q_ring.skip(base + i)
        position = base + stop - hi
        if KEEP:
            image, kept = _images(
                blocks, t, WG, lo, hi, ctx_tiles, num_ctx, ranges_ptr, seen_ptr, ctx_images
            )
            image += kv_head * head_images
        dk = gl.zeros([HALF, D], gl.float32, OUT)
        dv = gl.zeros([HALF, D], gl.float32, OUT)
        q_ring.wait_full(position)
        s_token = scores(k, q_ring.slot(position).reshape([HALF, D]), HALF, HALF, S)
        s = warpgroup_mma_wait(0, deps=(s_token,))
        if r > 0:  # the previous item's dK and dV have been read out of its slots by now
            tma.store_wait(0)
            k_ring.release(r - 1)
            v_ring.release(r - 1)
        for i in range(hi - 1 - lo):
            group = hi - 1 - i
            slot = position % q_ring.stages
            do = do_sm.index(slot).reshape([HALF, D])
            here = _recomputed(r)
            k_here = half_of_slot(k_ring.slot(here), WG, D)
            v_here = half_of_slot(v_ring.slot(here), WG, D)
            dp_token = scores(v_here, do, HALF, HALF, S)
            lse = lse_sm.index(slot).load(COLUMN)
            p = _probability_t(
                s, group, lse, key_from, own_tile, full_lo, full_hi, blocks, scale_log2, S
            )
            dv_token = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), P), do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp_token,))
            delta = delta_sm.index(slot).load(COLUMN)
            ds_t = (p * (dp - delta[None, :])).to(gl.bfloat16)
            ds = gl.convert_layout(ds_t, P)
            q_ring.wait_full(position + 1)
            s_token = scores(k_here, q_ring.slot(position + 1).reshape([HALF, D]), HALF, HALF, S)
            dk_token = warpgroup_mma(
                ds, q_ring.slot(position).reshape([HALF, D]), dk, is_async=True
            )
            if KEEP:
                keep(ds_t, images_ptr, image + group, kept)
            s, dk, dv = warpgroup_mma_wait(0, deps=(s_token, dk_token, dv_token))
            q_ring.release(position)
            position += 1
        slot = position % q_ring.stages
        do = do_sm.index(slot).reshape([HALF, D])
        dp_token = scores(v, do, HALF, HALF, S)
        lse = lse_sm.index(slot).load(COLUMN)
        delta = delta_sm.index(slot).load(COLUMN)
        p = _probability_t(s, lo, lse, key_from, own_tile, full_lo, full_hi, blocks, scale_log2, S)
        dp = warpgroup_mma_wait(0, deps=(dp_token,))
        dv_token = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), P), do, dv, is_async=True)
        ds = (p * (dp - delta[None, :])).to(gl.bfloat16)
        if KEEP:
            keep(ds, images_ptr, image + lo, kept)
        ds = gl.convert_layout(ds, P)
        dk_token = warpgroup_mma(ds, q_ring.slot(position).reshape([HALF, D]), dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, deps=(dk_token, dv_token))
        q_ring.release(position)
        for i in range(stop - lo, stop - first):
            q_ring.skip(base + i)
        base += stop - first

        k.store((dk * scale).to(gl.bfloat16))
        v.store(dv.to(gl.bfloat16))
        at = [key_from, kv_head, 0]
        if own_tile:
            store_half(dk_own_map, k_ring.slot(r), WG, at, D)
            store_half(dv_own_map, v_ring.slot(r), WG, at, D)
        else:
            store_half(dk_ctx_map, k_ring.slot(r), WG, at, D)
            store_half(dv_ctx_map, v_ring.slot(r), WG, at, D)
        r += 1
        item = items.take(r)
    tma.store_wait(0)


@gluon.jit
def hopper_bwd_dkv_kernel(
    q_map,
    dout_map,
    lse_map,
    delta_map,
    k_own_map,
    v_own_map,
    k_ctx_map,
    v_ctx_map,
    dk_own_map,
    dv_own_map,
    dk_ctx_map,
    dv_ctx_map,
    images_ptr,
    counter_ptr,
    ctx_start_ptr,
    ctx_end_ptr,
    ranges_ptr,
    seen_ptr,
    num_items,
    num_blocks,
    num_ctx,
    head_images,
    ctx_images,
    num_kv_heads,
    window,
    causal,
    log_b,
    log_g,
    scale_log2,
    scale,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    KEEP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    k_sm = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, 1, D], k_ctx_map.layout)
    v_sm = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, 1, D], v_ctx_map.layout)
    q_sm = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 16, 4, D], q_map.layout)
    do_sm = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 16, 4, D], dout_map.layout)
    lse_sm = gl.allocate_shared_memory(gl.float32, [STAGES, HALF], lse_map.layout)
    delta_sm = gl.allocate_shared_memory(gl.float32, [STAGES, HALF], delta_map.layout)
    items = new_items(True)
    k_ring = new_ring(k_sm, 2)
    v_ring = new_ring(v_sm, 2)
    q_ring = new_ring(q_sm, STAGES)  # dO, lse and delta of a group share its barriers
    blocks = Blocks(ctx_start_ptr, ctx_end_ptr, num_blocks, window, causal, log_b, log_g)
    shared = (
        dk_own_map,
        dv_own_map,
        dk_ctx_map,
        dv_ctx_map,
        items,
        k_ring,
        v_ring,
        q_ring,
        do_sm,
        lse_sm,
        delta_sm,
        blocks,
        ranges_ptr,
        seen_ptr,
        images_ptr,
        head_images,
        ctx_images,
        num_ctx,
        num_kv_heads,
        scale_log2,
        scale,
    )
    gl.warp_specialize(
        [
            (_differentiate_kv, (shared, 0, D, KEEP)),
            (_differentiate_kv, (shared, 1, D, KEEP)),
            (
                _load_for_dkv,
                (
                    q_map,
                    dout_map,
                    lse_map,
                    delta_map,
                    k_own_map,
                    v_own_map,
                    k_ctx_map,
                    v_ctx_map,
                    items,
                    k_ring,
                    v_ring,
                    q_ring,
                    do_sm,
                    lse_sm,
                    delta_sm,
                    blocks,
                    num_ctx,
                    num_kv_heads,
                    D,
                ),
            ),
            (
                _schedule_key_tiles,
                (
                    items,
                    blocks,
                    counter_ptr,
                    ranges_ptr,
                    num_items,
                    num_ctx,
                    num_kv_heads,
                ),
            ),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
