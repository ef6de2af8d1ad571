"""DFlash attention forward in plain Triton: see attention_rows.py for rows, masks and bases."""

import triton
import triton.language as tl

from dflash_kernels.attention_rows import (
    LOWEST,
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
def _softmax(s, acc, m, total, scale_log2):
    """Online softmax: probabilities of the scores s, and acc, maximum and sum rescaled for them."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return p, acc * alpha[:, None], m_new, total * alpha + tl.sum(p, 1)


@triton.jit
def _step(
    q_a,
    q_b,
    k,
    v,
    key,
    lower_a,
    upper_a,
    lower_b,
    upper_b,
    acc_a,
    acc_b,
    m_a,
    m_b,
    total_a,
    total_b,
    scale_log2,
    MASKED: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Update with one tile of keys; half B's softmax runs beside half A's product with v."""
    s_a = tl.dot(q_a, tl.trans(k))
    if PAIR:
        s_b = tl.dot(q_b, tl.trans(k))
    if MASKED:
        s_a = inside(s_a, key, lower_a, upper_a, float("-inf"))
        if PAIR:
            s_b = inside(s_b, key, lower_b, upper_b, float("-inf"))
    p, acc_a, m_a, total_a = _softmax(s_a, acc_a, m_a, total_a, scale_log2)
    acc_a = tl.dot(p.to(v.dtype), v, acc_a)
    if PAIR:
        p, acc_b, m_b, total_b = _softmax(s_b, acc_b, m_b, total_b, scale_log2)
        acc_b = tl.dot(p.to(v.dtype), v, acc_b)
    return acc_a, acc_b, m_a, m_b, total_a, total_b


@triton.jit
def _store_output(acc, m, total, out_ptr, lse_ptr, row, num_rows, token, head, D: tl.constexpr):
    """token: offset of the row's token in out; out_ptr, lse_ptr: the group's first head and row."""
    stored = row < num_rows
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (token + head * D)[:, None] + tl.arange(0, D)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=stored[:, None])
    lse = tl.where(total == 0.0, float("inf"), m + tl.log2(total))
    tl.store(lse_ptr + row, lse, mask=stored)


@triton.jit
def attention_fwd_kernel(
    q_ptr,
    k_ctx_ptr,
    v_ctx_ptr,
    k_blk_ptr,
    v_blk_ptr,
    k_ctx_map,
    v_ctx_map,
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
    EDGE_STAGES: tl.constexpr,
    PAIR: tl.constexpr,
    TMA: tl.constexpr,
):
    """PAIR: two halves of M / 2 rows per program, so that one's softmax has the other's product to
    hide behind, because plain Triton waits for every wgmma whose result the same iteration reads.
    """
    H: tl.constexpr = M // 2 if PAIR else M
    pid = tl.program_id(0)
    kv_head = pid % num_kv_heads
    t = tile_in_document_order(pid // num_kv_heads, doc_first_ptr, doc_last_ptr, B * G, M)
    num_tokens = num_blocks * B
    num_rows = num_tokens * G
    d = tl.arange(0, D)[None, :]
    own_lo, own_hi, lo, hi, full_lo, full_hi, padded = spans(
        t, num_blocks, B, G, ctx_start_ptr, ctx_end_ptr, window, M
    )
    log_b = log2(B)
    h = tl.arange(0, H)
    row_a = t * M + h
    token_a, head_a = token_and_head(t * M, h, G)
    q_ptr += kv_head * G * q_head
    q_a = load_rows(q_ptr, q_row, q_head, token_a, head_a, row_a < num_rows, D)
    lower_a, upper_a, own_from_a, own_to_a = intervals(
        token_a, num_tokens, B, log_b, ctx_start_ptr, ctx_end_ptr, window, causal
    )
    m_a = tl.full([H], LOWEST, tl.float32)
    total_a = tl.zeros([H], tl.float32)
    acc_a = tl.zeros([H, D], tl.float32)
    if PAIR:
        row_b = row_a + H
        token_b, head_b = token_and_head(t * M + H, h, G)
        q_b = load_rows(q_ptr, q_row, q_head, token_b, head_b, row_b < num_rows, D)
        lower_b, upper_b, own_from_b, own_to_b = intervals(
            token_b, num_tokens, B, log_b, ctx_start_ptr, ctx_end_ptr, window, causal
        )
        m_b, total_b, acc_b = m_a, total_a, acc_a
    else:  # placeholders that nothing reads
        q_b, m_b, total_b, acc_b = 0, 0.0, 0.0, 0.0
        lower_b, upper_b, own_from_b, own_to_b = 0, 0, 0, 0

    k_at = (k_blk_ptr + kv_head * k_blk_head) + d
    v_at = (v_blk_ptr + kv_head * v_blk_head) + d
    r = tl.arange(0, OWN)
    for n in tl.range(own_lo, own_hi, OWN, num_stages=1):
        key = tl.minimum(n + r, own_hi - 1)
        k = tl.load(rows_at(k_at, key, k_blk_row, n))
        v = tl.load(rows_at(v_at, key, v_blk_row, n))
        acc_a, acc_b, m_a, m_b, total_a, total_b = _step(
            q_a, q_b, k, v, r, own_from_a - n, own_to_a - n, own_from_b - n, own_to_b - n,
            acc_a, acc_b, m_a, m_b, total_a, total_b, scale_log2, True, PAIR,
        )  # fmt: skip

    if padded:
        hi = tl.maximum(tl.max(upper_a), lo)
        if PAIR:
            hi = tl.maximum(tl.max(upper_b), hi)
    tiles, before, full = key_tiles(lo, hi, full_lo, full_hi, BN)
    k_at = (k_ctx_ptr + kv_head * k_ctx_head) + d
    v_at = (v_ctx_ptr + kv_head * v_ctx_head) + d
    r = tl.arange(0, BN)
    for i in tl.range(0, tiles - full, num_stages=EDGE_STAGES):
        n = lo + tl.where(i < before, i, i + full) * BN
        key = tl.minimum(n + r, hi - 1)
        k = tl.load(rows_at(k_at, key, k_ctx_row, i))
        v = tl.load(rows_at(v_at, key, v_ctx_row, i))
        acc_a, acc_b, m_a, m_b, total_a, total_b = _step(
            q_a, q_b, k, v, r, lower_a - n, upper_a - n, lower_b - n, upper_b - n,
            acc_a, acc_b, m_a, m_b, total_a, total_b, scale_log2, True, PAIR,
        )  # fmt: skip
    lo += before * BN
    for n in tl.range(lo, lo + full * BN, BN, num_stages=STAGES):
        if TMA:
            k = k_ctx_map.load([n, kv_head, 0]).reshape([BN, D])
            v = v_ctx_map.load([n, kv_head, 0]).reshape([BN, D])
        else:
            k = tl.load(rows_at(k_at, n + r, k_ctx_row, n))
            v = tl.load(rows_at(v_at, n + r, v_ctx_row, n))
        acc_a, acc_b, m_a, m_b, total_a, total_b = _step(
            q_a, q_b, k, v, r, 0, 0, 0, 0,
            acc_a, acc_b, m_a, m_b, total_a, total_b, scale_log2, False, PAIR,
        )  # fmt: skip

    out_ptr += kv_head * G * D
    lse_ptr += kv_head.to(tl.int64) * num_rows
    out_row = num_kv_heads * G * D
    at = token_a.to(tl.int64) * out_row
    _store_output(acc_a, m_a, total_a, out_ptr, lse_ptr, row_a, num_rows, at, head_a, D)
    if PAIR:
        at = token_b.to(tl.int64) * out_row
        _store_output(acc_b, m_b, total_b, out_ptr, lse_ptr, row_b, num_rows, at, head_b, D)
