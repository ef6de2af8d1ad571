"""DFlash attention forward on Hopper: see hopper.py for the structure and attention.py for the mask.

Per item a consumer computes softmax over its own block's keys and the first context tile together,
then walks the rest with S of tile j + 1 in flight while tile j goes through the softmax. A block's
own keys travel through the K/V ring as one more tile, so that any G fits the same shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dflash_kernels.hopper import (
    CONSUMERS,
    HALF,
    TILE,
    Blocks,
    draw_item,
    load_keys,
    load_own,
    new_barriers,
    new_items,
    new_ring,
)


@gluon.jit
def _load(
    q_map,
    k_own_map,
    v_own_map,
    k_ctx_map,
    v_ctx_map,
    items,
    q_sm,
    k_ring,
    v_ring,
    blocks,
    counter_ptr,
    doc_first_ptr,
    doc_last_ptr,
    num_items,
    num_kv_heads,
    D: gl.constexpr,
    BN: gl.constexpr,
    OWN: gl.constexpr,
):
    position = 0
    r = 0
    item = gl.program_id(0)
    while item < num_items:
        kv_head = item % num_kv_heads
        t = blocks.tile_in_document_order(item // num_kv_heads, doc_first_ptr, doc_last_ptr)
        lo, hi = blocks.tile_interval(t)
        items.wait_empty(r)
        items.write(r, 0, item)
        items.write(r, 1, t)
        items.write(r, 2, lo)
        items.write(r, 3, hi)
        items.announce(r, TILE * D * 2)
        full = items.full.index(r & 1)
        for g in gl.static_range(CONSUMERS):
            q_at = q_sm.index((r & 1) * CONSUMERS + g)
            q_from = [blocks.first_token(t, g), kv_head << blocks.log_g, 0]
            tma.async_copy_global_to_shared(q_map, q_from, full, q_at)
        load_own(k_own_map, k_ring, position, blocks, t, kv_head, BN, OWN, D)
        load_own(v_own_map, v_ring, position, blocks, t, kv_head, BN, OWN, D)
        position += 1
        for n in range(lo, hi - BN, BN):
            load_keys(k_ctx_map, k_ring, position, n, kv_head, BN, D)
            load_keys(v_ctx_map, v_ring, position, n, kv_head, BN, D)
            position += 1
        item = draw_item(counter_ptr)
        n = lo + (hi - lo - 1) // BN * BN
        load_keys(k_ctx_map, k_ring, position, n, kv_head, BN, D)
        load_keys(v_ctx_map, v_ring, position, n, kv_head, BN, D)
        position += 1
        r += 1
    items.end(r)


@gluon.jit
def _hide(s, n, lower, end, full_lo, full_hi, BN: gl.constexpr, layout: gl.constexpr):
    """Scores of a context tile starting at n, -inf where a row does not see the key."""
    if (n < full_lo) | (n + BN > full_hi):
        key = n + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        visible = (key[None, :] >= lower[:, None]) & (key[None, :] < end[:, None])
        s = gl.where(visible, s, float("-inf"))
    return s


@gluon.jit
def _attend(
    out_map,
    lse_ptr,
    items,
    q_sm,
    k_ring,
    v_ring,
    turns,
    blocks,
    num_kv_heads,
    scale_log2,
    WG: gl.constexpr,
    D: gl.constexpr,
    BN: gl.constexpr,
    OWN: gl.constexpr,
    TURNS: gl.constexpr,
):
    OWN_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 16])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    OWN_ROW: gl.constexpr = gl.SliceLayout(1, OWN_S)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O)
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    OWN_SHAPE: gl.constexpr = [CONSUMERS, OWN, D]
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    num_rows = blocks.num_rows()
    base = 0  # ring position of the item's own keys
    turn = 0
    r = 0
    item = items.take(0)
    while item >= 0:
        t = items.read(r, 1)
        lo = items.read(r, 2)
        hi = items.read(r, 3)
        kv_head = item % num_kv_heads
        tiles = (hi - lo + BN - 1) // BN
        q_slot = q_sm.index((r & 1) * CONSUMERS + WG)
        q = q_slot.reshape([HALF, D])
        k_ring.wait_full(base)
        own_token = warpgroup_mma(
            q,
            k_ring.slot(base)._reinterpret(gl.bfloat16, OWN_SHAPE, FLAT).index(WG).permute((1, 0)),
            gl.zeros([HALF, OWN], gl.float32, OWN_S),
            use_acc=False,
            is_async=True,
        )
        k_ring.wait_full(base + 1)
        s_token = warpgroup_mma(
            q,
            k_ring.slot(base + 1).reshape([BN, D]).permute((1, 0)),
            gl.zeros([HALF, BN], gl.float32, S),
            use_acc=False,
            is_async=True,
        )
        full_lo, full_hi = blocks.full_interval(t, WG)
        row = t * TILE + WG * HALF + gl.arange(0, HALF, layout=ROW)
        token, block, lower, end = blocks.rows(row)
        own_key = blocks.first_own_key(t, WG) + gl.arange(0, OWN, layout=gl.SliceLayout(0, OWN_S))
        own = blocks.own_visible(
            own_key, gl.convert_layout(token, OWN_ROW), gl.convert_layout(block, OWN_ROW)
        )
        own_s = warpgroup_mma_wait(1, deps=(own_token,))
        k_ring.release(base)
        own_s = gl.where(own, own_s, float("-inf"))
        own_m = gl.convert_layout(gl.max(own_s, 1), ROW)
        s = warpgroup_mma_wait(0, deps=(s_token,))
        k_ring.release(base + 1)
        s = _hide(s, lo, lower, end, full_lo, full_hi, BN, S)
        # Real rows see at least themselves, so m is finite; padding rows turn into NaN here and are
        # replaced at the end.
        m = gl.maximum(own_m, gl.max(s, 1)) * scale_log2
        own_p = gl.exp2(own_s * scale_log2 - gl.convert_layout(m, OWN_ROW)[:, None])
        v_ring.wait_full(base)
        acc_token = warpgroup_mma(
            gl.convert_layout(own_p.to(gl.bfloat16), P),
            v_ring.slot(base)._reinterpret(gl.bfloat16, OWN_SHAPE, FLAT).index(WG),
            gl.zeros([HALF, D], gl.float32, O),
            use_acc=False,
            is_async=True,
        )
        pf = gl.exp2(s * scale_log2 - m[:, None])
        total = gl.convert_layout(gl.sum(own_p, 1), ROW) + gl.sum(pf, 1)
        p = gl.convert_layout(pf.to(gl.bfloat16), P)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        v_ring.release(base)
        items.release_previous(r)
        for j in range(1, tiles):
            k_ring.wait_full(base + 1 + j)
            if TURNS:  # one consumer's products while the other has its softmax
                mbarrier.wait(turns.index(WG), ((turn + j - 1) & 1) ^ (1 - WG))
            s_token = warpgroup_mma(
                q,
                k_ring.slot(base + 1 + j).reshape([BN, D]).permute((1, 0)),
                gl.zeros([HALF, BN], gl.float32, S),
                use_acc=False,
                is_async=True,
            )
            v_ring.wait_full(base + j)
            acc_token = warpgroup_mma(p, v_ring.slot(base + j).reshape([BN, D]), acc, is_async=True)
            if TURNS:
                mbarrier.arrive(turns.index(1 - WG), count=1)
            s = warpgroup_mma_wait(1, deps=(s_token,))
            k_ring.release(base + 1 + j)
            s = _hide(s, lo + j * BN, lower, end, full_lo, full_hi, BN, S)
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
            alpha = gl.exp2(m - m_new)
            pf = gl.exp2(s * scale_log2 - m_new[:, None])
            total = total * alpha + gl.sum(pf, 1)
            m = m_new
            # Everything is waited for before the loop's back edge: a wgmma in flight across it makes
            # ptxas serialise all of them (its message C7514).
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            v_ring.release(base + j)
            acc = acc * gl.convert_layout(alpha, O_ROW)[:, None]
            p = gl.convert_layout(pf.to(gl.bfloat16), P)
        turn += tiles - 1
        v_ring.wait_full(base + tiles)
        acc_token = warpgroup_mma(p, v_ring.slot(base + tiles).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        v_ring.release(base + tiles)
        base += tiles + 1
        real = lower <= end
        keep = gl.convert_layout(real, O_ROW)[:, None]
        out = gl.where(keep, acc / gl.convert_layout(total, O_ROW)[:, None], 0.0)
        q.store(out.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        out_at = [blocks.first_token(t, WG), kv_head << blocks.log_g, 0]
        tma.async_copy_shared_to_global(out_map, out_at, q_slot)
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
    TURNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    q_sm = gl.allocate_shared_memory(gl.bfloat16, [2 * CONSUMERS, 16, 4, D], q_map.layout)
    k_sm = gl.allocate_shared_memory(gl.bfloat16, [K_STAGES, BN, 1, D], k_ctx_map.layout)
    v_sm = gl.allocate_shared_memory(gl.bfloat16, [V_STAGES, BN, 1, D], v_ctx_map.layout)
    items = new_items()
    k_ring = new_ring(k_sm, K_STAGES)
    v_ring = new_ring(v_sm, V_STAGES)
    turns = new_barriers(CONSUMERS, 1)
    blocks = Blocks(ctx_start_ptr, ctx_end_ptr, num_blocks, window, causal, log_b, log_g)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    out_map,
                    lse_ptr,
                    items,
                    q_sm,
                    k_ring,
                    v_ring,
                    turns,
                    blocks,
                    num_kv_heads,
                    scale_log2,
                    0,
                    D,
                    BN,
                    OWN,
                    TURNS,
                ),
            ),
            (
                _attend,
                (
                    out_map,
                    lse_ptr,
                    items,
                    q_sm,
                    k_ring,
                    v_ring,
                    turns,
                    blocks,
                    num_kv_heads,
                    scale_log2,
                    1,
                    D,
                    BN,
                    OWN,
                    TURNS,
                ),
            ),
            (
                _load,
                (
                    q_map,
                    k_own_map,
                    v_own_map,
                    k_ctx_map,
                    v_ctx_map,
                    items,
                    q_sm,
                    k_ring,
                    v_ring,
                    blocks,
                    counter_ptr,
                    doc_first_ptr,
                    doc_last_ptr,
                    num_items,
                    num_kv_heads,
                    D,
                    BN,
                    OWN,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
