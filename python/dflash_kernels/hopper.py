"""What the Hopper kernels share: rings of shared memory, work items, and who sees which tile.

The kernels are written in Gluon, Triton's explicit dialect: one producer warpgroup feeds shared
memory with TMA, two consumer warpgroups compute with wgmma. A work item is one TILE of 128 query
rows (forward, dQ) or 128 keys (dK/dV) of one key-value head; each consumer has 64 of them. Programs
are persistent and draw items from a counter, so the next item's loads overlap this one's arithmetic
and no program idles at the end.

Rows are flattened (block, slot, head of the group) triples as in attention.py. Here B and G are
powers of two with B*G <= 128, so a tile holds whole blocks and the divisions are shifts; both stay
run time arguments. A tile of 64 rows is 64/G tokens of G heads: the tensor map of such a tile is
encoded at launch with the box (D, G, 64/G), while the code is compiled for the nominal (D, 4, 16).
The two differ only in the map: 64 rows of D elements land in shared memory in the same places.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

TILE = gl.constexpr(128)  # rows or keys of a work item
HALF = gl.constexpr(64)  # of one consumer warpgroup
CONSUMERS = gl.constexpr(2)
LOG_TILE = gl.constexpr(7)
# Cells of the message that comes with a work item; the first is the item, or -1: no more.
CELLS = gl.constexpr(4)


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
    """The work items of a program: a two-deep ring of messages, full when an item's data is."""

    cells: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, cells, full, empty):
        self.cells = cells
        self.full = full
        self.empty = empty

    @gluon.jit
    def write(self, r, cell: gl.constexpr, value):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        at = self.cells.index((r & 1) * CELLS + cell)
        at.store(gl.zeros([1], gl.int32, layout) + value)

    @gluon.jit
    def read(self, r, cell: gl.constexpr):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        return gl.sum(self.cells.index((r & 1) * CELLS + cell).load(layout), 0)

    @gluon.jit
    def wait_empty(self, r):
        mbarrier.wait(self.empty.index(r & 1), ((r >> 1) & 1) ^ 1)

    @gluon.jit
    def announce(self, r, bytes: gl.constexpr):
        """The message is written; the item is full when `bytes` have arrived by TMA."""
        gl.thread_barrier()
        mbarrier.expect(self.full.index(r & 1), bytes)

    @gluon.jit
    def announce_alone(self, r):
        """The message is written and has no data with it."""
        gl.thread_barrier()
        mbarrier.arrive(self.full.index(r & 1), count=1)

    @gluon.jit
    def end(self, r):
        self.wait_empty(r)
        self.write(r, 0, -1)
        self.announce_alone(r)

    @gluon.jit
    def take(self, r):
        """Wait for item r; returns its number, or -1."""
        mbarrier.wait(self.full.index(r & 1), (r >> 1) & 1)
        return self.read(r, 0)

    @gluon.jit
    def release(self, r):
        gl.thread_barrier()
        mbarrier.arrive(self.empty.index(r & 1), count=1)

    @gluon.jit
    def release_previous(self, r):
        """The buffers of item r - 1 have been read out, also by its stores: they may be refilled.

        Called some time into item r, when those stores have long been done.
        """
        if r > 0:
            tma.store_wait(0)
            self.release(r - 1)


@gluon.jit
def new_items():
    cells = gl.allocate_shared_memory(gl.int32, [2 * CELLS, 1], mbarrier.MBarrierLayout())
    return Items(cells, new_barriers(2, 1), new_barriers(2, CONSUMERS))


@gluon.jit
def draw_item(counter_ptr):
    """The next item after the first `num_programs`, which the programs have by their number.

    To be drawn late, before the last load of the present item: a program that draws early commits
    itself to work that another one would be free for sooner.
    """
    return gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)


@aggregate
class Blocks:
    """The blocks of the problem and their mask, as in attention.py; 2**log_tile blocks a tile."""

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
        """As in attention.py: a document's tiles in reverse, its longest first."""
        log_tile = LOG_TILE - self.log_b - self.log_g
        lead = i << log_tile
        first = gl.load(doc_first_ptr + lead)
        last = gl.load(doc_last_ptr + lead)
        return ((first + (1 << log_tile) - 1) >> log_tile) + (last >> log_tile) - i

    @gluon.jit
    def tile_interval(self, t):
        """Context rows [lo, hi) that some row of tile t sees. Blocks are sorted: its ends decide.

        Never empty: a tile that sees no context walks one key tile that is hidden from all of its
        rows, which spares every kernel a second path.
        """
        log_tile = LOG_TILE - self.log_b - self.log_g
        first = t << log_tile
        last = gl.minimum(first + (1 << log_tile), self.num_blocks) - 1
        end = gl.load(self.ctx_end_ptr + last)
        while (gl.load(self.ctx_start_ptr + last) > end) & (last > first):  # padding comes last
            last -= 1
            end = gl.load(self.ctx_end_ptr + last)
        lo = gl.load(self.ctx_end_ptr + first) - self.window + 1
        lo = gl.maximum(gl.load(self.ctx_start_ptr + first), lo)
        return lo, gl.maximum(end, lo + 1)

    @gluon.jit
    def full_interval(self, t, WG: gl.constexpr):
        """Context rows [lo, hi) that EVERY row of a consumer's half of tile t sees."""
        row = t * TILE + WG * HALF
        first = row >> (self.log_b + self.log_g)
        last = (row + HALF - 1) >> (self.log_b + self.log_g)
        first = gl.minimum(first, self.num_blocks - 1)
        last = gl.minimum(last, self.num_blocks - 1)
        lo = gl.load(self.ctx_end_ptr + last) - self.window + (1 << self.log_b)
        lo = gl.maximum(gl.load(self.ctx_start_ptr + last), lo)
        return lo, gl.load(self.ctx_end_ptr + first)

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
def load_keys(keys_map, ring, position, first, kv_head, BN: gl.constexpr, D: gl.constexpr):
    """Producer: a tile of BN keys (or values) into the ring, as soon as its slot is free."""
    ring.wait_empty(position)
    full = ring.full_barrier(position)
    mbarrier.expect(full, BN * D * 2)
    tma.async_copy_global_to_shared(keys_map, [first, kv_head, 0], full, ring.slot(position))


@gluon.jit
def load_own(
    own_map,
    ring,
    position,
    blocks,
    t,
    kv_head,
    BN: gl.constexpr,
    OWN: gl.constexpr,
    D: gl.constexpr,
):
    """Producer: the own keys (or values) of both halves of row tile t into one slot of the ring."""
    gl.static_assert(CONSUMERS * OWN <= BN)
    ring.wait_empty(position)
    full = ring.full_barrier(position)
    mbarrier.expect(full, CONSUMERS * OWN * D * 2)
    slot = ring.slot(position)._reinterpret(gl.bfloat16, [CONSUMERS, OWN, 1, D], own_map.layout)
    for g in gl.static_range(CONSUMERS):
        own_from = [blocks.first_own_key(t, g), kv_head, 0]
        tma.async_copy_global_to_shared(own_map, own_from, full, slot.index(g))


@gluon.jit
def load_rows(rows_map, ring, position, blocks, t, kv_head, D: gl.constexpr):
    """Producer: row tile t (of Q, dO or O) into a slot of 128 rows, one half after the other."""
    ring.wait_empty(position)
    full = ring.full_barrier(position)
    mbarrier.expect(full, TILE * D * 2)
    slot = ring.slot(position)._reinterpret(gl.bfloat16, [CONSUMERS, 16, 4, D], rows_map.layout)
    for g in gl.static_range(CONSUMERS):
        rows_from = [blocks.first_token(t, g), kv_head << blocks.log_g, 0]
        tma.async_copy_global_to_shared(rows_map, rows_from, full, slot.index(g))


@gluon.jit
def half_of_slot(ring, position, WG: gl.constexpr, D: gl.constexpr):
    """A consumer's 64 rows of a slot that `load_rows` filled."""
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    slot = ring.slot(position)._reinterpret(gl.bfloat16, [CONSUMERS, HALF, D], FLAT)
    return slot.index(WG)
