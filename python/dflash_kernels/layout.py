"""The schedule of an attention layout in plain Triton.

N blocks, B slots, T context rows; intervals, windows and padding blocks as in attention.py.
"""

import triton
import triton.language as tl


@triton.jit
def attention_layout_kernel(
    ctx_start_ptr,
    ctx_end_ptr,
    ranges_ptr,
    seen_ptr,
    doc_first_ptr,
    doc_last_ptr,
    num_blocks,
    num_ctx,
    B,
    window,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The schedule of a layout, once per batch: see `dflash_ext/ops/layout.py` for the meaning.

    Everything is a count over the sorted blocks (a rank), so there is no search, no sort and no
    host synchronisation. The first programs do one context tile each, the rest GROUP blocks each.
    """
    pid = tl.program_id(0)
    ctx_tiles = tl.cdiv(num_ctx, BN)
    if pid < ctx_tiles:
        n0 = pid * BN
        n1 = tl.minimum(n0 + BN, num_ctx)
        see_lo = 0
        full_lo = 0
        full_hi = 0
        see_hi = 0
        seen = 0
        for c in range(0, num_blocks, CHUNK):
            i = c + tl.arange(0, CHUNK)
            inside = i < num_blocks
            start = tl.load(ctx_start_ptr + i, mask=inside, other=num_ctx + 1)
            end = tl.load(ctx_end_ptr + i, mask=inside, other=num_ctx + 1)
            lower = tl.maximum(start, end - window + 1)  # of slot 0, the block's lowest
            upper = tl.maximum(start, end - window + B)  # of slot B - 1, its highest
            see_lo += tl.sum((end <= n0).to(tl.int32))
            full_lo += tl.sum((end < n1).to(tl.int32))
            full_hi += tl.sum((upper <= n0).to(tl.int32))
            see_hi += tl.sum((lower < n1).to(tl.int32))
            # A block sees the tiles from its lower limit's to that of its last row.
            passed = tl.minimum(tl.cdiv(end, BN), pid) - lower // BN
            seen += tl.sum(tl.where(start <= end, tl.maximum(passed, 0), 0))
        see_hi = tl.maximum(see_hi, see_lo)
        full_lo = tl.minimum(tl.maximum(full_lo, see_lo), see_hi)
        full_hi = tl.maximum(tl.minimum(full_hi, see_hi), full_lo)
        tl.store(ranges_ptr + pid * 4, see_lo)
        tl.store(ranges_ptr + pid * 4 + 1, full_lo)
        tl.store(ranges_ptr + pid * 4 + 2, full_hi)
        tl.store(ranges_ptr + pid * 4 + 3, see_hi)
        tl.store(seen_ptr + pid, seen)
    else:
        b = (pid - ctx_tiles) * GROUP + tl.arange(0, GROUP)
        mine = tl.load(ctx_start_ptr + b, mask=b < num_blocks, other=0)
        below = tl.zeros([GROUP], tl.int32)
        upto = tl.zeros([GROUP], tl.int32)
        for c in range(0, num_blocks, CHUNK):
            i = c + tl.arange(0, CHUNK)
            start = tl.load(ctx_start_ptr + i, mask=i < num_blocks, other=num_ctx + 2)
            below += tl.sum((start[None, :] < mine[:, None]).to(tl.int32), 1)
            upto += tl.sum((start[None, :] <= mine[:, None]).to(tl.int32), 1)
        tl.store(doc_first_ptr + b, below, mask=b < num_blocks)
        tl.store(doc_last_ptr + b, upto - 1, mask=b < num_blocks)
