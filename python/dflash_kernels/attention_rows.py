"""What the plain Triton attention kernels share: rows, their intervals of keys, addresses.

Shapes: N blocks, B slots, T context rows, G = Hq / Hkv query heads per key-value head, D head dim.

One program works for one key-value head. Its query ROWS are the flattened (block, slot, head of
the group) triples, `row = (block * B + slot) * G + g`: the G heads that share a K/V head sit in one
tile, so K and V are read once for all of them, and any B and any G cost no padding. B (a power of
two), G, windows and causality are run time arguments; only head_dim and the tile are compiled in.

The mask is one interval of keys per row (semantics.md): row (i, k) sees context rows
`max(ctx_start[i], ctx_end[i] + k - window + 1) <= j < ctx_end[i]` and, of the blocks' own keys,
those of its block (up to its own slot if causal). A tile of keys that every row of a program sees
takes no mask; only the tiles at the interval's ends and the own keys do. There, keys and rows of a
tile beyond what the program sees are read as its last visible one instead, so that nothing outside
enters the arithmetic, not even as 0 * NaN (dQ of kept dS, hopper_kept.py, multiplies whole tiles of
keys). `window` is 2**30 where there is none. A padding block has ctx_start > ctx_end and sees
nothing.

Softmax runs in base 2: `scale_log2 = scale * log2(e)`, and `lse` is a base-2 logarithm, +inf for a
padding row, which makes every probability that the backward recomputes from it exactly 0.

TMA = 1 (sm_90 only) copies the fully visible tiles by tensor maps, TMA = 0 by pointers; the maps
are then unused integers.
"""

import triton
import triton.language as tl

# Running maximum of a row that has seen nothing: finite, so that differences are never NaN.
LOWEST = tl.constexpr(-3.4028234e38)
# Larger than any loop variable here; LLVM does not know that. See `rows_at`.
NEVER = tl.constexpr(2**30)


@triton.jit
def log2(power):
    """Of a power of two."""
    return (tl.log2(power.to(tl.float32)) + 0.5).to(tl.int32)


@triton.jit
def rows_at(ptr, row, stride, i):
    """Addresses of rows: ptr [1, D] points into row 0, row [R] int32, stride in elements.

    Byte arithmetic, so that an address is one 32 x 32 + 64 bit multiply-add. LLVM finds it only
    while the stride is extended to 64 bits beside the product, hence the dependence on the loop
    variable i, without which the extension leaves the loop and the product takes four instructions.
    """
    size: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    step = tl.where(i < NEVER, stride, 0) * size
    byte = ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    byte = byte + row.to(tl.int64)[:, None] * step.to(tl.int64)
    return byte.to(ptr.dtype, bitcast=True)


@triton.jit
def tile_in_document_order(t, doc_first_ptr, doc_last_ptr, rows_per_block, M: tl.constexpr):
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
def token_and_head(first, r, G):
    """Token and head of rows first + r. r is small: a float product divides it exactly."""
    token = first // G
    x = first - token * G + r
    local = ((x.to(tl.float32) + 0.5) * (1.0 / G.to(tl.float32))).to(tl.int32)
    return token + local, x - local * G


@triton.jit
def intervals(token, num_tokens, B, log_b, ctx_start_ptr, ctx_end_ptr, window, causal):
    """Of each token: its interval of context rows and its interval of own keys, [from, to)."""
    block = token >> log_b
    start = tl.load(ctx_start_ptr + block, mask=token < num_tokens, other=1)
    end = tl.load(ctx_end_ptr + block, mask=token < num_tokens, other=0)
    own_from = block << log_b
    own_to = tl.where(causal != 0, token + 1, own_from + B)
    lower = tl.maximum(start, end + token - own_from - window + 1)
    real = start <= end
    return lower, tl.where(real, end, 0), own_from, tl.where(real, own_to, 0)


@triton.jit
def spans(t, num_blocks, B, G, ctx_start_ptr, ctx_end_ptr, window, M: tl.constexpr):
    """What a tile of M rows sees: own keys, context rows, and the context that every row sees.

    Own keys [0, 1), context [2, 3), seen by all [4, 5), and whether the last block is padding.
    Blocks are sorted, so the first and the last one of the tile say it all, except that the context
    of a tile with padding ends earlier than [3] says; nothing is seen by all its rows.
    """
    first = t * M // (B * G)
    last = tl.minimum(((t + 1) * M - 1) // (B * G), num_blocks - 1)
    start = tl.load(ctx_start_ptr + first)
    end = tl.load(ctx_end_ptr + first)
    last_start = tl.load(ctx_start_ptr + last)
    last_end = tl.load(ctx_end_ptr + last)
    lo = tl.maximum(start, end - window + 1)
    full_lo = tl.maximum(last_start, last_end + B - window)
    padded = last_start > last_end
    return first * B, (last + 1) * B, lo, tl.maximum(last_end, lo), full_lo, end, padded


@triton.jit
def key_tiles(lo, hi, full_lo, full_hi, BN: tl.constexpr):
    """Tiles [lo + i * BN, + BN) of [lo, hi): how many, how many before the first that every row
    sees whole, how many of those."""
    tiles = tl.cdiv(hi - lo, BN)
    before = tl.minimum(tl.maximum(tl.cdiv(full_lo - lo, BN), 0), tiles)
    return tiles, before, tl.maximum((full_hi - lo) // BN - before, 0)


@triton.jit
def inside(x, key, lower, upper, other):
    """x [rows, keys] where key is in the row's interval, else `other`."""
    return tl.where((key[None, :] >= lower[:, None]) & (key[None, :] < upper[:, None]), x, other)


@triton.jit
def load_rows(ptr, row_stride, head_stride, token, head, stored, D: tl.constexpr):
    at = token.to(tl.int64) * row_stride + head * head_stride
    at = at[:, None] + tl.arange(0, D)[None, :]
    return tl.load(ptr + at, mask=stored[:, None], other=0.0)
