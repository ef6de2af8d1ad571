// The embedded images and the build's report: the only C++ that has to wait for the images.
#include <iterator>

#include "kernels.h"

namespace dflash {

#include "images.inc"  // generated: labels of images.S, kImages
#include "report.inc"  // generated: kBuildReport

const std::vector<Image>& images() {
  static const std::vector<Image> all(std::begin(kImages), std::end(kImages));
  return all;
}

const char* build_report() { return kBuildReport; }

}  // namespace dflash
