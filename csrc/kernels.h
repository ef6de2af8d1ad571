// The embedded Triton images and their launch: lookup by device, load once, launch from any thread.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "driver.h"

namespace dflash {

#include "kernel_ids.inc"  // generated: enum class KernelId, kKernelNames, kNumKernels, kKeyTile

struct Image {
  KernelId kernel;
  int head_dim;  // 0: the kernel has none
  int sm;
  bool is_ptx;  // compiled by the driver at load; only for devices with no image of their own
  const char* symbol;
  const unsigned char* data;
  int tile;     // what the grid expression of the kernel calls `tile`
  int threads;  // per block
  int shared_bytes;
};

// Everything the build embedded.
const std::vector<Image>& images();

// JSON list, an object per image: kernel, head_dim, sm, bytes, registers, stack.
const char* build_report();

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Architecture of the image a device of compute capability sm (for example 90) runs, and whether it
// is PTX. A cubin of 8.x serves later 8.y with as much shared memory; from 9.0 on images are exact
// ("sm_90a"); anything else takes the fallback PTX, whose tiles fit every device. Throws std::runtime_error naming the device and what was built.
struct ImageChoice {
  int sm;
  bool is_ptx;
};
ImageChoice choose_image(int sm, const std::string& device_name);

// Launches a kernel on `device` and `stream` (a CUstream, 0 for the default stream). `values` are
// the arguments followed by room for two scratch pointers. `grid` gives the number of programs from
// the image's tile and the device's multiprocessors; 0 programs launch nothing. `counter` (0: none)
// is the address of an int32 to zero first. Works from any thread, also one without a context.
using Grid = std::function<int64_t(int64_t tile, int64_t multiprocessors)>;
void launch(KernelId kernel, int device, uint64_t stream, int head_dim, const void** values,
            const size_t* sizes, size_t count, uint64_t counter, const Grid& grid);

// The device's context for a scope: encoding a tensor map needs one, like launching.
ContextScope enter_device(int device);

// Loads every image of the device, so that nothing is loaded later (for example in graph capture).
void warmup(int device);

// Built architectures, and for a device its name and the chosen image ("sm_90", "sm_80 PTX").
std::vector<int> built_architectures();
std::string describe_device(int device);
ImageChoice device_images(int device);

}  // namespace dflash
