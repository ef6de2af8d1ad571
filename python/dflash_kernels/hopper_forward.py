"""DFlash attention forward on Hopper: see hopper.py for the structure and attention_rows.py for
the mask.

Per item a consumer computes softmax over its own block's keys and the first context tile together,
then walks the rest: S of tile j and P V of tile j - 1 are in flight together, and one consumer's
products run beside the other's softmax. What its rows do not see behind the first tile, a half of
one or more, a consumer leaves out. A block's own keys and values travel through a slot of the V
ring, so that any G fits the same shared memory.
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

# The score of a hidden pair: finite, so that rows that see nothing (padding) stay free of NaN, and
# far enough below any score that its probability is exactly 0 in rows that see something.
HIDDEN = gl.constexpr(-1e30)


@gluon.jit
def _load(
    q_map,
    k_own_map,
    v_own_map,
    k_ctx_map,
    v_ctx_map,
    items,
    q_ring,
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
        items.release(r)
        kv_head = item % num_kv_heads
        load_rows(q_map, q_ring, r, blocks, t, kv_head, D)
        load_own(k_own_map, v_own_map, v_ring, v_position, blocks, t, kv_head, OWN, BN, D)
        v_position += OWN_SLOTS
        for i in range(tiles):
            n = lo + i * BN
            load_keys(k_ctx_map, k_ring, k_position, n, kv_head, BN, D)
            load_keys(v_ctx_map, v_ring, v_position, n, kv_head, BN, D)
            k_position += 1
            v_position += 1
        r += 1
        item = items.take(r)


@gluon.jit
def _hide(s, i, seen, BN: gl.constexpr):
    """Scores of key tile i, HIDDEN where a row does not see the key; nothing to do in full tiles.

    seen: lo, before and full of `Blocks.key_tiles`, and the rows' intervals, lower and end. A tile
    past the full ones, the usual case, is cut only where the rows' intervals end.
    """
    lo, before, full, lower, end = seen
    S: gl.constexpr = s.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    if (i < before) | (i >= before + full):
        key = lo + i * BN + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, S))
        s = gl.where(key[None, :] < gl.convert_layout(end, ROW)[:, None], s, HIDDEN)
        if i < before:
            s = gl.where(key[None, :] >= gl.convert_layout(lower, ROW)[:, None], s, HIDDEN)
    return s


@gluon.jit
def _step(
    q,
    rings,
    k_at,
    v_at,
    j,
    seen,
    p,
    acc,
    m,
    total,
    scale_log2,
    N: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
):
    """P V of key tile j - 1 beside S of the first N keys of tile j: its P, and acc, m and total.

    k_at, v_at: positions of the two tiles in their rings.
    """
    k_ring, v_ring = rings
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OUT: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = m.type.layout
    k_ring.wait_full(k_at)
    s_token = scores(q, k_ring.slot(k_at).reshape([BN, D]).slice(0, N), HALF, N, S)
    v_ring.wait_full(v_at)
    acc_token = warpgroup_mma(p, v_ring.slot(v_at).reshape([BN, D]), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    k_ring.release(k_at)
    s = _hide(s, j, seen, BN)
    m_new = gl.maximum(m, gl.convert_layout(gl.max(s, 1), ROW) * scale_log2)
    alpha = gl.exp2(m - m_new)
    pf = gl.exp2(s * scale_log2 - gl.convert_layout(m_new, gl.SliceLayout(1, S))[:, None])
    total = total * alpha + gl.convert_layout(gl.sum(pf, 1), ROW)
    # Everything is waited for before a loop's back edge: a wgmma in flight across it makes ptxas
    # serialise all of them (its message C7514).
    acc = warpgroup_mma_wait(0, deps=(acc_token,))
    v_ring.release(v_at)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    return gl.convert_layout(pf.to(gl.bfloat16), gl.DotOperandLayout(0, OUT, 2)), acc, m_new, total


@gluon.jit
def _last_product(v_ring, v_at, p, acc, BN: gl.constexpr, D: gl.constexpr):
    """acc + P V of the last key tile, or of as many of its keys as P has."""
    v_ring.wait_full(v_at)
    values = v_ring.slot(v_at).reshape([BN, D]).slice(0, p.shape[1])
    acc_token = warpgroup_mma(p, values, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc_token,))
    v_ring.release(v_at)
    return acc


@gluon.jit
def _attend(shared, WG: gl.constexpr, D: gl.constexpr, BN: gl.constexpr, OWN: gl.constexpr):
    (
        out_map,
        lse_ptr,
        items,
        q_ring,
        k_ring,
        v_ring,
        blocks,
        num_kv_heads,
        scale_log2,
    ) = shared
    OWN_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    OWN_ROW: gl.constexpr = gl.SliceLayout(1, OWN_S)
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OWN_SLOTS: gl.constexpr = own_slots(OWN, BN)
    num_rows = blocks.num_rows()
    k_base = 0  # ring positions of the item's first context tile, and of its own keys and values
    v_base = 0
    r = 0
    item = items.take(0)
    while item >= 0:
        t = items.read(r, 1)
        lo = items.read(r, 2)
        tiles = items.read(r, 3)
        before = items.read(r, 4)
        full = items.read(r, 5)
        reach = items.read(r, 6 + WG)
        items.release(r)
        kv_head = item % num_kv_heads
        q = half_of_slot(q_ring.slot(r), WG, D)
        q_ring.wait_full(r)
        v_ring.wait_full(v_base)
        own_k = own_rows(v_ring, v_base, 0, WG, OWN, BN, D).reshape([OWN, D])
        own_v = own_rows(v_ring, v_base, 1, WG, OWN, BN, D).reshape([OWN, D])
        own_token = scores(q, own_k, HALF, OWN, OWN_S)
        k_ring.wait_full(k_base)
        s_token = scores(q, k_ring.slot(k_base).reshape([BN, D]), HALF, BN, S)
        row = t * TILE + WG * HALF + gl.arange(0, HALF, layout=ROW)
        token, block, lower, end = blocks.rows(row)
        own_key = blocks.first_own_key(t, WG) + gl.arange(0, OWN, layout=gl.SliceLayout(0, OWN_S))
        own = blocks.own_visible(
            own_key, gl.convert_layout(token, OWN_ROW), gl.convert_layout(block, OWN_ROW)
        )
        own_s = warpgroup_mma_wait(1, deps=(own_token,))
        if OWN_SLOTS == 2:
            v_ring.release(v_base)
        own_s = gl.where(own, own_s, HIDDEN)
        own_m = gl.convert_layout(gl.max(own_s, 1), ROW)
        s = warpgroup_mma_wait(0, deps=(s_token,))
        k_ring.release(k_base)
        rings = (k_ring, v_ring)
        seen = (lo, before, full, lower, end)
        s = _hide(s, 0, seen, BN)
        m = gl.maximum(own_m, gl.max(s, 1)) * scale_log2
        own_p = gl.exp2(own_s * scale_log2 - gl.convert_layout(m, OWN_ROW)[:, None])
        if OWN_SLOTS == 2:
            v_ring.wait_full(v_base + 1)
        acc_token = warpgroup_mma(
            gl.convert_layout(own_p.to(gl.bfloat16), P),
            own_v,
            gl.zeros([HALF, D], gl.float32, OUT),
            use_acc=False,
            is_async=True,
        )
        pf = gl.exp2(s * scale_log2 - m[:, None])
        total = gl.convert_layout(gl.sum(own_p, 1), ROW) + gl.sum(pf, 1)
        p = gl.convert_layout(pf.to(gl.bfloat16), P)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        v_ring.release(v_base + OWN_SLOTS - 1)
        if r > 0:  # the previous item's output has been read out of its Q slot by now
            tma.store_wait(0)
            q_ring.release(r - 1)
        v_first = v_base + OWN_SLOTS
        # Its rows may need fewer tiles than the other consumer's, and half of the last.
        mine = gl.maximum((reach + BN - 1) // BN, 1)
        last = mine - 1
        half = (last > 0) & (reach - last * BN <= BN // 2)
        for j in range(1, mine - half.to(gl.int32)):
            k_at = k_base + j
            v_at = v_first + j - 1
            p, acc, m, total = _step(
                q, rings, k_at, v_at, j, seen, p, acc, m, total, scale_log2, BN, BN, D
            )
        if half:
            k_at = k_base + last
            v_at = v_first + last - 1
            p_half, acc, m, total = _step(
                q, rings, k_at, v_at, last, seen, p, acc, m, total, scale_log2, BN // 2, BN, D
            )
            acc = _last_product(v_ring, v_first + last, p_half, acc, BN, D)
        else:
            acc = _last_product(v_ring, v_first + last, p, acc, BN, D)
        for j in range(mine, tiles):
            k_ring.skip(k_base + j)
            v_ring.skip(v_first + j)
        k_base += tiles
        v_base = v_first + tiles
        real = lower <= end
        # Padding rows: their output is 0, and an infinite lse makes the backward's P exactly 0.
        factor = gl.where(real, 1.0 / total, 0.0)
        out = acc * gl.convert_layout(factor, OUT_ROW)[:, None]
        q.store(out.to(gl.bfloat16))
        out_at = [blocks.first_token(t, WG), kv_head << blocks.log_g, 0]
        store_half(out_map, q_ring.slot(r), WG, out_at, D)
        lse = gl.where(real, m + gl.log2(total), float("inf"))
        gl.store(lse_ptr + kv_head.to(gl.int64) * num_rows + row, lse, mask=row < num_rows)
        r += 1
        item = items.take(r)
    tma.store_wait(0)


@gluon.jit
def hopper_fwd_kernel(
    q_map,
    k_own_map,
    v_own_map,
    k_ctx_map,
    v_ctx_map,
    out_map,
    lse_ptr,
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
    D: gl.constexpr,
    BN: gl.constexpr,
    OWN: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    q_sm = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, 1, D], k_ctx_map.layout)
    k_sm = gl.allocate_shared_memory(gl.bfloat16, [K_STAGES, BN, 1, D], k_ctx_map.layout)
    v_sm = gl.allocate_shared_memory(gl.bfloat16, [V_STAGES, BN, 1, D], v_ctx_map.layout)
    items = new_items(False)
    q_ring = new_ring(q_sm, 2)
    k_ring = new_ring(k_sm, K_STAGES)
    v_ring = new_ring(v_sm, V_STAGES)
    blocks = Blocks(ctx_start_ptr, ctx_end_ptr, num_blocks, window, causal, log_b, log_g)
    shared = (
        out_map,
        lse_ptr,
        items,
        q_ring,
        k_ring,
        v_ring,
        blocks,
        num_kv_heads,
        scale_log2,
    )
    gl.warp_specialize(
        [
            (_attend, (shared, 0, D, BN, OWN)),
            (_attend, (shared, 1, D, BN, OWN)),
            (
                _load,
                (
                    q_map,
                    k_own_map,
                    v_own_map,
                    k_ctx_map,
                    v_ctx_map,
                    items,
                    q_ring,
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
