#include "launchers.h"

#include <algorithm>
#include <iterator>

#include "driver.h"
#include "kernels.h"
#include "tensor_map.h"

namespace dflash {

#include "launchers.inc"  // generated: one function per kernel, kLaunchers

const size_t kNumLaunchers = std::size(kLaunchers);

}  // namespace dflash
