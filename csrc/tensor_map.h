// TMA descriptors of the Hopper kernels' tensors, encoded per launch (0.2 to 0.4 us each).
#pragma once
#include <cuda.h>

#include <cstdint>

namespace dflash {

// Of a bf16 [rows, heads, head_dim] view with an innermost stride of 1; the other strides in
// elements. The box is box_rows x box_heads x 64 columns, the widest that the 128 byte swizzle takes;
// reads past the end give zeros, writes there are dropped.
CUtensorMap rows_map(uint64_t address, int64_t rows, int64_t heads, int64_t head_dim,
                     int64_t row_stride, int64_t head_stride, int64_t box_rows, int64_t box_heads);

// Of `length` contiguous fp32 numbers in boxes of `box`.
CUtensorMap vector_map(uint64_t address, int64_t length, int64_t box);

// For a power of two.
inline int32_t log2_of(int32_t x) {
  int32_t log = 0;
  while (x > 1 << log) ++log;
  return log;
}

}  // namespace dflash
