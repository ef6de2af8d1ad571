// Which tiles and work items an attention call consists of: a function of the layout alone, never
// of the number of threads, so that results are not either.
#pragma once
#include <cstdint>
#include <vector>

#include "attention_kernels.h"

namespace dflash::cpu {

// Blocks whose context intervals touch: a document, or less of it with a window. Clusters share no
// context row, so their work is independent.
struct Cluster {
  int64_t tile_begin, tile_end;
  int64_t key_begin, key_end;
};

struct TilePlan {
  std::vector<Tile> tiles;
  std::vector<Cluster> clusters;
  std::vector<int64_t> padding_blocks;
  double pairs;  // visible (query row, key) pairs of one kv head, for the choice of threads
};

// Throws std::invalid_argument if an interval is out of range or the blocks are not sorted.
TilePlan plan_tiles(const Inputs& in);

// Items in an order in which each comes after those it waits for.
std::vector<BackwardItem> plan_backward(const TilePlan& plan, int64_t head_dim);

}  // namespace dflash::cpu
