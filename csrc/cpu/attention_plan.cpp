#include "attention_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace dflash::cpu {
namespace {

// Tiles of a backward segment: enough to repay reading a chunk, few enough to share out the work.
constexpr int64_t kSegmentTiles = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_padding(const Inputs& in, int64_t block) {
  return in.ctx_start[block] > in.ctx_end[block];
}

struct Keys {
  int32_t begin, end;
};

// Context rows the slots of a block see between them; empty where none does.
Keys context_of(const Inputs& in, int64_t block) {
  const int32_t end = in.ctx_end[block];
  return {std::min(int32_t(visible_from(in, block, 0)), end), end};
}

// Widens the key range of a tile, cluster or segment.
template <typename Range>
void extend(Range& range, Keys keys) {
  if (keys.begin >= keys.end) return;
  const bool empty = range.key_begin >= range.key_end;
  if (empty || keys.begin < range.key_begin) range.key_begin = keys.begin;
  if (empty || keys.end > range.key_end) range.key_end = keys.end;
}

void check_block(const Inputs& in, int64_t block) {
  const int64_t start = in.ctx_start[block], end = in.ctx_end[block];
  if (start < 0 || end > in.shape.num_ctx)
    throw std::invalid_argument("block " + std::to_string(block) + " sees context rows [" +
                                std::to_string(start) + ", " + std::to_string(end) + ") of " +
                                std::to_string(in.shape.num_ctx));
  const int64_t before = block - 1;
  if (before >= 0 && (is_padding(in, before) || start < in.ctx_start[before] ||
                      end < in.ctx_end[before]))
    throw std::invalid_argument("block " + std::to_string(block) + " is out of order: ctx_start " +
                                "and ctx_end must never decrease, and padding blocks come last");
}

void add_tile(const Inputs& in, int64_t first, int64_t blocks, int64_t first_row, int64_t rows,
              TilePlan& plan) {
  Tile tile{first, int32_t(blocks), int32_t(first_row), int32_t(rows), 0, 0};
  for (int64_t b = first; b < first + blocks; ++b) {
    const Keys keys = context_of(in, b);
    extend(tile, keys);
    const int64_t seen = keys.end - keys.begin + in.shape.block_size;
    plan.pairs += double(rows) / double(blocks) * double(seen);
  }
  plan.tiles.push_back(tile);
}

// Blocks [first, last) as tiles of nearly equal size; a block too large for one is cut in pieces.
void add_cluster(const Inputs& in, int64_t first, int64_t last, TilePlan& plan) {
  const int64_t block_rows = in.shape.block_size * (in.shape.q_heads / in.shape.kv_heads);
  const int64_t most = kTileRows / block_rows, tile_begin = int64_t(plan.tiles.size());
  if (most >= 1) {
    const int64_t tiles = ceil_div(last - first, most);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t from = first + (last - first) * t / tiles;
      const int64_t to = first + (last - first) * (t + 1) / tiles;
      add_tile(in, from, to - from, 0, (to - from) * block_rows, plan);
    }
  } else {
    const int64_t pieces = ceil_div(block_rows, kTileRows);
    const int64_t rows = ceil_div(ceil_div(block_rows, pieces), 16) * 16;  // whole vectors
    for (int64_t b = first; b < last; ++b)
      for (int64_t row = 0; row < block_rows; row += rows)
        add_tile(in, b, 1, row, std::min(rows, block_rows - row), plan);
  }
  Cluster cluster{tile_begin, int64_t(plan.tiles.size()), 0, 0};
  for (size_t t = size_t(tile_begin); t < plan.tiles.size(); ++t)
    extend(cluster, Keys{plan.tiles[t].key_begin, plan.tiles[t].key_end});
  plan.clusters.push_back(cluster);
}

}  // namespace

TilePlan plan_tiles(const Inputs& in) {
  TilePlan plan{};
  int64_t first = -1, end = 0;  // of the cluster being gathered; end 0: no context yet
  const auto close = [&](int64_t last) {
    if (first >= 0) add_cluster(in, first, last, plan);
    first = -1;
    end = 0;
  };
  for (int64_t b = 0; b < in.shape.num_blocks; ++b) {
    if (is_padding(in, b)) {
      plan.padding_blocks.push_back(b);
      continue;
    }
    check_block(in, b);
    const Keys keys = context_of(in, b);
    const bool new_document = b > 0 && in.ctx_start[b] != in.ctx_start[b - 1];
    if (keys.begin >= end && (end > 0 || new_document)) close(b);
    if (first < 0) first = b;
    if (keys.begin < keys.end) end = keys.end;
  }
  close(in.shape.num_blocks - int64_t(plan.padding_blocks.size()));
  return plan;
}

std::vector<BackwardItem> plan_backward(const TilePlan& plan, int64_t head_dim) {
  const int64_t chunk_rows = kChunkElements / head_dim;
  std::vector<BackwardItem> items;
  std::vector<int64_t> depth;  // longest chain of items waited for
  for (const Cluster& cluster : plan.clusters) {
    // The item of the latest segment that met each chunk; later segments wait for it.
    const int64_t chunks = ceil_div(cluster.key_end - cluster.key_begin, chunk_rows);
    std::vector<int64_t> latest(size_t(std::max<int64_t>(1, chunks)), -1);
    for (int64_t tile = cluster.tile_begin; tile < cluster.tile_end;) {
      int64_t stop = std::min(cluster.tile_end, tile + kSegmentTiles);
      // Pieces of one block stay together: its own K and V gradients are summed over them.
      while (stop < cluster.tile_end && plan.tiles[size_t(stop)].first_row > 0) ++stop;
      Tile segment{};
      for (int64_t t = tile; t < stop; ++t)
        extend(segment, Keys{plan.tiles[size_t(t)].key_begin, plan.tiles[size_t(t)].key_end});
      // A segment without context still has its own blocks: it joins the first chunk.
      const bool empty = segment.key_begin >= segment.key_end;
      const int64_t first = empty ? 0 : (segment.key_begin - cluster.key_begin) / chunk_rows;
      const int64_t last = empty ? 0 : (segment.key_end - 1 - cluster.key_begin) / chunk_rows;
      for (int64_t c = first; c <= last; ++c) {
        const int64_t key = cluster.key_begin + c * chunk_rows;
        BackwardItem item{tile, stop, key, std::min(cluster.key_end, key + chunk_rows),
                          c > first ? int64_t(items.size()) - 1 : -1, latest[size_t(c)],
                          c == last, true};
        int64_t longest = 0;
        for (const int64_t before : {item.previous_keys, item.previous_tiles})
          if (before >= 0) longest = std::max(longest, depth[size_t(before)] + 1);
        if (item.previous_tiles >= 0) items[size_t(item.previous_tiles)].last_tiles = false;
        latest[size_t(c)] = int64_t(items.size());
        items.push_back(item);
        depth.push_back(longest);
      }
      tile = stop;
    }
  }
  // Shallow first: items that can run side by side come together, long waits are rare.
  std::vector<int64_t> order(items.size()), place(items.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return depth[size_t(a)] < depth[size_t(b)]; });
  std::vector<BackwardItem> sorted;
  for (const int64_t i : order) {
    place[size_t(i)] = int64_t(sorted.size());
    sorted.push_back(items[size_t(i)]);
  }
  for (BackwardItem& item : sorted) {
    if (item.previous_keys >= 0) item.previous_keys = place[size_t(item.previous_keys)];
    if (item.previous_tiles >= 0) item.previous_tiles = place[size_t(item.previous_tiles)];
  }
  return sorted;
}

}  // namespace dflash::cpu
