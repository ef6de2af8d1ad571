#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

namespace dflash {
namespace {

#define DFLASH_TEXT2(x) #x
#define DFLASH_TEXT(x) DFLASH_TEXT2(x)

Driver load() {
  Driver d;
  const char* path = std::getenv("DFLASH_LIBCUDA");
  if (!path || !*path) path = "libcuda.so.1";
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    d.error = std::string("no NVIDIA driver: ") + path + " could not be loaded";
    return d;
  }
#define X(name)                                                                   \
  d.name = reinterpret_cast<decltype(d.name)>(dlsym(handle, DFLASH_TEXT(name)));  \
  if (!d.name) {                                                                  \
    d.error = "the NVIDIA driver is too old: " DFLASH_TEXT(name) " is missing";   \
    return d;                                                                     \
  }
  DFLASH_DRIVER_FUNCTIONS(X)
#undef X
  d.cuKernelGetParamInfo =
      reinterpret_cast<decltype(d.cuKernelGetParamInfo)>(dlsym(handle, "cuKernelGetParamInfo"));
  d.cuFuncLoad = reinterpret_cast<decltype(d.cuFuncLoad)>(dlsym(handle, "cuFuncLoad"));
  d.cuTensorMapEncodeTiled = reinterpret_cast<decltype(d.cuTensorMapEncodeTiled)>(
      dlsym(handle, "cuTensorMapEncodeTiled"));
  if (CUresult r = d.cuInit(0)) {
    const char* name = nullptr;
    d.cuGetErrorName(r, &name);
    d.error = std::string("the NVIDIA driver did not start: ") + (name ? name : "unknown error");
  }
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver d = load();
  return d;
}

const Driver& require_driver() {
  const Driver& d = driver();
  if (!d.error.empty()) throw std::runtime_error(d.error);
  return d;
}

void check(CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  driver().cuGetErrorName(result, &name);
  throw std::runtime_error(what + ": " + (name ? name : "error " + std::to_string(int(result))));
}

}  // namespace dflash
