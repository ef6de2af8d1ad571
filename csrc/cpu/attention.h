// DFlash attention on the CPU: the same operator as the Triton kernels, fp32 arithmetic.
#pragma once
#include <cstdint>

namespace dflash::cpu {

enum class DType : int { f32 = 0, bf16 = 1 };

// A [rows, heads, head_dim] tensor; strides in elements, innermost stride 1.
struct View {
  const void* data;
  int64_t row_stride;
  int64_t head_stride;
};

struct Shape {
  int64_t num_blocks;  // N
  int64_t block_size;  // B
  int64_t num_ctx;     // T
  int64_t q_heads;     // Hq, a multiple of kv_heads
  int64_t kv_heads;    // Hkv
  int64_t head_dim;    // D
  int64_t window;      // 0: full attention
  bool causal;         // slot k sees slots <= k of its own block
  float scale;
  DType dtype;
};

// Both calls use at most num_threads threads (fewer where the work is small) of a pool of this
// library's own; the result does not depend on their number, and any number of threads may call at
// once. They throw std::invalid_argument for an unsupported shape, an interval outside the context
// or blocks out of order (padding blocks, ctx_start > ctx_end, come last), and
// std::runtime_error if DFLASH_CPU_ISA names an instruction set this machine lacks.

// out [N*B, Hq, D] contiguous, of `dtype`; lse float [Hq, N*B], natural log (0 for padding rows).
void attention_forward(const Shape& shape, View q, View k_ctx, View v_ctx, View k_blk, View v_blk,
                       const int32_t* ctx_start, const int32_t* ctx_end, void* out, float* lse,
                       int num_threads);

// out and grad_out are contiguous [N*B, Hq, D]; gradients are contiguous [rows, heads, D] of
// `dtype`, every element written.
void attention_backward(const Shape& shape, View q, View k_ctx, View v_ctx, View k_blk, View v_blk,
                        const int32_t* ctx_start, const int32_t* ctx_end, const void* out,
                        const void* grad_out, const float* lse, void* grad_q, void* grad_k_ctx,
                        void* grad_v_ctx, void* grad_k_blk, void* grad_v_blk, int num_threads);

// Name of the instruction set chosen at run time: "avx512", "avx2" or "sse2" ("baseline" off
// x86-64). DFLASH_CPU_ISA, read at the first call, forces one of those the machine has.
const char* instruction_set();

}  // namespace dflash::cpu
