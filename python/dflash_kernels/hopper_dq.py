"""dQ of DFlash attention on Hopper; see hopper.py for the structure.

Recomputes P from the forward's lse, and writes delta = rowsum(out * dout), which dK/dV
(hopper_dkv.py) reads on the same stream.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dflash_kernels.hopper import (
    HALF,
    TILE,
    Blocks,
    half_of_slot,
    load_keys,
    load_own,
    load_rows,
    new_items,
    new_ring,
    own_rows,
    own_slots,
    schedule_row_tiles,
    scores,
    store_half,
)


@gluon.jit
def _tile_in_order(i, tiles, before, full):
    """Index of the i-th tile that dQ walks: first those that some row does not see, then the rest.

    The loop over the others then has no branch: 4 % on long contexts.
    """
    edges = tiles - full
    return gl.where(i < before, i, gl.where(i < edges, i + full, i - edges + before))


@gluon.jit
def _load_for_dq(
    q_map,
    dout_map,
    out_map,
    k_own_map,
    v_own_map,
    k_ctx_map,
    v_ctx_map,
    items,
    q_ring,
    do_ring,
    k_ring,
    v_ring,
    blocks,
    num_kv_heads,
    D: gl.constexpr,
    BN: gl.constexpr,
    OWN: gl.constexpr,
):
    OWN_SLOTS: gl.constexpr = own_slots(OWN, BN)
    k_position = 0
    v_position = 0
    r = 0
    item = items.take(0)
    while item >= 0:
        t = items.read(r, 1)
        lo = items.read(r, 2)
        tiles = items.read(r, 3)
        before = items.read(r, 4)
        full = items.read(r, 5)
        items.release(r)
        kv_head = item % num_kv_heads
        # In the order in which the previous item sets the buffers free. `out` passes through a slot
        # of the K ring, only to give delta.
        load_rows(q_map, q_ring, r, blocks, t, kv_head, D)
        load_rows(out_map, k_ring, k_position, blocks, t, kv_head, D)
        load_own(k_own_map, v_own_map, v_ring, v_position, blocks, t, kv_head, OWN, BN, D)
        load_rows(dout_map, do_ring, r, blocks, t, kv_head, D)
        k_position += 1
        v_position += OWN_SLOTS
        for i in range(tiles):
            n = lo + _tile_in_order(i, tiles, before, full) * BN
            load_keys(k_ctx_map, k_ring, k_position, n, kv_head, BN, D)
            load_keys(v_ctx_map, v_ring, v_position, n, kv_head, BN, D)
            k_position += 1
            v_position += 1
        r += 1
        item = items.take(r)


@gluon.jit
def _delta(out, dout, D: gl.constexpr):
    """fp32 [64]: rowsum(out * dout) of two tiles in shared memory, in the layout of wide loads."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [128 // D * 2, D // 8], [4, 1], [1, 0])
    return gl.sum(out.load(WIDE).to(gl.float32) * dout.load(WIDE).to(gl.float32), 1)


@gluon.jit
def _cut(p, blocks, t, WG: gl.constexpr, n, BN: gl.constexpr, S: gl.constexpr):
    """P of the context rows from n on, exactly 0 where a row does not see the key.

    The rows' intervals are loaded again for each such tile: the loops need every register.
    """
    row = t * TILE + WG * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, S))
    _, _, lower, end = blocks.rows(row)
    key = n + gl.arange(0, BN, layout=gl.SliceLayout(0, S))
    return gl.where((key[None, :] >= lower[:, None]) & (key[None, :] < end[:, None]), p, 0.0)


@gluon.jit
def _differentiate_q(
    shared, WG: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, OWN: gl.constexpr
):
    (
        dq_map,
        lse_ptr,
        delta_ptr,
        items,
        q_ring,
        do_ring,
        dq_slot,
        k_ring,
        v_ring,
        blocks,
        num_kv_heads,
        scale_log2,
        scale,
    ) = shared
    OWN_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    OWN_ROW: gl.constexpr = gl.SliceLayout(1, OWN_S)
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OWN_SLOTS: gl.constexpr = own_slots(OWN, BN)
    num_rows = blocks.num_rows()
    k_base = 0  # ring positions of the item's first entries
    v_base = 0
    r = 0
    item = items.take(0)
    while item >= 0:
        t = items.read(r, 1)
        lo = items.read(r, 2)
        tiles = items.read(r, 3)
        before = items.read(r, 4)
        full = items.read(r, 5)
        kv_head = item % num_kv_heads
        k_first = k_base + 1  # of the first context tile
        v_first = v_base + OWN_SLOTS
        row = t * TILE + WG * HALF + gl.arange(0, HALF, layout=ROW)
        row_at = kv_head.to(gl.int64) * num_rows + row
        lse = gl.load(lse_ptr + row_at, mask=row < num_rows, other=float("inf"))
        token, block, _, _ = blocks.rows(row)

        q = half_of_slot(q_ring.slot(r), WG, D)
        do = half_of_slot(do_ring.slot(r), WG, D)
        do_ring.wait_full(r)
        k_ring.wait_full(k_base)
        delta = _delta(half_of_slot(k_ring.slot(k_base), WG, D), do, D)
        delta = gl.convert_layout(delta, ROW)
        k_ring.release(k_base)
        gl.store(delta_ptr + row_at, delta, mask=row < num_rows)

        q_ring.wait_full(r)
        v_ring.wait_full(v_base)
        if OWN_SLOTS == 2:
            v_ring.wait_full(v_base + 1)
        own_k = own_rows(v_ring, v_base, 0, WG, OWN, BN, D).reshape([OWN, D])
        own_v = own_rows(v_ring, v_base, 1, WG, OWN, BN, D).reshape([OWN, D])
        own_s_token = scores(q, own_k, HALF, OWN, OWN_S)
        own_dp_token = scores(do, own_v, HALF, OWN, OWN_S)
        own_key = blocks.first_own_key(t, WG) + gl.arange(0, OWN, layout=gl.SliceLayout(0, OWN_S))
        visible = blocks.own_visible(
            own_key, gl.convert_layout(token, OWN_ROW), gl.convert_layout(block, OWN_ROW)
        )
        own_s, own_dp = warpgroup_mma_wait(0, deps=(own_s_token, own_dp_token))
        if OWN_SLOTS == 2:
            v_ring.release(v_base + 1)
        own_p = gl.exp2(own_s * scale_log2 - gl.convert_layout(lse, OWN_ROW)[:, None])
        own_p = gl.where(visible, own_p, 0.0)
        own_ds = own_p * (own_dp - gl.convert_layout(delta, OWN_ROW)[:, None])
        acc_token = warpgroup_mma(
            gl.convert_layout(own_ds.to(gl.bfloat16), P),
            own_k,
            gl.zeros([HALF, D], gl.float32, OUT),
            use_acc=False,
            is_async=True,
        )
        k_ring.wait_full(k_first)
        s_token = scores(q, k_ring.slot(k_first).reshape([BN, D]), HALF, BN, S)
        s, acc = warpgroup_mma_wait(0, deps=(s_token, acc_token))
        v_ring.release(v_base)

        edges = gl.minimum(tiles - full, tiles - 1)
        for j in range(edges):
            v_ring.wait_full(v_first + j)
            dp_token = scores(do, v_ring.slot(v_first + j).reshape([BN, D]), HALF, BN, S)
            n = lo + gl.where(j < before, j, j + full) * BN
            p = _cut(gl.exp2(s * scale_log2 - lse[:, None]), blocks, t, WG, n, BN, S)
            dp = warpgroup_mma_wait(0, deps=(dp_token,))
            v_ring.release(v_first + j)
            ds = gl.convert_layout((p * (dp - delta[:, None])).to(gl.bfloat16), P)
            k_ring.wait_full(k_first + j + 1)
            s_token = scores(q, k_ring.slot(k_first + j + 1).reshape([BN, D]), HALF, BN, S)
            k_tile = k_ring.slot(k_first + j).reshape([BN, D])
            acc_token = warpgroup_mma(ds, k_tile, acc, is_async=True)
            s, acc = warpgroup_mma_wait(0, deps=(s_token, acc_token))
            k_ring.release(k_first + j)
        for j in range(edges, tiles - 1):
            v_ring.wait_full(v_first + j)
            dp_token = scores(do, v_ring.slot(v_first + j).reshape([BN, D]), HALF, BN, S)
            p = gl.exp2(s * scale_log2 - lse[:, None])
            dp = warpgroup_mma_wait(0, deps=(dp_token,))
            v_ring.release(v_first + j)
            ds = gl.convert_layout((p * (dp - delta[:, None])).to(gl.bfloat16), P)
            k_ring.wait_full(k_first + j + 1)
            s_token = scores(q, k_ring.slot(k_first + j + 1).reshape([BN, D]), HALF, BN, S)
            k_tile = k_ring.slot(k_first + j).reshape([BN, D])
            acc_token = warpgroup_mma(ds, k_tile, acc, is_async=True)
            s, acc = warpgroup_mma_wait(0, deps=(s_token, acc_token))
            k_ring.release(k_first + j)
        q_ring.release(r)  # the next item's Q arrives while this one's last tile is worked on
        k_last = k_first + tiles - 1
        v_last = v_first + tiles - 1
        v_ring.wait_full(v_last)
        dp_token = scores(do, v_ring.slot(v_last).reshape([BN, D]), HALF, BN, S)
        n = lo + _tile_in_order(tiles - 1, tiles, before, full) * BN
        p = _cut(gl.exp2(s * scale_log2 - lse[:, None]), blocks, t, WG, n, BN, S)
        dp = warpgroup_mma_wait(0, deps=(dp_token,))
        v_ring.release(v_last)
        do_ring.release(r)
        ds = gl.convert_layout((p * (dp - delta[:, None])).to(gl.bfloat16), P)
        acc_token = warpgroup_mma(ds, k_ring.slot(k_last).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        k_ring.release(k_last)
        k_base = k_last + 1
        v_base = v_last + 1

        tma.store_wait(0)  # the previous item's dQ has long been read out of the staging buffer
        gl.thread_barrier()
        half_of_slot(dq_slot, WG, D).store((acc * scale).to(gl.bfloat16))
        # Read again rather than kept: the loops need every register.
        t = items.read(r, 1)
        kv_head = items.read(r, 0) % num_kv_heads
        items.release(r)
        dq_at = [blocks.first_token(t, WG), kv_head << blocks.log_g, 0]
        store_half(dq_map, dq_slot, WG, dq_at, D)
        r += 1
        item = items.take(r)
    tma.store_wait(0)


@gluon.jit
def hopper_bwd_dq_kernel(
    q_map,
    dout_map,
    out_map,
    k_own_map,
    v_own_map,
    k_ctx_map,
    v_ctx_map,
    dq_map,
    lse_ptr,
    delta_ptr,
    counter_ptr,
    ctx_start_ptr,
    ctx_end_ptr,
    doc_first_ptr,
    doc_last_ptr,
    num_items,
    num_blocks,
    num_kv_heads,
    window,
    causal,
    log_b,
    log_g,
    scale_log2,
    scale,
    D: gl.constexpr,
    BN: gl.constexpr,
    OWN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    q_sm = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, 1, D], k_ctx_map.layout)
    do_sm = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, 1, D], k_ctx_map.layout)
    dq_sm = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, 1, D], k_ctx_map.layout)
    k_sm = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 1, D], k_ctx_map.layout)
    v_sm = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 1, D], v_ctx_map.layout)
    items = new_items(False)
    q_ring = new_ring(q_sm, 1)
    do_ring = new_ring(do_sm, 1)
    dq_slot = dq_sm.index(0)  # of the consumers alone: each stages its half of dQ here
    k_ring = new_ring(k_sm, STAGES)
    v_ring = new_ring(v_sm, STAGES)
    blocks = Blocks(ctx_start_ptr, ctx_end_ptr, num_blocks, window, causal, log_b, log_g)
    shared = (
        dq_map,
        lse_ptr,
        delta_ptr,
        items,
        q_ring,
        do_ring,
        dq_slot,
        k_ring,
        v_ring,
        blocks,
        num_kv_heads,
        scale_log2,
        scale,
    )
    gl.warp_specialize(
        [
            (_differentiate_q, (shared, 0, D, BN, OWN)),
            (_differentiate_q, (shared, 1, D, BN, OWN)),
            (
                _load_for_dq,
                (
                    q_map,
                    dout_map,
                    out_map,
                    k_own_map,
                    v_own_map,
                    k_ctx_map,
                    v_ctx_map,
                    items,
                    q_ring,
                    do_ring,
                    k_ring,
                    v_ring,
                    blocks,
                    num_kv_heads,
                    D,
                    BN,
                    OWN,
                ),
            ),
            (
                schedule_row_tiles,
                (
                    items,
                    blocks,
                    counter_ptr,
                    doc_first_ptr,
                    doc_last_ptr,
                    num_items,
                    num_kv_heads,
                    BN,
                ),
            ),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
