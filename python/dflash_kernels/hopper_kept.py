"""dQ of DFlash attention from kept dS, on Hopper: five products in the backward instead of seven.

Where memory allows, dK/dV keeps the dS it has in hand, in bf16 as it enters dK, and dQ = dS K is
all that is left for dQ, where it would take S, dP and dS again. It serves plain Triton's dK/dV
(attention_backward.py) as well as Hopper's.

An IMAGE is dS of 64 rows and 64 keys, 8 KB. Rows are grouped as in hopper.py: a GROUP is 64/G
tokens of G heads, here called `heads` because plain Triton takes only as many as are a power of
two. Images of a head group come in the order of their context tile, then of their row group; one
tile's groups are those whose blocks see any of it. Behind them follow the own keys, one image a
group. `Schedule.seen` (dflash_ext/ops/layout.py) says where a tile's images begin: two more than
its blocks fill are set aside for each, because a group holds several small blocks.

Inside, an image has the order in which the threads of dK/dV hold it (`keep`), sixteen bytes each:
four 8 x 8 matrices, which `movmatrix` transposes on the way into the product. So nothing passes
through shared memory where dS is made, and nothing is copied element by element where it is used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dflash_kernels.attention_kept import IMAGE, first_image
from dflash_kernels.hopper import (
    CONSUMERS,
    HALF,
    TILE,
    Blocks,
    half_of_slot,
    new_items,
    new_ring,
    schedule_row_tiles,
    store_half,
)


@gluon.jit
def keep(ds, images_ptr, image, kept):
    """Store dS^T [64 keys, 64 rows], bf16 in the layout of its product, as an image.

    The thread that holds keys 16 w + 8 i + l and rows 16 v + 8 j + 2 m + (0, 1) for all i and j
    writes them side by side, at ((4 w + v) 32 + 4 l + m) 8 + 4 j + 2 i.
    """
    x = ds.reshape([4, 2, 8, 4, 2, 4, 2]).permute((0, 3, 2, 5, 4, 1, 6)).reshape([512, 8])
    LAYOUT: gl.constexpr = x.type.layout
    at = gl.arange(0, 512, layout=gl.SliceLayout(1, LAYOUT))[:, None] * 8
    at += gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(images_ptr + image.to(gl.int64) * IMAGE + at, x, mask=kept)


@gluon.jit
def _rows_of_image(image, OPERAND: gl.constexpr):
    """dS [64 rows, 64 keys] as a product's first operand, from an image in shared memory."""
    # A warp reads the rows that its part of the product needs: two of the eight 8 x 8 matrices'
    # rows, so that transposing them moves nothing between warps.
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        [image.load(STORED)],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )
    x = x.reshape([4, 4, 8, 4, 2, 2, 2]).permute((1, 4, 2, 0, 5, 3, 6)).reshape([HALF, HALF])
    return gl.convert_layout(x, OPERAND)


@gluon.jit
def _load_step(
    keys_map, images_map, ring, images_sm, position, key, kv_head, image_0, image_1, D: gl.constexpr
):
    """64 keys from `key` on, and the images of both halves; -1: none, zeros arrive instead."""
    ring.wait_empty(position)
    full = ring.full_barrier(position)
    mbarrier.expect(full, HALF * D * 2 + CONSUMERS * IMAGE * 2)
    tma.async_copy_global_to_shared(keys_map, [key, kv_head, 0], full, ring.slot(position))
    slot = position % ring.stages * CONSUMERS
    # Rows before the first are out of bounds, which TMA fills with zeros and does not fetch.
    tma.async_copy_global_to_shared(images_map, [image_0 * HALF, 0, 0], full, images_sm.index(slot))
    tma.async_copy_global_to_shared(
        images_map, [image_1 * HALF, 0, 0], full, images_sm.index(slot + 1)
    )


@gluon.jit
def _own_tile(blocks, t, WG: gl.constexpr):
    """The 64 own keys that a half's rows see some of."""
    return blocks.first_token(t, WG) // HALF


@gluon.jit
def _tile_entry(ranges_ptr, seen_ptr, n, log_rows):
    """Of context tile n: its row groups [lo, hi), none if no block sees it; image of group 0."""
    see_lo = gl.load(ranges_ptr + n * 4)
    see_hi = gl.load(ranges_ptr + n * 4 + 3)
    image = first_image(n, gl.load(seen_ptr + n), see_lo, log_rows)
    lo = (see_lo << log_rows) >> 6
    hi = gl.where(see_lo < see_hi, ((see_hi << log_rows) + HALF - 1) >> 6, lo)
    return lo, hi, image


@gluon.jit
def _load_for_dq(
    k_own_map,
    k_ctx_map,
    images_map,
    items,
    ring,
    images_sm,
    blocks,
    ranges_ptr,
    seen_ptr,
    num_ctx,
    num_head_groups,
    groups_per_kv_head,
    head_images,
    ctx_images,
    D: gl.constexpr,
):
    log_rows = blocks.log_b + blocks.log_g
    position = 0
    r = 0
    item = items.take(0)
    while item >= 0:
        t = items.read(r, 1)
        # Padding blocks begin behind the last tile.
        first = gl.minimum(items.read(r, 2) // HALF, (num_ctx - 1) // HALF)
        tiles = items.read(r, 3)
        items.release(r)
        head_group = item % num_head_groups
        kv_head = head_group // groups_per_kv_head
        base = head_group * head_images
        group = 2 * t
        own_0 = _own_tile(blocks, t, 0)
        own_1 = _own_tile(blocks, t, 1)
        image_0 = base + ctx_images + group
        image_1 = gl.where((group + 1) * HALF < blocks.num_rows(), image_0 + 1, -1)
        together = own_0 == own_1
        _load_step(
            k_own_map,
            images_map,
            ring,
            images_sm,
            position,
            own_0 * HALF,
            kv_head,
            image_0,
            gl.where(together, image_1, -1),
            D,
        )
        position += 1
        if not together:
            _load_step(
                k_own_map,
                images_map,
                ring,
                images_sm,
                position,
                own_1 * HALF,
                kv_head,
                -1,
                image_1,
                D,
            )
            position += 1
        lo, hi, image = _tile_entry(ranges_ptr, seen_ptr, first, log_rows)
        for i in range(tiles):
            here_lo = lo
            here_hi = hi
            here = base + image + group
            # Read one tile ahead: a loader must not wait.
            after = first + gl.minimum(i + 1, tiles - 1)
            lo, hi, image = _tile_entry(ranges_ptr, seen_ptr, after, log_rows)
            _load_step(
                k_ctx_map,
                images_map,
                ring,
                images_sm,
                position,
                (first + i) * HALF,
                kv_head,
                gl.where((group >= here_lo) & (group < here_hi), here, -1),
                gl.where((group + 1 >= here_lo) & (group + 1 < here_hi), here + 1, -1),
                D,
            )
            position += 1
        r += 1
        item = items.take(r)


@gluon.jit
def _sum_products(shared, WG: gl.constexpr, D: gl.constexpr):
    (dq_map, items, ring, images_sm, dq_slot, blocks, num_head_groups, scale) = shared
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    position = 0
    r = 0
    item = items.take(0)
    while item >= 0:
        t = items.read(r, 1)
        steps = items.read(r, 3) + 1
        items.release(r)
        if _own_tile(blocks, t, 0) != _own_tile(blocks, t, 1):
            steps += 1
        acc = gl.zeros([HALF, D], gl.float32, OUT)
        ring.wait_full(position)
        slot = position % ring.stages
        ds = _rows_of_image(images_sm.index(slot * CONSUMERS + WG).reshape([HALF, HALF]), OPERAND)
        for _ in range(steps - 1):
            keys = ring.slot(position).reshape([HALF, D])
            acc_token = warpgroup_mma(ds, keys, acc, is_async=True)
            ring.wait_full(position + 1)
            slot = (position + 1) % ring.stages
            image = images_sm.index(slot * CONSUMERS + WG).reshape([HALF, HALF])
            after = _rows_of_image(image, OPERAND)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            ring.release(position)
            ds = after
            position += 1
        acc_token = warpgroup_mma(ds, ring.slot(position).reshape([HALF, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
        ring.release(position)
        position += 1

        tma.store_wait(0)  # the previous item's dQ has been read out of the staging buffer
        gl.thread_barrier()
        half_of_slot(dq_slot, WG, D).store((acc * scale).to(gl.bfloat16))
        dq_at = [blocks.first_token(t, WG), (item % num_head_groups) << blocks.log_g, 0]
        store_half(dq_map, dq_slot, WG, dq_at, D)
        r += 1
        item = items.take(r)
    tma.store_wait(0)


@gluon.jit
def attention_bwd_dq_kept_kernel(
    k_own_map,
    k_ctx_map,
    images_map,
    dq_map,
    counter_ptr,
    ctx_start_ptr,
    ctx_end_ptr,
    doc_first_ptr,
    doc_last_ptr,
    ranges_ptr,
    seen_ptr,
    num_items,
    num_blocks,
    num_ctx,
    num_head_groups,
    groups_per_kv_head,
    head_images,
    ctx_images,
    window,
    causal,
    log_b,
    log_h,
    scale,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    k_sm = gl.allocate_shared_memory(gl.bfloat16, [STAGES, HALF, 1, D], k_ctx_map.layout)
    images_sm = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * CONSUMERS, HALF, 1, HALF], images_map.layout
    )
    dq_sm = gl.allocate_shared_memory(gl.bfloat16, [1, TILE, 1, D], k_ctx_map.layout)
    items = new_items(False)
    ring = new_ring(k_sm, STAGES)  # images share its barriers
    dq_slot = dq_sm.index(0)
    # Heads of a group instead of all G of a key-value head.
    blocks = Blocks(ctx_start_ptr, ctx_end_ptr, num_blocks, window, causal, log_b, log_h)
    shared = (dq_map, items, ring, images_sm, dq_slot, blocks, num_head_groups, scale)
    gl.warp_specialize(
        [
            (_sum_products, (shared, 0, D)),
            (_sum_products, (shared, 1, D)),
            (
                _load_for_dq,
                (
                    k_own_map,
                    k_ctx_map,
                    images_map,
                    items,
                    ring,
                    images_sm,
                    blocks,
                    ranges_ptr,
                    seen_ptr,
                    num_ctx,
                    num_head_groups,
                    groups_per_kv_head,
                    head_images,
                    ctx_images,
                    D,
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
                    num_head_groups,
                    HALF,
                    True,
                ),
            ),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
