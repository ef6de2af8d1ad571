"""DFlash attention in plain Triton: forward, dQ and dK/dV.

Shapes: N blocks, B slots, T context rows, G = Hq / Hkv query heads per key-value head, D head dim.

One program works for one key-value head. Its query ROWS are the flattened (block, slot, head of
the group) triples, `row = (block * B + slot) * G + g`: the G heads that share a K/V head sit in one
tile, so K and V are read once for all of them, and any B and any G cost no padding. B and G are run
time arguments; only head_dim and the tile shape are compiled in.

The mask is one interval per row (semantics.md): row (i, k) sees context rows
`max(ctx_start[i], ctx_end[i] + k - window + 1) <= j < ctx_end[i]`. A tile of keys that every row of
the program sees takes no mask; only the tiles at the interval's ends and the own-block tile do.
`window` is 2**30 where there is none. A padding block has ctx_start > ctx_end and sees nothing.

Softmax runs in base 2: `scale_log2 = scale * log2(e)`, and `lse` is a base-2 logarithm, +inf for a
padding row, which makes every probability that the backward recomputes from it exactly 0.
"""

import triton
import triton.language as tl


@triton.jit
def _row_interval(row, num_rows, B, G, ctx_start_ptr, ctx_end_ptr, window):
    """Token, block, slot of each row, its context interval [lower, end), and whether it is real."""
    inside = row < num_rows
    token = row // G
    block = token // B
    slot = token - block * B
    start = tl.load(ctx_start_ptr + block, mask=inside, other=1)
    end = tl.load(ctx_end_ptr + block, mask=inside, other=0)
    lower = tl.maximum(start, end + slot - window + 1)
    return token, block, slot, lower, end, start <= end


@triton.jit
def _tile_in_document_order(t, doc_first_ptr, doc_last_ptr, rows_per_block, M: tl.constexpr):
    """Reverse the program order inside each document: its longest intervals first.

    Documents stay in order, so that programs running together share K/V in L2; inside one, starting
    with the last anchors (the longest intervals) leaves no long program for the end. A tile belongs
    to the document of its first row, hence the map is a permutation.
    """
    lead = t * M // rows_per_block
    first = tl.load(doc_first_ptr + lead)
    last = tl.load(doc_last_ptr + lead)
    first_tile = tl.cdiv(first * rows_per_block, M)
    last_tile = tl.cdiv((last + 1) * rows_per_block, M) - 1
    return first_tile + last_tile - t


@triton.jit
def _key_tiles(lower, end, real, num_ctx, BN: tl.constexpr):
    """Tiles [lo + i*BN, +BN) of a program: how many in all, and which run is visible to every row.

    Returns lo, the number of tiles, the number before the first full one, the number of full ones.
    Rows past the end of the problem count as empty here and are never stored.
    """
    some = real & (lower < end)
    lo = tl.min(tl.where(some, lower, num_ctx))
    hi = tl.max(tl.where(some, end, 0))
    full_lo = tl.max(tl.where(some, lower, num_ctx))
    full_hi = tl.min(tl.where(some, end, 0))
    tiles = tl.maximum(tl.cdiv(hi - lo, BN), 0)
    before = tl.minimum(tl.cdiv(full_lo - lo, BN), tiles)
    full = tl.maximum((full_hi - lo) // BN - before, 0)
    return lo, hi, tiles, before, full


@triton.jit
def _load_rows(ptr, row, stride_row, column, keep, MASKED: tl.constexpr):
    """[rows, D] tile of a token-major tensor; 64-bit row offsets (they pass 2**31 in real runs)."""
    at = ptr + row.to(tl.int64)[:, None] * stride_row + column[None, :]
    if MASKED:
        return tl.load(at, mask=keep[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _own_visible(key, block, slot, real, B, causal):
    """[rows, keys]: key token `key` belongs to the row's own block (and is not in its future)."""
    key_block = key // B
    key_slot = key - key_block * B
    same = (block[:, None] == key_block[None, :]) & real[:, None]
    return same & ((key_slot[None, :] <= slot[:, None]) | (causal == 0))


@triton.jit
def _softmax_step(q, k, v, visible, acc, m, total, scale_log2, MASKED: tl.constexpr):
    """One online-softmax update of acc [M, D], running maximum m and sum with a tile of keys."""
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    if MASKED:
        # A row that has seen nothing yet: subtract 0 instead of -inf, which would give NaN.
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_use = m_new
    p = tl.exp2(s * scale_log2 - m_use[:, None])
    alpha = tl.exp2(m - m_use)
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, m_new, total


@triton.jit
def attention_fwd_kernel(
    q_ptr,
    k_ctx_ptr,
    v_ctx_ptr,
    k_blk_ptr,
    v_blk_ptr,
    out_ptr,
    lse_ptr,
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
    num_ctx,
    num_kv_heads,
    B,
    G,
    window,
    causal,
    scale_log2,
    D: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    OWN: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    t = _tile_in_document_order(pid // num_kv_heads, doc_first_ptr, doc_last_ptr, B * G, M)
    num_rows = num_blocks * B * G
    row = t * M + tl.arange(0, M)
    d = tl.arange(0, D)
    token, block, slot, lower, end, real = _row_interval(
        row, num_rows, B, G, ctx_start_ptr, ctx_end_ptr, window
    )
    stored = row < num_rows
    head = row - token * G
    q_at = token.to(tl.int64) * q_row + (kv_head * G + head) * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=stored[:, None], other=0.0)

    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    own_lo = (t * M) // (B * G) * B
    own_hi = tl.minimum(((t + 1) * M - 1) // (B * G) + 1, num_blocks) * B
    for n in tl.range(own_lo, own_hi, OWN, num_stages=1):
        key = n + tl.arange(0, OWN)
        keep = key < own_hi
        k = _load_rows(k_blk_ptr + kv_head * k_blk_head, key, k_blk_row, d, keep, True)
        v = _load_rows(v_blk_ptr + kv_head * v_blk_head, key, v_blk_row, d, keep, True)
        visible = _own_visible(key, block, slot, real, B, causal)
        acc, m, total = _softmax_step(q, k, v, visible, acc, m, total, scale_log2, True)

    lo, hi, tiles, before, full = _key_tiles(lower, end, real, num_ctx, BN)
    k_ptr = k_ctx_ptr + kv_head * k_ctx_head
    v_ptr = v_ctx_ptr + kv_head * v_ctx_head
    for n in tl.range(lo + before * BN, lo + (before + full) * BN, BN, num_stages=STAGES):
        key = n + tl.arange(0, BN)
        k = _load_rows(k_ptr, key, k_ctx_row, d, key, False)
        v = _load_rows(v_ptr, key, v_ctx_row, d, key, False)
        acc, m, total = _softmax_step(q, k, v, 0, acc, m, total, scale_log2, False)
    for i in tl.range(0, tiles - full, num_stages=1):
        key = lo + tl.where(i < before, i, i + full) * BN + tl.arange(0, BN)
        k = _load_rows(k_ptr, key, k_ctx_row, d, key < hi, True)
        v = _load_rows(v_ptr, key, v_ctx_row, d, key < hi, True)
        visible = (key[None, :] >= lower[:, None]) & (key[None, :] < end[:, None])
        acc, m, total = _softmax_step(
            q, k, v, visible & real[:, None], acc, m, total, scale_log2, True
        )

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = tl.where(total == 0.0, float("inf"), m + tl.log2(total))
    out_at = token.to(tl.int64) * (num_kv_heads * G * D) + (kv_head * G + head) * D
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at[:, None] + d[None, :], out, mask=stored[:, None])
    tl.store(lse_ptr + kv_head.to(tl.int64) * num_rows + row, lse, mask=stored)


@triton.jit
def _dq_step(q, do, k, v, visible, acc, lse, delta, scale_log2, MASKED: tl.constexpr):
    """acc += dS K for one tile of keys, dS = P * (dO V^T - delta)."""
    s = tl.dot(q, tl.trans(k))
    dp = tl.dot(do, tl.trans(v))
    p = tl.exp2(s * scale_log2 - lse[:, None])
    if MASKED:
        p = tl.where(visible, p, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc)


@triton.jit
def attention_bwd_dq_kernel(
    q_ptr,
    k_ctx_ptr,
    v_ctx_ptr,
    k_blk_ptr,
    v_blk_ptr,
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
    num_ctx,
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
):
    """dQ, and delta = rowsum(out * dout) for the dK/dV kernel that follows on the same stream."""
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    t = _tile_in_document_order(pid // num_kv_heads, doc_first_ptr, doc_last_ptr, B * G, M)
    num_rows = num_blocks * B * G
    row = t * M + tl.arange(0, M)
    d = tl.arange(0, D)
    token, block, slot, lower, end, real = _row_interval(
        row, num_rows, B, G, ctx_start_ptr, ctx_end_ptr, window
    )
    stored = row < num_rows
    head = row - token * G
    q_at = token.to(tl.int64) * q_row + (kv_head * G + head) * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=stored[:, None], other=0.0)
    out_at = token.to(tl.int64) * (num_kv_heads * G * D) + (kv_head * G + head) * D
    out_at = out_at[:, None] + d[None, :]
    do = tl.load(dout_ptr + out_at, mask=stored[:, None], other=0.0)
    out = tl.load(out_ptr + out_at, mask=stored[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    row_at = kv_head.to(tl.int64) * num_rows + row
    tl.store(delta_ptr + row_at, delta, mask=stored)
    lse = tl.load(lse_ptr + row_at, mask=stored, other=float("inf"))

    acc = tl.zeros([M, D], tl.float32)
    own_lo = (t * M) // (B * G) * B
    own_hi = tl.minimum(((t + 1) * M - 1) // (B * G) + 1, num_blocks) * B
    for n in tl.range(own_lo, own_hi, OWN, num_stages=1):
        key = n + tl.arange(0, OWN)
        keep = key < own_hi
        k = _load_rows(k_blk_ptr + kv_head * k_blk_head, key, k_blk_row, d, keep, True)
        v = _load_rows(v_blk_ptr + kv_head * v_blk_head, key, v_blk_row, d, keep, True)
        visible = _own_visible(key, block, slot, real, B, causal)
        acc = _dq_step(q, do, k, v, visible, acc, lse, delta, scale_log2, True)

    lo, hi, tiles, before, full = _key_tiles(lower, end, real, num_ctx, BN)
    k_ptr = k_ctx_ptr + kv_head * k_ctx_head
    v_ptr = v_ctx_ptr + kv_head * v_ctx_head
    for n in tl.range(lo + before * BN, lo + (before + full) * BN, BN, num_stages=STAGES):
        key = n + tl.arange(0, BN)
        k = _load_rows(k_ptr, key, k_ctx_row, d, key, False)
        v = _load_rows(v_ptr, key, v_ctx_row, d, key, False)
        acc = _dq_step(q, do, k, v, 0, acc, lse, delta, scale_log2, False)
    for i in tl.range(0, tiles - full, num_stages=1):
        key = lo + tl.where(i < before, i, i + full) * BN + tl.arange(0, BN)
        k = _load_rows(k_ptr, key, k_ctx_row, d, key < hi, True)
        v = _load_rows(v_ptr, key, v_ctx_row, d, key < hi, True)
        visible = (key[None, :] >= lower[:, None]) & (key[None, :] < end[:, None])
        visible = visible & real[:, None]
        acc = _dq_step(q, do, k, v, visible, acc, lse, delta, scale_log2, True)
    dq = (acc * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + out_at, dq, mask=stored[:, None])


@triton.jit
def _dkv_step(k, v, q, do, visible, dk, dv, lse, delta, scale_log2, MASKED: tl.constexpr):
    """dV += P^T dO and dK += dS^T Q for one tile of query rows; tiles are [keys, rows]."""
    st = tl.dot(k, tl.trans(q))
    dpt = tl.dot(v, tl.trans(do))
    pt = tl.exp2(st * scale_log2 - lse[None, :])
    if MASKED:
        pt = tl.where(visible, pt, 0.0)
    dv = tl.dot(pt.to(do.dtype), do, dv)
    dst = pt * (dpt - delta[None, :])
    dk = tl.dot(dst.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def attention_bwd_dkv_kernel(
    q_ptr,
    k_ctx_ptr,
    v_ctx_ptr,
    k_blk_ptr,
    v_blk_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ctx_ptr,
    dv_ctx_ptr,
    dk_blk_ptr,
    dv_blk_ptr,
    ctx_start_ptr,
    ctx_end_ptr,
    ranges_ptr,
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
    B,
    G,
    window,
    causal,
    scale_log2,
    scale,
    D: tl.constexpr,
    BN: tl.constexpr,
    M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK and dV of one tile of keys: context tiles first, then tiles of the blocks' own keys.

    No atomics: a program owns its keys and walks the rows that see them in a fixed order. Because
    blocks are sorted, those rows are one range; `ranges` gives it per context tile as four block
    indices: visible from, fully visible from, fully visible to, visible to.
    """
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    t = pid // num_kv_heads
    ctx_tiles = tl.cdiv(num_ctx, BN)
    is_ctx = t < ctx_tiles
    if is_ctx:
        n0 = t * BN
        num_keys = num_ctx
        see_lo = tl.load(ranges_ptr + t * 4)
        full_lo = tl.load(ranges_ptr + t * 4 + 1)
        full_hi = tl.load(ranges_ptr + t * 4 + 2)
        see_hi = tl.load(ranges_ptr + t * 4 + 3)
        k_ptr = k_ctx_ptr + kv_head * k_ctx_head
        v_ptr = v_ctx_ptr + kv_head * v_ctx_head
        dk_ptr = dk_ctx_ptr
        dv_ptr = dv_ctx_ptr
        k_row = k_ctx_row
        v_row = v_ctx_row
    else:
        n0 = (t - ctx_tiles) * BN
        num_keys = num_blocks * B
        see_lo = n0 // B
        see_hi = tl.minimum((n0 + BN - 1) // B + 1, num_blocks)
        full_lo = see_hi
        full_hi = see_hi
        k_ptr = k_blk_ptr + kv_head * k_blk_head
        v_ptr = v_blk_ptr + kv_head * v_blk_head
        dk_ptr = dk_blk_ptr
        dv_ptr = dv_blk_ptr
        k_row = k_blk_row
        v_row = v_blk_row
    d = tl.arange(0, D)
    key = n0 + tl.arange(0, BN)
    kept = key < num_keys
    k = _load_rows(k_ptr, key, k_row, d, kept, True)
    v = _load_rows(v_ptr, key, v_row, d, kept, True)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)

    # A tile of rows is a whole number of tokens, M // G of them, so that a row's place inside the
    # tile is known outside the loop; the few rows left over where G does not divide M repeat row 0
    # and get lse = +inf, that is probability 0.
    tokens = M // G
    r = tl.arange(0, M)
    used = r < tokens * G
    local_token = r // G
    head = r - local_token * G
    q_at = tl.where(used, local_token * q_row + head * q_head, 0)[:, None] + d[None, :]
    do_row = num_kv_heads * G * D
    do_at = tl.where(used, local_token * do_row + head * D, 0)[:, None] + d[None, :]
    q_base = q_ptr + (kv_head * G) * q_head
    do_base = dout_ptr + (kv_head * G) * D
    row_base = kv_head.to(tl.int64) * (num_blocks * B * G)
    first = full_lo * B
    full_tiles = tl.maximum((full_hi - full_lo) * B // tokens, 0)
    for i in tl.range(0, full_tiles, num_stages=STAGES):
        token = (first + i * tokens).to(tl.int64)
        q = tl.load(q_base + token * q_row + q_at)
        do = tl.load(do_base + token * do_row + do_at)
        row_at = row_base + token * G + r
        lse = tl.load(lse_ptr + row_at, mask=used, other=float("inf"))
        delta = tl.load(delta_ptr + row_at, mask=used, other=0.0)
        dk, dv = _dkv_step(k, v, q, do, 0, dk, dv, lse, delta, scale_log2, False)

    # The tokens before and after the fully visible run, each walked from its own first one.
    before_lo = see_lo * B
    after_lo = first + full_tiles * tokens
    after_hi = see_hi * B
    before = tl.cdiv(first - before_lo, tokens)
    after = tl.cdiv(after_hi - after_lo, tokens)
    for i in tl.range(0, before + after, num_stages=1):
        start = tl.where(i < before, before_lo + i * tokens, after_lo + (i - before) * tokens)
        stop = tl.where(i < before, first, after_hi)
        token = start.to(tl.int64)
        inside = used & (start + local_token < stop)
        q = tl.load(q_base + token * q_row + q_at, mask=inside[:, None], other=0.0)
        do = tl.load(do_base + token * do_row + do_at, mask=inside[:, None], other=0.0)
        row_at = row_base + token * G + r
        lse = tl.load(lse_ptr + row_at, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + row_at, mask=inside, other=0.0)
        row = tl.where(inside, start * G + r, stop * G)
        _, block, slot, lower, end, real = _row_interval(
            row, stop * G, B, G, ctx_start_ptr, ctx_end_ptr, window
        )
        in_context = (key[:, None] >= lower[None, :]) & (key[:, None] < end[None, :])
        key_block = key // B
        own = block[None, :] == key_block[:, None]
        own = own & (((key - key_block * B)[:, None] <= slot[None, :]) | (causal == 0))
        visible = ((in_context & is_ctx) | (own & (is_ctx == 0))) & real[None, :]
        dk, dv = _dkv_step(k, v, q, do, visible, dk, dv, lse, delta, scale_log2, True)

    at = key.to(tl.int64)[:, None] * (num_kv_heads * D) + kv_head * D + d[None, :]
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=kept[:, None])
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=kept[:, None])
