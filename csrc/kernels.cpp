#include "kernels.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>

#include "driver.h"

namespace dflash {

namespace {

struct Loaded {
  const Image* image = nullptr;
  CUkernel kernel = nullptr;
};

constexpr int kMaxHeadDims = 4;  // slots per kernel: head_dim 0, 64, 128, 256

int head_dim_slot(int head_dim) {
  switch (head_dim) {
    case 0: return 0;
    case 64: return 1;
    case 128: return 2;
    case 256: return 3;
    default: return -1;
  }
}

// Everything known of one device. Complete and immutable once published by device_state().
struct DeviceState {
  int device = 0;
  int multiprocessors = 0;
  std::string name;
  ImageChoice choice{};
  CUcontext context = nullptr;  // the primary context, the one torch uses; retained, never released
  std::array<std::array<Loaded, kMaxHeadDims>, kNumKernels> table{};
};

constexpr int kMaxDevices = 64;
std::atomic<const DeviceState*> g_devices[kMaxDevices];
std::mutex g_load_mutex;

Loaded load_image(const Driver& d, const Image& image, const DeviceState& state) {
  const std::string what =
      std::string(kKernelNames[int(image.kernel)]) + " for " + state.name;
  // A library belongs to no context; the images are static data, so the driver need not copy them.
  CUlibrary library = nullptr;
  check(d.cuLibraryLoadData(&library, image.data, nullptr, nullptr, 0, nullptr, nullptr, 0),
        "loading " + what);
  Loaded loaded{&image, nullptr};
  check(d.cuLibraryGetKernel(&loaded.kernel, library, image.symbol), "finding " + what);
  CUdevice device = 0;
  check(d.cuDeviceGet(&device, state.device), "cuDeviceGet");
  check(d.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, image.shared_bytes,
                               loaded.kernel, device),
        "reserving shared memory of " + what);
  // The load happens now, whatever CUDA_MODULE_LOADING says: a first launch would wait for it, and
  // behind a kernel that spins (an NCCL send) for ever.
  CUfunction function = nullptr;
  check(d.cuKernelGetFunction(&function, loaded.kernel), "loading " + what);
  if (d.cuFuncLoad) d.cuFuncLoad(function);  // what fails here fails, and is told, at the launch
  return loaded;
}

const DeviceState* load_device(int index) {
  const Driver& d = require_driver();
  int count = 0;
  check(d.cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (index < 0 || index >= std::min(count, kMaxDevices))
    throw std::runtime_error("no CUDA device " + std::to_string(index) + ": the driver has " +
                             std::to_string(count));
  auto state = std::make_unique<DeviceState>();
  state->device = index;
  CUdevice device = 0;
  check(d.cuDeviceGet(&device, index), "cuDeviceGet");
  char name[256] = {};
  int major = 0, minor = 0;
  check(d.cuDeviceGetName(name, sizeof(name) - 1, device), "cuDeviceGetName");
  check(d.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
        "cuDeviceGetAttribute");
  check(d.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
        "cuDeviceGetAttribute");
  state->name = std::string(name) + " (sm_" + std::to_string(major * 10 + minor) + ")";
  state->choice = choose_image(major * 10 + minor, state->name);
  check(d.cuDeviceGetAttribute(&state->multiprocessors,
                               CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device),
        "cuDeviceGetAttribute");
  check(d.cuDevicePrimaryCtxRetain(&state->context, device), "cuDevicePrimaryCtxRetain");
  ContextScope scope(d, state->context);
  for (const Image& image : images()) {
    if (image.sm != state->choice.sm || image.is_ptx != state->choice.is_ptx) continue;
    state->table[int(image.kernel)][head_dim_slot(image.head_dim)] = load_image(d, image, *state);
  }
  return state.release();  // lives as long as the process, like the driver's own state
}

const DeviceState& device_state(int index) {
  if (index >= 0 && index < kMaxDevices)
    if (const DeviceState* known = g_devices[index].load(std::memory_order_acquire)) return *known;
  std::lock_guard<std::mutex> lock(g_load_mutex);
  if (index >= 0 && index < kMaxDevices)
    if (const DeviceState* known = g_devices[index].load(std::memory_order_acquire)) return *known;
  const DeviceState* state = load_device(index);
  g_devices[index].store(state, std::memory_order_release);
  return *state;
}

// The PTX was checked at build; this checks the image that was really loaded, where the driver can.
void check_parameters(const Driver& d, const Loaded& loaded, const size_t* sizes, size_t count) {
  if (!d.cuKernelGetParamInfo) return;
  for (size_t i = 0; i < count; ++i) {
    size_t offset = 0, size = 0;
    check(d.cuKernelGetParamInfo(loaded.kernel, i, &offset, &size), "cuKernelGetParamInfo");
    if (size != sizes[i])
      throw std::runtime_error(std::string(kKernelNames[int(loaded.image->kernel)]) +
                               ": parameter " + std::to_string(i) + " has " + std::to_string(size) +
                               " bytes, the launcher passes " + std::to_string(sizes[i]));
  }
}

std::string join(const std::set<int>& values, const char* prefix) {
  std::string text;
  for (int v : values) text += (text.empty() ? "" : ", ") + (prefix + std::to_string(v));
  return text;
}

}  // namespace

std::vector<int> built_architectures() {
  std::set<int> built;
  for (const Image& image : images())
    if (!image.is_ptx) built.insert(image.sm);
  return {built.begin(), built.end()};
}

ImageChoice choose_image(int sm, const std::string& device_name) {
  int best = 0, ptx = 0;
  std::set<int> built, fallback;
  for (const Image& image : images()) {
    (image.is_ptx ? fallback : built).insert(image.sm);
    if (image.is_ptx && image.sm <= sm) ptx = std::max(ptx, image.sm);
    // A cubin of 8.x runs on 8.y >= 8.x, but one for sm_80 uses shared memory sm_86 and 89 lack.
    const bool fits = image.sm != 80 || sm == 80 || sm == 87;
    const bool runs = sm < 90 ? image.sm / 10 == sm / 10 && image.sm <= sm && fits : image.sm == sm;
    if (!image.is_ptx && runs) best = std::max(best, image.sm);
  }
  if (best) return {best, false};
  if (ptx) return {ptx, true};
  throw std::runtime_error("no kernel image for " + device_name + ": built are " +
                           join(built, "sm_") + (fallback.empty() ? "" : " and PTX for ") +
                           join(fallback, "sm_") + "; rebuild with DFLASH_SM naming its architecture");
}

void launch(KernelId kernel, int device, uint64_t stream, int head_dim, const void** values,
            const size_t* sizes, size_t count, uint64_t counter, const Grid& grid) {
  const Driver& d = require_driver();
  const DeviceState& state = device_state(device);
  const int slot = head_dim_slot(head_dim);
  const Loaded loaded = slot < 0 ? Loaded{} : state.table[int(kernel)][slot];
  if (!loaded.kernel) {
    std::set<int> dims;
    for (const Image& image : images())
      if (image.kernel == kernel) dims.insert(image.head_dim);
    throw std::runtime_error(std::string(kKernelNames[int(kernel)]) + ": no kernel for head_dim " +
                             std::to_string(head_dim) + " on " + state.name + "; built are " +
                             join(dims, ""));
  }
  const int64_t programs = grid(loaded.image->tile, state.multiprocessors);
  if (programs == 0) return;
  if (programs < 0 || programs > INT32_MAX)
    throw std::runtime_error(std::string(kKernelNames[int(kernel)]) + ": " +
                             std::to_string(programs) + " programs; a launch takes at most 2^31 - 1");
  ContextScope scope(d, state.context);
  // Images are the same for the life of the process: the first launch checks for all.
  static std::array<std::array<std::atomic<bool>, kMaxHeadDims>, kNumKernels> checked{};
  std::atomic<bool>& seen = checked[int(kernel)][slot];
  if (!seen.load(std::memory_order_acquire)) {
    check_parameters(d, loaded, sizes, count);
    seen.store(true, std::memory_order_release);
  }
  const auto queue = reinterpret_cast<CUstream>(stream);
  if (counter) check(d.cuMemsetD32Async(counter, 0, 1, queue), "cuMemsetD32Async");
  const CUdeviceptr no_scratch = 0;  // Triton's global and profile scratch: the build checks both unused
  values[count] = &no_scratch;
  values[count + 1] = &no_scratch;
  CUlaunchConfig config{};
  config.gridDimX = unsigned(programs);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = unsigned(loaded.image->threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = unsigned(loaded.image->shared_bytes);
  config.hStream = queue;
  // A CUkernel is launched through the CUfunction type: the driver resolves it per context.
  check(d.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(loaded.kernel),
                           const_cast<void**>(values), nullptr),
        std::string("launching ") + kKernelNames[int(kernel)] + " on " + state.name);
}

ContextScope enter_device(int device) {
  return ContextScope(require_driver(), device_state(device).context);
}

void warmup(int device) { device_state(device); }

std::string describe_device(int device) {
  const DeviceState& state = device_state(device);
  return state.name + ": sm_" + std::to_string(state.choice.sm) + (state.choice.is_ptx ? " PTX" : "");
}

ImageChoice device_images(int device) { return device_state(device).choice; }

}  // namespace dflash
