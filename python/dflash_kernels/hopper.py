"""What the Hopper kernels share: rings of shared memory, work items, and who sees which tile.

The kernels are written in Gluon, Triton's explicit dialect. A work item is one TILE of 128 query
rows (forward, dQ) or 128 keys (dK/dV) of one key-value head. Programs are persistent, with four
partitions each: two consumer warpgroups compute with wgmma, 64 rows or keys each; a loader warp
feeds shared memory with TMA; a scheduler warp draws the next item from a counter and finds what it
covers. So an item's loads overlap the arithmetic of the one before, and no program idles at the
end. The scheduler is apart because finding an item takes four dependent trips to L2, longer than
the loader may be away from its rings.

Rows are flattened (block, slot, head of the group) triples as in attention_rows.py. Here B and G
are powers of two with B*G <= 128, so a tile holds whole blocks and the divisions are shifts; both
stay run time arguments. A tile of 64 rows is 64/G tokens of G heads: the tensor map of such a tile
is encoded at launch with the box (D, G, 64/G), while the code is compiled for the nominal
(D, 4, 16). The two differ only in the map: 64 rows of D elements land in shared memory in the same
places.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.core import _aggregate as aggregate

TILE = gl.constexpr(128)  # rows or keys of a work item
HALF = gl.constexpr(64)  # of one consumer warpgroup
CONSUMERS = gl.constexpr(2)
LOG_TILE = gl.constexpr(7)
# Cells of the message that comes with a work item; the first is the item, or -1: no more.
CELLS = gl.constexpr(8)


@aggregate
class Ring:
    """Slots that the producer fills and the consumers empty, in order: position i is slot i % n.

    The parity a side waits for follows from the position alone, so nobody keeps state.
    """

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, full, empty, stages):
        self.slots = slots
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def slot(self, position):
        return self.slots.index(position % self.stages)

    @gluon.jit
    def full_barrier(self, position):
        return self.full.index(position % self.stages)

    @gluon.jit
    def wait_full(self, position):
        mbarrier.wait(self.full.index(position % self.stages), (position // self.stages) & 1)

    @gluon.jit
    def wait_empty(self, position):
        mbarrier.wait(self.empty.index(position % self.stages), ((position // self.stages) & 1) ^ 1)

    @gluon.jit
    def release(self, position):
        """One consumer is done with the slot; the barrier waits for all of its warps."""
        gl.thread_barrier()
        mbarrier.arrive(self.empty.index(position % self.stages), count=1)

    @gluon.jit
    def skip(self, position):
        """A consumer has no use for a slot: it must still see it full before it lets it go."""
        self.wait_full(position)
        self.release(position)


@gluon.jit
def new_barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def new_ring(slots, STAGES: gl.constexpr):
    return Ring(slots, new_barriers(STAGES, 1), new_barriers(STAGES, CONSUMERS), STAGES)


@aggregate
class Items:
    """The work items of a program as messages from the scheduler, two deep, and the way back."""

    cells: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    wanted: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, cells, full, empty, wanted):
        self.cells = cells
        self.full = full
        self.empty = empty
        self.wanted = wanted

    @gluon.jit
    def write(self, r, cell: gl.constexpr, value):
        """Scheduler."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        at = self.cells.index((r & 1) * CELLS + cell)
        at.store(gl.zeros([1], gl.int32, layout) + value)

    @gluon.jit
    def read(self, r, cell: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.sum(self.cells.index((r & 1) * CELLS + cell).load(layout), 0)

    @gluon.jit
    def wait_empty(self, r):
        mbarrier.wait(self.empty.index(r & 1), ((r >> 1) & 1) ^ 1)

    @gluon.jit
    def send(self, r):
        gl.thread_barrier()
        mbarrier.arrive(self.full.index(r & 1), count=1)

    @gluon.jit
    def end(self, r):
        self.wait_empty(r)
        self.write(r, 0, -1)
        self.send(r)

    @gluon.jit
    def take(self, r):
        """Consumers and loader: wait for message r; returns the item, or -1: no more."""
        mbarrier.wait(self.full.index(r & 1), (r >> 1) & 1)
        return self.read(r, 0)

    @gluon.jit
    def release(self, r):
        """Message r has been read."""
        gl.thread_barrier()
        mbarrier.arrive(self.empty.index(r & 1), count=1)

    @gluon.jit
    def want_next(self):
        """Loader, once an item, where the scheduler waits for it (items that are WANTED)."""
        mbarrier.arrive(self.wanted.index(0), count=1)

    @gluon.jit
    def wait_wanted(self, r):
        """Scheduler: until the loader is near the end of item r."""
        mbarrier.wait(self.wanted.index(0), r & 1)


@gluon.jit
def new_items(WANTED: gl.constexpr):
    """WANTED: does the loader ask for items (`want_next`)?

    A barrier that nobody uses must not be made: Triton takes its life for over after its
    initialisation and gives its memory away, which PTX leaves undefined without an `inval`.
    """
    cells = gl.allocate_shared_memory(gl.int32, [2 * CELLS, 1], mbarrier.MBarrierLayout())
    full = new_barriers(2, 1)
    empty = new_barriers(2, CONSUMERS + 1)
    wanted = cells  # no barrier: asking does not compile
    if WANTED:
        wanted = new_barriers(1, 1)
    return Items(cells, full, empty, wanted)


@gluon.jit
def scores(a, b, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Start a b^T, both in shared memory with D as their second dimension."""
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def draw_item(counter_ptr):
    """The next item after the first `num_programs`, which the programs have by their number."""
    return gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)


@aggregate
class Blocks:
    """The blocks of the problem and their mask, as in attention_rows.py."""

    ctx_start_ptr: gl.tensor
    ctx_end_ptr: gl.tensor
    num_blocks: gl.tensor
    window: gl.tensor
    causal: gl.tensor
    log_b: gl.tensor
    log_g: gl.tensor

    @gluon.constexpr_function
    def __init__(self, ctx_start_ptr, ctx_end_ptr, num_blocks, window, causal, log_b, log_g):
        self.ctx_start_ptr = ctx_start_ptr
        self.ctx_end_ptr = ctx_end_ptr
        self.num_blocks = num_blocks
        self.window = window
        self.causal = causal
        self.log_b = log_b
        self.log_g = log_g

    @gluon.jit
    def num_rows(self):
        return self.num_blocks << (self.log_b + self.log_g)

    @gluon.jit
    def first_token(self, t, WG: gl.constexpr):
        """Of a consumer's half of row tile t."""
        return (t * TILE + WG * HALF) >> self.log_g

    @gluon.jit
    def first_own_key(self, t, WG: gl.constexpr):
        """A block of 128 rows is split over both consumers: its keys are the own keys of both."""
        if self.log_b + self.log_g == LOG_TILE:
            first = t << self.log_b
        else:
            first = self.first_token(t, WG)
        return first

    @gluon.jit
    def tile_in_document_order(self, i, doc_first_ptr, doc_last_ptr):
        """As in attention_rows.py: a document's tiles in reverse, its longest first."""
        log_tile = LOG_TILE - self.log_b - self.log_g
        lead = i << log_tile
        first = gl.load(doc_first_ptr + lead)
        last = gl.load(doc_last_ptr + lead)
        return ((first + (1 << log_tile) - 1) >> log_tile) + (last >> log_tile) - i

    @gluon.jit
    def key_tiles(self, t, BN: gl.constexpr, ALIGNED: gl.constexpr = False):
        """The tiles of BN keys that row tile t walks: lo, how many, and which all of its rows see;
        and the reach of each consumer, the keys from lo to the last that any of its rows sees.

        Tile i covers context rows lo + i * BN and on; tiles [before, before + full) are visible to
        every row. Blocks are sorted, so the first and the last one decide. There is always a tile:
        rows that see no context walk one that is hidden from all of them, which spares the kernels
        a second path. ALIGNED: lo is a multiple of BN.
        """
        log_tile = LOG_TILE - self.log_b - self.log_g
        first = t << log_tile
        last = gl.minimum(first + (1 << log_tile), self.num_blocks) - 1
        first_start = gl.load(self.ctx_start_ptr + first)
        first_end = gl.load(self.ctx_end_ptr + first)
        last_start = gl.load(self.ctx_start_ptr + last)
        last_end = gl.load(self.ctx_end_ptr + last)
        lo = gl.maximum(first_start, first_end - self.window + 1)
        full_lo = gl.maximum(last_start, last_end - self.window + (1 << self.log_b))
        while (last_start > last_end) & (last > first):  # padding blocks come last and see nothing
            last -= 1
            last_start = gl.load(self.ctx_start_ptr + last)
            last_end = gl.load(self.ctx_end_ptr + last)
        if ALIGNED:
            lo = lo // BN * BN
        tiles = gl.maximum((last_end - lo + BN - 1) // BN, 1)
        before = gl.minimum((gl.maximum(full_lo - lo, 0) + BN - 1) // BN, tiles)
        full = gl.maximum(gl.maximum(first_end - lo, 0) // BN - before, 0)
        full = gl.minimum(full, tiles - before)
        # A block of 128 rows is both consumers'.
        middle = gl.minimum(first + (((1 << log_tile) - 1) >> 1), last)
        # Never beyond the tiles, even if somebody's intervals are not sorted: it would hang.
        middle_end = gl.minimum(gl.load(self.ctx_end_ptr + middle), last_end)
        return lo, tiles, before, full, middle_end - lo, last_end - lo

    @gluon.jit
    def rows(self, row):
        """Token, block and context interval [lower, end) of each row; lower > end is padding."""
        inside = row < self.num_rows()
        token = row >> self.log_g
        block = token >> self.log_b
        slot = token - (block << self.log_b)
        start = gl.load(self.ctx_start_ptr + block, mask=inside, other=1)
        end = gl.load(self.ctx_end_ptr + block, mask=inside, other=0)
        lower = gl.minimum(gl.maximum(start, end + slot - self.window + 1), end)
        return token, block, gl.where(start <= end, lower, end + 1), end

    @gluon.jit
    def own_visible(self, key, token, block):
        """[rows, keys]: the key token is in the row's own block (and not in its future)."""
        same = (key >> self.log_b)[None, :] == block[:, None]
        return same & ((key[None, :] <= token[:, None]) | (self.causal == 0))


@gluon.jit
def schedule_row_tiles(
    items,
    blocks,
    counter_ptr,
    doc_first_ptr,
    doc_last_ptr,
    num_items,
    num_heads,
    BN: gl.constexpr,
    ALIGNED: gl.constexpr = False,
):
    """Scheduler of the kernels whose items are row tiles: as far ahead as there are messages.

    A document's short tiles come last, so a program that sits on two of them at the end keeps
    nobody waiting; and items of one or two key tiles are over before a late draw is answered.
    """
    r = 0
    item = gl.program_id(0)
    while item < num_items:
        t = blocks.tile_in_document_order(item // num_heads, doc_first_ptr, doc_last_ptr)
        lo, tiles, before, full, reach_0, reach_1 = blocks.key_tiles(t, BN, ALIGNED)
        items.wait_empty(r)
        items.write(r, 0, item)
        items.write(r, 1, t)
        items.write(r, 2, lo)
        items.write(r, 3, tiles)
        items.write(r, 4, before)
        items.write(r, 5, full)
        items.write(r, 6, reach_0)
        items.write(r, 7, reach_1)
        items.send(r)
        item = draw_item(counter_ptr)
        r += 1
    items.end(r)


@gluon.jit
def load_keys(keys_map, ring, position, first, kv_head, BN: gl.constexpr, D: gl.constexpr):
    """Loader: a tile of BN keys (or values) into the ring, as soon as its slot is free."""
    ring.wait_empty(position)
    full = ring.full_barrier(position)
    mbarrier.expect(full, BN * D * 2)
    tma.async_copy_global_to_shared(keys_map, [first, kv_head, 0], full, ring.slot(position))


@gluon.constexpr_function
def own_slots(OWN, BN):
    """Ring slots of BN rows that the own keys and values of both halves take."""
    return 1 if 2 * CONSUMERS * OWN <= BN else 2


@gluon.jit
def own_rows(
    ring,
    base,
    VALUES: gl.constexpr,
    WG: gl.constexpr,
    OWN: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
):
    """Where `load_own` puts the own keys (or values) of a half: [OWN, 1, D]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    if own_slots(OWN, BN) == 1:
        slot = ring.slot(base)._reinterpret(gl.bfloat16, [2 * CONSUMERS, OWN, 1, D], LAYOUT)
        rows = slot.index(CONSUMERS * VALUES + WG)
    else:
        slot = ring.slot(base + VALUES)
        rows = slot._reinterpret(gl.bfloat16, [CONSUMERS, OWN, 1, D], LAYOUT).index(WG)
    return rows


@gluon.jit
def load_own(
    k_own_map,
    v_own_map,
    ring,
    base,
    blocks,
    t,
    kv_head,
    OWN: gl.constexpr,
    BN: gl.constexpr,
    D: gl.constexpr,
):
    """Loader: own keys and values of both halves of row tile t: one slot, or one for each."""
    SHARED: gl.constexpr = own_slots(OWN, BN) == 1
    for values in gl.static_range(2):
        at = base + (0 if SHARED else values)
        if values == 0 or not SHARED:
            ring.wait_empty(at)
            mbarrier.expect(ring.full_barrier(at), (2 if SHARED else 1) * CONSUMERS * OWN * D * 2)
        own_map = v_own_map if values else k_own_map
        for g in gl.static_range(CONSUMERS):
            own_from = [blocks.first_own_key(t, g), kv_head, 0]
            rows = own_rows(ring, base, values, g, OWN, BN, D)
            tma.async_copy_global_to_shared(own_map, own_from, ring.full_barrier(at), rows)


@gluon.jit
def load_rows(rows_map, ring, position, blocks, t, kv_head, D: gl.constexpr):
    """Loader: row tile t (of Q, dO or O) into a slot of 128 rows, one half after the other."""
    ring.wait_empty(position)
    full = ring.full_barrier(position)
    mbarrier.expect(full, TILE * D * 2)
    slot = ring.slot(position)._reinterpret(gl.bfloat16, [CONSUMERS, 16, 4, D], rows_map.layout)
    for g in gl.static_range(CONSUMERS):
        rows_from = [blocks.first_token(t, g), kv_head << blocks.log_g, 0]
        tma.async_copy_global_to_shared(rows_map, rows_from, full, slot.index(g))


@gluon.jit
def half_of_slot(slot, WG: gl.constexpr, D: gl.constexpr):
    """A consumer's 64 rows of a slot of 128, as a matrix."""
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    return slot._reinterpret(gl.bfloat16, [CONSUMERS, HALF, D], FLAT).index(WG)


@gluon.jit
def store_half(rows_map, slot, WG: gl.constexpr, at, D: gl.constexpr):
    """Store a consumer's 64 rows of a slot by TMA, after they were written by ordinary stores."""
    ROWS: gl.constexpr = rows_map.block_shape[0]
    HEADS: gl.constexpr = rows_map.block_shape[1]
    SHAPE: gl.constexpr = [CONSUMERS, ROWS, HEADS, D]
    half = slot._reinterpret(gl.bfloat16, SHAPE, rows_map.layout).index(WG)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(rows_map, at, half)
