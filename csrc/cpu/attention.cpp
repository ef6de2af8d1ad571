// Entry points: checks, choice of instruction set, and the sharing out of work items to threads.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "attention_kernels.h"
#include "attention_plan.h"
#include "threads.h"

namespace dflash::cpu {
namespace {

constexpr double kFlopsPerThread = 2e6;  // about 30 us of work: below that, waking a thread loses

const Kernels* const kBuilds[] = {
#if defined(__x86_64__)
    &kAvx512Kernels, &kAvx2Kernels,
#endif
    &kBaselineKernels};

bool runs_here(const Kernels& kernels) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (&kernels == &kAvx512Kernels)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("fma");
  if (&kernels == &kAvx2Kernels)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return &kernels == &kBaselineKernels;
}

const Kernels& choose() {
  const char* wanted = std::getenv("DFLASH_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string usable;
  for (const Kernels* kernels : kBuilds) {
    if (!runs_here(*kernels)) continue;
    if (any || std::strcmp(wanted, kernels->name) == 0) return *kernels;
    usable += std::string(usable.empty() ? "" : ", ") + kernels->name;
  }
  throw std::runtime_error(std::string("DFLASH_CPU_ISA=") + wanted +
                           " is not available on this machine: use one of " + usable +
                           ", or unset it");
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();  // a throw leaves it to the next call
  return chosen;
}

void check(const Shape& s) {
  const auto one_of = [](int64_t x, std::initializer_list<int64_t> set) {
    return std::find(set.begin(), set.end(), x) != set.end();
  };
  if (!one_of(s.head_dim, {64, 128, 256}))
    throw std::invalid_argument("head_dim " + std::to_string(s.head_dim) +
                                " is not supported: use 64, 128 or 256");
  if (!one_of(s.block_size, {1, 4, 8, 16, 32}))
    throw std::invalid_argument("block_size " + std::to_string(s.block_size) +
                                " is not supported: use 1, 4, 8, 16 or 32");
  if (s.kv_heads < 1 || s.q_heads % s.kv_heads != 0 || s.q_heads / s.kv_heads > 16)
    throw std::invalid_argument(std::to_string(s.q_heads) + " query heads over " +
                                std::to_string(s.kv_heads) +
                                " key-value heads: the ratio must be a whole number up to 16");
  if (s.window < 0 || s.num_blocks < 0 || s.num_ctx < 0)
    throw std::invalid_argument("window, num_blocks and num_ctx must not be negative");
}

// Grown on first use and kept for the thread's life: a call allocates no scratch of its own.
float* scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  thread_local std::unique_ptr<float, Free> buffer;
  thread_local int64_t size = 0;
  if (size < floats) {
    buffer.reset();
    size = 0;
    const size_t bytes = sizeof(float) * size_t(floats);
    buffer.reset(static_cast<float*>(::operator new(bytes, std::align_val_t(64))));
    size = floats;
  }
  return buffer.get();
}

// Calls work(item, scratch) for each item in [0, items), taken in this order, by several threads.
template <typename Work>
void share_out(int64_t items, double flops, int num_threads, int64_t floats, const Work& work) {
  const double useful =
      std::min({double(num_threads), double(items), 1.0 + flops / kFlopsPerThread});
  std::atomic<int64_t> next{0};
  scratch(floats);  // the caller's: if memory is short, say so before anything is started
  run_on_threads(int(useful), [&] {
    float* own = nullptr;
    try {
      own = scratch(floats);
    } catch (const std::bad_alloc&) {
      return;  // a worker without memory leaves its share to the others
    }
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) work(i, own);
  });
}

template <typename T>
std::unique_ptr<T[]> uninitialised(int64_t n) {
  return std::unique_ptr<T[]>(new T[size_t(n)]);
}

size_t element_bytes(const Shape& s) { return s.dtype == DType::f32 ? 4 : 2; }

void zero(void* base, int64_t row, int64_t rows, int64_t row_elements, const Shape& s) {
  const size_t row_bytes = size_t(row_elements) * element_bytes(s);
  std::memset(static_cast<char*>(base) + size_t(row) * row_bytes, 0, size_t(rows) * row_bytes);
}

// Gradients of context rows that no block sees.
void zero_unseen(const BackwardCall& call, const TilePlan& plan) {
  const Shape& s = call.in.shape;
  const auto zero_span = [&](int64_t begin, int64_t end) {
    zero(call.grad_k_ctx, begin, end - begin, s.kv_heads * s.head_dim, s);
    zero(call.grad_v_ctx, begin, end - begin, s.kv_heads * s.head_dim, s);
  };
  int64_t seen = 0;
  for (const Cluster& cluster : plan.clusters) {
    if (cluster.key_begin == cluster.key_end) continue;
    if (cluster.key_begin > seen) zero_span(seen, cluster.key_begin);
    seen = cluster.key_end;
  }
  if (s.num_ctx > seen) zero_span(seen, s.num_ctx);
}

}  // namespace

void attention_forward(const Shape& shape, View q, View k_ctx, View v_ctx, View k_blk, View v_blk,
                       const int32_t* ctx_start, const int32_t* ctx_end, void* out, float* lse,
                       int num_threads) {
  check(shape);
  const ForwardCall call{{shape, q, k_ctx, v_ctx, k_blk, v_blk, ctx_start, ctx_end}, out, lse};
  const TilePlan plan = plan_tiles(call.in);
  const Kernels& build = kernels();
  const int64_t B = shape.block_size;
  for (const int64_t block : plan.padding_blocks) {
    zero(out, block * B, B, shape.q_heads * shape.head_dim, shape);
    for (int64_t head = 0; head < shape.q_heads; ++head)
      std::fill_n(lse + (head * shape.num_blocks + block) * B, B, 0.0f);
  }
  const int64_t heads = shape.kv_heads;
  share_out(int64_t(plan.tiles.size()) * heads, plan.pairs * double(4 * shape.head_dim * heads),
            num_threads, build.scratch_floats(shape.head_dim), [&](int64_t i, float* own) {
              build.forward(call, plan.tiles[size_t(i / heads)], i % heads, own);
            });
}

void attention_backward(const Shape& shape, View q, View k_ctx, View v_ctx, View k_blk, View v_blk,
                        const int32_t* ctx_start, const int32_t* ctx_end, const void* out,
                        const void* grad_out, const float* lse, void* grad_q, void* grad_k_ctx,
                        void* grad_v_ctx, void* grad_k_blk, void* grad_v_blk, int num_threads) {
  check(shape);
  BackwardCall call{{shape, q, k_ctx, v_ctx, k_blk, v_blk, ctx_start, ctx_end},
                    out, grad_out, lse, grad_q, grad_k_ctx, grad_v_ctx, grad_k_blk, grad_v_blk,
                    nullptr, nullptr, nullptr, nullptr};
  const TilePlan plan = plan_tiles(call.in);
  const std::vector<BackwardItem> items = plan_backward(plan, shape.head_dim);
  const Kernels& build = kernels();
  const int64_t B = shape.block_size, D = shape.head_dim, heads = shape.kv_heads;
  const int64_t tokens = shape.num_blocks * B;

  const auto delta = uninitialised<float>(shape.q_heads * tokens);
  call.delta = delta.get();
  std::unique_ptr<float[]> sum_q, sum_k_ctx, sum_v_ctx;
  if (shape.dtype == DType::f32) {
    call.sum_q = static_cast<float*>(grad_q);
    call.sum_k_ctx = static_cast<float*>(grad_k_ctx);
    call.sum_v_ctx = static_cast<float*>(grad_v_ctx);
  } else {  // pages are only committed where an item is not the last to add
    call.sum_q = (sum_q = uninitialised<float>(tokens * shape.q_heads * D)).get();
    call.sum_k_ctx = (sum_k_ctx = uninitialised<float>(shape.num_ctx * heads * D)).get();
    call.sum_v_ctx = (sum_v_ctx = uninitialised<float>(shape.num_ctx * heads * D)).get();
  }

  for (const int64_t block : plan.padding_blocks) {
    zero(grad_q, block * B, B, shape.q_heads * D, shape);
    zero(grad_k_blk, block * B, B, heads * D, shape);
    zero(grad_v_blk, block * B, B, heads * D, shape);
  }
  zero_unseen(call, plan);

  const int64_t count = int64_t(items.size()) * heads;
  const std::unique_ptr<std::atomic<bool>[]> done(new std::atomic<bool>[size_t(count)]());
  // Items are taken in an order that puts each after those it waits for, so the earliest unfinished
  // one never waits and the wait of every other ends.
  const auto await = [&](int64_t item, int64_t head) {
    if (item < 0) return;
    while (!done[size_t(item * heads + head)].load(std::memory_order_acquire))
      std::this_thread::yield();
  };
  share_out(count, plan.pairs * double(10 * D * heads), num_threads, build.scratch_floats(D),
            [&](int64_t i, float* own) {
              const BackwardItem& item = items[size_t(i / heads)];
              await(item.previous_keys, i % heads);
              await(item.previous_tiles, i % heads);
              build.backward(call, plan.tiles.data(), item, i % heads, own);
              done[size_t(i)].store(true, std::memory_order_release);
            });
}

const char* instruction_set() { return kernels().name; }

}  // namespace dflash::cpu
