"""DFlash attention backward in plain Triton, dQ and dK/dV: see attention_rows.py."""

import triton
import triton.language as tl

from dflash_kernels.attention_kept import first_image, keep
from dflash_kernels.attention_rows import (
    inside,
    intervals,
    key_tiles,
    load_rows,
    log2,
    rows_at,
    spans,
    tile_in_document_order,
    token_and_head,
)


@triton.jit
def _dq_step(s, dp, k, acc, lse, delta, scale_log2, key, lower, upper, MASKED: tl.constexpr):
    """acc += dS K for one tile of keys, dS = P * (dO V^T - delta)."""
    p = tl.exp2(s * scale_log2 - lse[:, None])
    if MASKED:
        p = inside(p, key, lower, upper, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc)


@triton.jit
def attention_bwd_dq_kernel(
    q_ptr,
    k_ctx_ptr,
    v_ctx_ptr,
    k_blk_ptr,
    v_blk_ptr,
    k_ctx_map,
    v_ctx_map,
    out_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    ctx_start_ptr,
    ctx_end_ptr,
    doc_first_ptr,
    doc_last_ptr,
    q_row,
    q_head,
    k_ctx_row,
    k_ctx_head,
    v_ctx_row,
    v_ctx_head,
    k_blk_row,
    k_blk_head,
    v_blk_row,
    v_blk_head,
    num_blocks,
    num_kv_heads,
    B,
    G,
    window,
    causal,
    scale_log2,
    scale,
    D: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    OWN: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """dQ, and for the dK/dV kernel that follows on the same stream the pairs (lse, delta) of each
    row, delta = rowsum(out * dout); `delta_ptr` is fp32 [Hkv, N * B * G, 2]."""
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    t = tile_in_document_order(pid // num_kv_heads, doc_first_ptr, doc_last_ptr, B * G, M)
    num_tokens = num_blocks * B
    num_rows = num_tokens * G
    d = tl.arange(0, D)[None, :]
    own_lo, own_hi, lo, hi, full_lo, full_hi, padded = spans(
        t, num_blocks, B, G, ctx_start_ptr, ctx_end_ptr, window, M
    )
    row = t * M + tl.arange(0, M)
    stored = row < num_rows
    token, head = token_and_head(t * M, tl.arange(0, M), G)
    lower, upper, own_from, own_to = intervals(
        token, num_tokens, B, log2(B), ctx_start_ptr, ctx_end_ptr, window, causal
    )
    q = load_rows(q_ptr + kv_head * G * q_head, q_row, q_head, token, head, stored, D)
    out_at = token.to(tl.int64) * (num_kv_heads * G * D) + (kv_head * G + head) * D
    out_at = out_at[:, None] + d
    do = tl.load(dout_ptr + out_at, mask=stored[:, None], other=0.0)
    out = tl.load(out_ptr + out_at, mask=stored[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    row_at = kv_head.to(tl.int64) * num_rows + row
    lse = tl.load(lse_ptr + row_at, mask=stored, other=float("inf"))
    tl.store(delta_ptr + 2 * row_at, lse, mask=stored)
    tl.store(delta_ptr + 2 * row_at + 1, delta, mask=stored)

    acc = tl.zeros([M, D], tl.float32)
    k_at = (k_blk_ptr + kv_head * k_blk_head) + d
    v_at = (v_blk_ptr + kv_head * v_blk_head) + d
    r = tl.arange(0, OWN)
    for n in tl.range(own_lo, own_hi, OWN, num_stages=1):
        key = tl.minimum(n + r, own_hi - 1)
        k = tl.load(rows_at(k_at, key, k_blk_row, n))
        v = tl.load(rows_at(v_at, key, v_blk_row, n))
        s = tl.dot(q, tl.trans(k))
        dp = tl.dot(do, tl.trans(v))
        acc = _dq_step(s, dp, k, acc, lse, delta, scale_log2, r, own_from - n, own_to - n, True)

    if padded:
        hi = tl.maximum(tl.max(upper), lo)
    tiles, before, full = key_tiles(lo, hi, full_lo, full_hi, BN)
    k_at = (k_ctx_ptr + kv_head * k_ctx_head) + d
    v_at = (v_ctx_ptr + kv_head * v_ctx_head) + d
    r = tl.arange(0, BN)
    for i in tl.range(0, tiles - full, num_stages=EDGE_STAGES):
        n = lo + tl.where(i < before, i, i + full) * BN
        key = tl.minimum(n + r, hi - 1)
        k = tl.load(rows_at(k_at, key, k_ctx_row, i))
        v = tl.load(rows_at(v_at, key, v_ctx_row, i))
        s = tl.dot(q, tl.trans(k))
        dp = tl.dot(do, tl.trans(v))
        acc = _dq_step(s, dp, k, acc, lse, delta, scale_log2, r, lower - n, upper - n, True)
    lo += before * BN
    for n in tl.range(lo, lo + full * BN, BN, num_stages=STAGES):
        if TMA:
            k = k_ctx_map.load([n, kv_head, 0]).reshape([BN, D])
            v = v_ctx_map.load([n, kv_head, 0]).reshape([BN, D])
        else:
            k = tl.load(rows_at(k_at, n + r, k_ctx_row, n))
            v = tl.load(rows_at(v_at, n + r, v_ctx_row, n))
        s = tl.dot(q, tl.trans(k))
        dp = tl.dot(do, tl.trans(v))
        acc = _dq_step(s, dp, k, acc, lse, delta, scale_log2, r, lower, upper, False)
    tl.store(dq_ptr + out_at, (acc * scale).to(dq_ptr.dtype.element_ty), mask=stored[:, None])


@triton.jit
def _lse_and_delta(pairs_ptr, row):
    """lse, delta of rows, read in pairs: 2 * M elements are too many for Triton to load M of them
    redundantly in the layout of the score columns, at 16 copies a thread."""
    return tl.split(tl.load(pairs_ptr + row[:, None] * 2 + tl.arange(0, 2)[None, :]))


@triton.jit
def attention_bwd_dkv_kernel(
    q_ptr,
    k_ctx_ptr,
    v_ctx_ptr,
    k_blk_ptr,
    v_blk_ptr,
    q_map,
    dout_map,
    dout_ptr,
    delta_ptr,
    dk_ctx_ptr,
    dv_ctx_ptr,
    dk_blk_ptr,
    dv_blk_ptr,
    images_ptr,
    ctx_start_ptr,
    ctx_end_ptr,
    ranges_ptr,
    seen_ptr,
    q_row,
    q_head,
    k_ctx_row,
    k_ctx_head,
    v_ctx_row,
    v_ctx_head,
    k_blk_row,
    k_blk_head,
    v_blk_row,
    v_blk_head,
    num_blocks,
    num_ctx,
    num_kv_heads,
    head_images,
    ctx_images,
    B,
    G,
    heads,
    window,
    causal,
    scale_log2,
    scale,
    D: tl.constexpr,
    BN: tl.constexpr,
    M: tl.constexpr,
    EDGE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    TMA: tl.constexpr,
    OWN: tl.constexpr,
    KEEP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """dK (with DK) and dV (with DV) of one tile of keys: of the context, or with OWN of the blocks'
    own keys. With KEEP also their dS, for dQ (hopper_kept.py).

    No atomics: a program owns its keys and walks the rows that see them in a fixed order. Because
    blocks are sorted, those rows are one range of tokens; `ranges` gives it per KEY_TILE context
    rows as four block indices: visible from, fully visible from, fully visible to, visible to.
    A tile of M rows is M / heads tokens of `heads` query heads: a power of two that divides G.
    """
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    t = pid // num_kv_heads
    log_b = log2(B)
    n0 = t * BN
    if OWN:
        num_keys = num_blocks * B
        see_lo = n0 >> log_b
        see_hi = tl.minimum(((n0 + BN - 1) >> log_b) + 1, num_blocks)
        full_lo = see_hi
        full_hi = see_hi
        k_ptr = k_blk_ptr + kv_head * k_blk_head
        v_ptr = v_blk_ptr + kv_head * v_blk_head
        dk_ptr = dk_blk_ptr
        dv_ptr = dv_blk_ptr
        k_row = k_blk_row
        v_row = v_blk_row
    else:
        num_keys = num_ctx
        first_range = ranges_ptr + n0 // KEY_TILE * 4
        last_range = ranges_ptr + tl.minimum(n0 + BN - 1, num_ctx - 1) // KEY_TILE * 4
        see_lo = tl.load(first_range)
        full_lo = tl.load(last_range + 1)
        full_hi = tl.load(first_range + 2)
        see_hi = tl.load(last_range + 3)
        k_ptr = k_ctx_ptr + kv_head * k_ctx_head
        v_ptr = v_ctx_ptr + kv_head * v_ctx_head
        dk_ptr = dk_ctx_ptr
        dv_ptr = dv_ctx_ptr
        k_row = k_ctx_row
        v_row = v_ctx_row
    d = tl.arange(0, D)[None, :]
    c = tl.arange(0, BN)
    key = tl.minimum(n0 + c, num_keys - 1)
    k = tl.load(rows_at(k_ptr + d, key, k_row, n0))
    if DK:
        v = tl.load(rows_at(v_ptr + d, key, v_row, n0))
        dk = tl.zeros([BN, D], tl.float32)
    if DV:
        dv = tl.zeros([BN, D], tl.float32)

    log_h = log2(heads)
    last_head = heads - 1
    groups = G >> log_h
    q_at = (q_ptr + kv_head * G * q_head) + d
    do_at = (dout_ptr + kv_head * G * D) + d
    do_row = num_kv_heads * G * D
    pairs_ptr = delta_ptr + kv_head.to(tl.int64) * (num_blocks * B * G) * 2
    first = see_lo << log_b
    stop = see_hi << log_b
    begin = first
    end = stop
    full_lo = full_lo << log_b
    tokens = M >> log_h
    if KEEP:  # whole images: tiles begin at multiples of their tokens
        tl.static_assert(DK == 1)
        tl.static_assert(BN == 64)
        tl.static_assert(KEY_TILE == 64)
        tl.static_assert(M == 64)
        log_rows = log_b + log_h
        if OWN:
            image = ctx_images
            kept = True
        else:
            image = first_image(t, tl.load(seen_ptr + t), see_lo, log_rows)
            kept = image + ((see_hi << log_rows) + M - 1) // M <= ctx_images
        image += kv_head * groups * head_images
        # Rows of a group that lie before or behind are read as ones that see these keys; where no
        # row does there is none to read, and dQ asks for no image.
        first = first // tokens * tokens
        stop = tl.where(begin < end, tl.cdiv(stop, tokens) * tokens, first)
        full_lo = tl.cdiv(full_lo, tokens) * tokens
    full = tl.maximum((full_hi << log_b) - full_lo, 0) // tokens
    full_hi = full_lo + full * tokens
    if full == 0:
        full_lo = stop
        full_hi = stop
    run = tl.minimum(full_lo, end)
    # Own keys, where a tile of rows lies in one block and sees all of its keys: the mask is then a
    # comparison a key, not one a pair, and the tile as large as inside the context's run.
    in_one_block = (causal == 0) & (tokens <= B)

    # First the tokens before and after the run that sees the whole key tile.
    edge_tokens = EDGE >> log_h
    edges = tl.cdiv(full_lo - first, edge_tokens) + tl.cdiv(stop - full_hi, edge_tokens)
    if OWN and TMA:
        edges = tl.where(in_one_block, 0, edges)
    edge_first = tl.where(first < full_lo, first, full_hi)
    start = edge_first
    head = 0
    r = tl.arange(0, EDGE)
    for i in tl.range(0, edges * groups, num_stages=EDGE_STAGES):
        wanted = start + (r >> log_h)
        token = tl.minimum(wanted, end - 1)
        if KEEP and not OWN:  # own keys' rows begin with a group
            token = tl.maximum(token, begin)
        row_head = head + (r & last_head)
        q = tl.load(rows_at(q_at, token, q_row, i) + (row_head * q_head)[:, None])
        do = tl.load(rows_at(do_at, token, do_row, i) + (row_head * D)[:, None])
        st = tl.dot(k, tl.trans(q))
        if DK:
            dpt = tl.dot(v, tl.trans(do))
        lse, delta = _lse_and_delta(pairs_ptr, token * G + row_head)
        block = token >> log_b
        low = tl.load(ctx_start_ptr + block)
        high = tl.load(ctx_end_ptr + block)
        # A tile may reach into the run, or past the last token.
        real = (low <= high) & (wanted < tl.where(start < full_lo, run, end))
        if KEEP and not OWN:
            real = real & (wanted >= begin)
        own = block << log_b
        if OWN:
            low = own - n0
            high = tl.where(causal != 0, token + 1, own + B)
        else:
            low = tl.maximum(low, high + token - own - window + 1) - n0
        high = tl.where(real, high, 0) - n0
        pt = tl.exp2(st * scale_log2 - lse[None, :])
        pt = tl.where((c[:, None] >= low[None, :]) & (c[:, None] < high[None, :]), pt, 0.0)
        if DV:
            dv = tl.dot(pt.to(do.dtype), do, dv)
        if DK:
            dst = (pt * (dpt - delta[None, :])).to(q.dtype)
        if KEEP:
            at = image + (head >> log_h) * head_images + start // tokens
            keep(dst, images_ptr, at, (start // edge_tokens) & 1, kept, EDGE)
        if DK:
            dk = tl.dot(dst, q, dk)
        start += edge_tokens
        start = tl.where((start >= full_lo) & (start < full_hi), full_hi, start)
        wrap = start >= stop
        head += tl.where(wrap, heads, 0)
        start = tl.where(wrap, edge_first, start)

    # Then tiles of whole runs: of a block's own rows, or of rows that see the whole key tile.
    if TMA or not OWN:
        if OWN:
            full = tl.where(in_one_block, (stop - first) // tokens, 0)
            full_lo = first
            full_hi = stop
        # From the last token down: the tiles of a document end with the same blocks, so programs
        # that run together read the same rows at the same time.
        full_hi -= tokens
        start = full_hi
        head = 0
        if KEEP:
            image += full_hi // tokens
        r = tl.arange(0, M)
        for i in tl.range(0, full * groups, num_stages=STAGES):
            if TMA:
                q = q_map.load([start, kv_head * G + head, 0]).reshape([M, D])
                do = dout_map.load([start, kv_head * G + head, 0]).reshape([M, D])
                row = (start + (r >> log_h)) * G + head + (r & last_head)
            else:  # one head a tile: evenly spaced rows
                q = tl.load(rows_at(q_at + head * q_head, start + r, q_row, i))
                do = tl.load(rows_at(do_at + head * D, start + r, do_row, i))
                row = (start + r) * G + head
            st = tl.dot(k, tl.trans(q))
            if DK:
                dpt = tl.dot(v, tl.trans(do))
            lse, delta = _lse_and_delta(pairs_ptr, row)
            pt = tl.exp2(st * scale_log2 - lse[None, :])
            if OWN:  # of a padding block it is 0 already: its lse is infinite
                pt = tl.where((((n0 + c) >> log_b) == (start >> log_b))[:, None], pt, 0.0)
            if DV:
                dv = tl.dot(pt.to(do.dtype), do, dv)
            if DK:
                dst = (pt * (dpt - delta[None, :])).to(q.dtype)
                dk = tl.dot(dst, q, dk)
            if KEEP:
                keep(dst, images_ptr, image, 0, kept, M)
            start -= tokens
            wrap = start < full_lo
            if KEEP:
                image += tl.where(wrap, head_images + full - 1, -1)
            head += tl.where(wrap, heads, 0)
            start = tl.where(wrap, full_hi, start)

    stored = (n0 + c < num_keys)[:, None]
    at = key.to(tl.int64)[:, None] * (num_kv_heads * D) + kv_head * D + d
    if DV:
        tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=stored)
    if DK:
        tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=stored)
