// The kernels as Python calls them: what each launcher takes, and the launchers in a table.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dflash {

enum class Kind { address, int32, float32 };

struct Parameter {
  const char* name;
  Kind kind;
};

union Value {
  uint64_t address;
  int32_t int32;
  float float32;
};

// Arguments by the parameters' order. `stream` is a CUstream, 0 for the default stream.
struct Call {
  int device;
  uint64_t stream;
  int head_dim;
  const Value* values;
};

// One kernel. `launch` resolves the image, computes the grid and launches; it throws
// std::runtime_error with one line on any error.
struct Launcher {
  const char* name;
  const Parameter* parameters;
  size_t num_parameters;
  void (*launch)(const Call& call);
};

extern const Launcher kLaunchers[];
extern const size_t kNumLaunchers;
constexpr size_t kMaxParameters = 64;

}  // namespace dflash
