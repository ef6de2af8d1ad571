// What the dispatcher and the units of each instruction set share; plain data only.
//
// This header is compiled under several instruction sets: it may hold no function with external
// linkage, or the linker could pick the AVX-512 copy for everyone. Hence `static` helpers only.
#pragma once
#include <cstdint>

#include "attention.h"

namespace dflash::cpu {

// Query rows (slot x head of one kv head) of a tile: columns of the score tile, kept in L1.
constexpr int64_t kTileRows = 80;
// Context rows of a backward chunk times head_dim: K, V and their gradients stay in L2.
constexpr int64_t kChunkElements = 16384;

// Query rows of one kv head, numbered (block, slot, head) from first_block on. Either whole blocks
// (first_row 0, rows = num_blocks * B * G) or a piece of one block too large for a tile.
struct Tile {
  int64_t first_block;
  int32_t num_blocks;
  int32_t first_row;
  int32_t rows;
  int32_t key_begin, key_end;  // union of the context intervals of its rows
};

// Backward work of one kv head: the query tiles [tile_begin, tile_end) against the context rows
// [key_begin, key_end). dQ of a tile is summed over items in the order of the context, dK and dV of
// a row in the order of the tiles: an item waits for the two before it, so sums have one order.
struct BackwardItem {
  int64_t tile_begin, tile_end;
  int64_t key_begin, key_end;
  int64_t previous_keys, previous_tiles;  // items to wait for, -1 if none
  bool last_keys, last_tiles;             // nobody adds to dQ (dK, dV) after this item
};

struct Inputs {
  Shape shape;
  View q, k_ctx, v_ctx, k_blk, v_blk;
  const int32_t *ctx_start, *ctx_end;
};

struct ForwardCall {
  Inputs in;
  void* out;
  float* lse;
};

struct BackwardCall {
  Inputs in;
  const void *out, *grad_out;
  const float* lse;
  void *grad_q, *grad_k_ctx, *grad_v_ctx, *grad_k_blk, *grad_v_blk;
  float* delta;  // [Hq, N*B]
  // Sums between items, fp32, laid out like the gradients; if dtype is f32, the gradients.
  float *sum_q, *sum_k_ctx, *sum_v_ctx;
};

// One build of the kernels for one instruction set.
struct Kernels {
  const char* name;
  int64_t (*scratch_floats)(int64_t head_dim);  // per thread, 64-byte aligned
  void (*forward)(const ForwardCall&, const Tile&, int64_t kv_head, float* scratch);
  void (*backward)(const BackwardCall&, const Tile* tiles, const BackwardItem&, int64_t kv_head,
                   float* scratch);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// First context row visible to a slot of a block (semantics.md, "Attention mask"); the last is
// ctx_end - 1 for every slot. A window moves the limit with the slot, never the end.
static inline int64_t visible_from(const Inputs& in, int64_t block, int64_t slot) {
  const int64_t start = in.ctx_start[block];
  if (in.shape.window == 0) return start;
  const int64_t edge = in.ctx_end[block] + slot - in.shape.window + 1;
  return edge > start ? edge : start;
}

}  // namespace dflash::cpu
