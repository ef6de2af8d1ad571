// The CUDA driver, found at run time: the extension links no CUDA library, so it builds and imports
// where there is no GPU, no driver and no toolkit.
#pragma once
#include <cuda.h>

#include <string>

namespace dflash {

// Every driver function the launcher calls. cuda.h maps some names to versioned symbols (for
// example cuDevicePrimaryCtxRetain), so the symbol name is taken after macro expansion.
#define DFLASH_DRIVER_FUNCTIONS(X) \
  X(cuInit)                        \
  X(cuGetErrorName)                \
  X(cuDeviceGet)                   \
  X(cuDeviceGetCount)              \
  X(cuDeviceGetName)               \
  X(cuDeviceGetAttribute)          \
  X(cuDevicePrimaryCtxRetain)      \
  X(cuCtxGetCurrent)               \
  X(cuCtxPushCurrent)              \
  X(cuCtxPopCurrent)               \
  X(cuLibraryLoadData)             \
  X(cuLibraryGetKernel)            \
  X(cuKernelGetFunction)           \
  X(cuKernelSetAttribute)          \
  X(cuLaunchKernelEx)              \
  X(cuMemsetD32Async)

struct Driver {
#define X(name) decltype(&::name) name = nullptr;
  DFLASH_DRIVER_FUNCTIONS(X)
#undef X
  // Present from CUDA 12.4 on; used to double-check parameter sizes at load.
  CUresult (*cuKernelGetParamInfo)(CUkernel, size_t, size_t*, size_t*) = nullptr;
  // Present from CUDA 12.4 on; completes a load that CUDA would leave to the first launch.
  CUresult (*cuFuncLoad)(CUfunction) = nullptr;
  // Present from CUDA 12.0 on; needed by the Hopper kernels alone.
  decltype(&::cuTensorMapEncodeTiled) cuTensorMapEncodeTiled = nullptr;
  std::string error;  // why there is no usable driver; empty if there is one
};

// Loads libcuda.so.1 (or the file named by DFLASH_LIBCUDA, for tests) once. Never throws.
const Driver& driver();

// The driver, or a std::runtime_error that says in one line why there is none.
const Driver& require_driver();

// Throws std::runtime_error "<what>: CUDA_ERROR_..." unless result is CUDA_SUCCESS.
void check(CUresult result, const std::string& what);

// Makes the device's primary context current for a scope. A fresh thread has none at all (also
// autograd's), and a thread may be on another device: both are put right and then undone.
class ContextScope {
 public:
  ContextScope(const Driver& d, CUcontext wanted) : d_(d) {
    CUcontext current = nullptr;
    check(d.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current == wanted) return;
    check(d.cuCtxPushCurrent(wanted), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~ContextScope() {
    CUcontext popped = nullptr;
    if (pushed_) d_.cuCtxPopCurrent(&popped);
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  const Driver& d_;
  bool pushed_ = false;
};

}  // namespace dflash
