#include "tensor_map.h"

#include <array>
#include <stdexcept>

#include "driver.h"

namespace dflash {
namespace {

template <size_t Rank>
CUtensorMap encode(CUtensorMapDataType type, CUtensorMapSwizzle swizzle, uint64_t address,
                   const std::array<cuuint64_t, Rank>& extents, const cuuint64_t* byte_strides,
                   const std::array<cuuint32_t, Rank>& box) {
  const Driver& d = require_driver();
  if (!d.cuTensorMapEncodeTiled)
    throw std::runtime_error("the NVIDIA driver is too old: cuTensorMapEncodeTiled is missing");
  std::array<cuuint32_t, Rank> element_strides;
  element_strides.fill(1);
  CUtensorMap map;
  check(d.cuTensorMapEncodeTiled(&map, type, Rank, reinterpret_cast<void*>(address), extents.data(),
                                 byte_strides, box.data(), element_strides.data(),
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace

CUtensorMap rows_map(uint64_t address, int64_t rows, int64_t heads, int64_t head_dim,
                     int64_t row_stride, int64_t head_stride, int64_t box_rows, int64_t box_heads) {
  const cuuint64_t byte_strides[] = {cuuint64_t(head_stride) * 2, cuuint64_t(row_stride) * 2};
  return encode<3>(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, address,
                   {cuuint64_t(head_dim), cuuint64_t(heads), cuuint64_t(rows)}, byte_strides,
                   {64, cuuint32_t(box_heads), cuuint32_t(box_rows)});
}

CUtensorMap vector_map(uint64_t address, int64_t length, int64_t box) {
  const cuuint64_t no_strides[] = {0};
  return encode<1>(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE, address,
                   {cuuint64_t(length)}, no_strides, {cuuint32_t(box)});
}

}  // namespace dflash
