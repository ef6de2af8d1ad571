// The Python module dflash_ext._C. Tensors arrive as integers (data_ptr, strides, stream), so this
// file needs no torch and one build serves every torch version.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "cpu/attention.h"
#include "driver.h"
#include "kernels.h"
#include "launchers.h"

namespace py = pybind11;

namespace dflash {
namespace {

using Strides = std::array<int64_t, 10>;  // (row, head) of q, k_ctx, v_ctx, k_blk, v_blk
using Inputs = std::array<uint64_t, 5>;   // the same tensors' addresses

template <typename T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

std::array<cpu::View, 5> views(const Inputs& inputs, const Strides& strides) {
  std::array<cpu::View, 5> v;
  for (size_t i = 0; i < v.size(); ++i)
    v[i] = {pointer<const void>(inputs[i]), strides[2 * i], strides[2 * i + 1]};
  return v;
}

void attention_cpu_forward(const cpu::Shape& shape, const Inputs& inputs, const Strides& strides,
                           uint64_t ctx_start, uint64_t ctx_end, uint64_t out, uint64_t lse,
                           int threads) {
  const auto v = views(inputs, strides);
  cpu::attention_forward(shape, v[0], v[1], v[2], v[3], v[4], pointer<const int32_t>(ctx_start),
                         pointer<const int32_t>(ctx_end), pointer<void>(out), pointer<float>(lse),
                         threads);
}

void attention_cpu_backward(const cpu::Shape& shape, const Inputs& inputs, const Strides& strides,
                            uint64_t ctx_start, uint64_t ctx_end, uint64_t out, uint64_t grad_out,
                            uint64_t lse, const Inputs& grads, int threads) {
  const auto v = views(inputs, strides);
  cpu::attention_backward(shape, v[0], v[1], v[2], v[3], v[4], pointer<const int32_t>(ctx_start),
                          pointer<const int32_t>(ctx_end), pointer<const void>(out),
                          pointer<const void>(grad_out), pointer<const float>(lse),
                          pointer<void>(grads[0]), pointer<void>(grads[1]), pointer<void>(grads[2]),
                          pointer<void>(grads[3]), pointer<void>(grads[4]), threads);
}

// A function per launcher by one template instance: pybind11's own handling of 28 signatures with up
// to 40 arguments took half of this file's compile time, and takes twice as long per call.
class Binding {
 public:
  explicit Binding(const Launcher& launcher) : launcher_(&launcher) {
    for (size_t i = 0; i < launcher.num_parameters; ++i)
      names_.push_back(PyUnicode_InternFromString(launcher.parameters[i].name));
  }

  void operator()(int device, uint64_t stream, int head_dim, const py::kwargs& given) const {
    std::array<Value, kMaxParameters> values;
    for (size_t i = 0; i < names_.size(); ++i) {
      PyObject* object = PyDict_GetItemWithError(given.ptr(), names_[i]);
      if (!object) refuse(std::string("needs ") + launcher_->parameters[i].name);
      values[i] = convert(launcher_->parameters[i], object);
    }
    if (given.size() != names_.size()) refuse_unknown(given);
    // The driver call can wait for the device's queue: never hold the GIL over it.
    py::gil_scoped_release release;
    launcher_->launch({device, stream, head_dim, values.data()});
  }

 private:
  Value convert(const Parameter& parameter, PyObject* object) const {
    Value value{};
    switch (parameter.kind) {
      case Kind::address:
        value.address = PyLong_AsUnsignedLongLong(object);
        break;
      case Kind::int32: {
        const long number = PyLong_AsLong(object);
        value.int32 = int32_t(number);
        if (value.int32 != number) refuse(parameter.name + std::string(" is not an int32"));
        break;
      }
      case Kind::float32:
        value.float32 = float(PyFloat_AsDouble(object));
        break;
    }
    if (PyErr_Occurred()) {
      PyErr_Clear();
      const char* expected[] = {"an address", "an int32", "a float"};
      refuse(parameter.name + std::string(" is not ") + expected[int(parameter.kind)]);
    }
    return value;
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw py::type_error(launcher_->name + std::string(": ") + what);
  }

  [[noreturn]] void refuse_unknown(const py::kwargs& given) const {
    std::string unknown;
    for (const auto& [name, value] : given)
      if (std::none_of(names_.begin(), names_.end(),
                       [&, wanted = name](PyObject* n) { return wanted.equal(py::handle(n)); }))
        unknown = py::str(name);
    refuse("does not take " + unknown);
  }

  const Launcher* launcher_;
  std::vector<PyObject*> names_;  // interned, so that a lookup compares addresses; never released
};

void bind(py::module_& module, const Launcher& launcher) {
  module.def(launcher.name, Binding(launcher), py::kw_only(), py::arg("device"), py::arg("stream"),
             py::arg("head_dim"));
}

}  // namespace
}  // namespace dflash

PYBIND11_MODULE(_C, module) {
  using namespace dflash;
  module.doc() = "Ahead-of-time compiled DFlash kernels: CUDA images with their launcher, and CPU.";
  const auto release = py::call_guard<py::gil_scoped_release>();

  py::class_<cpu::Shape>(module, "CpuShape")
      .def(py::init([](int64_t num_blocks, int64_t block_size, int64_t num_ctx, int64_t q_heads,
                       int64_t kv_heads, int64_t head_dim, int64_t window, bool causal, float scale,
                       bool bf16) {
             return cpu::Shape{num_blocks, block_size, num_ctx, q_heads, kv_heads,
                               head_dim,   window,     causal,  scale,
                               bf16 ? cpu::DType::bf16 : cpu::DType::f32};
           }),
           py::kw_only(), py::arg("num_blocks"), py::arg("block_size"), py::arg("num_ctx"),
           py::arg("q_heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("window"),
           py::arg("causal"), py::arg("scale"), py::arg("bf16"));
  module.def("attention_cpu_forward", &attention_cpu_forward, release);
  module.def("attention_cpu_backward", &attention_cpu_backward, release);
  module.def("cpu_instruction_set", &cpu::instruction_set);

  for (size_t i = 0; i < kNumLaunchers; ++i) bind(module, kLaunchers[i]);
  module.def("warmup", &warmup, py::arg("device"), release,
             "Load every kernel image for a CUDA device now (before capturing a graph).");
  module.def("describe_device", &describe_device, py::arg("device"),
             "Name of a CUDA device and the images it runs.");
  module.def("device_images",
             [](int device) {
               const ImageChoice c = device_images(device);
               return py::make_tuple(c.sm, c.is_ptx);
             },
             py::arg("device"), "(architecture, is PTX) of the images a CUDA device runs.");
  module.def("choose_image",
             [](int sm) {
               const ImageChoice c = choose_image(sm, "sm_" + std::to_string(sm));
               return py::make_tuple(c.sm, c.is_ptx);
             },
             py::arg("sm"), "(architecture, is PTX) of the images a device of this capability runs.");
  module.def("driver_error", [] { return driver().error; },
             "Why there is no usable NVIDIA driver; empty if there is one.");
  module.def("built_architectures", &built_architectures);
  module.def("build_report", &build_report,
             "JSON list of the embedded images: kernel, head_dim, sm, bytes, registers, stack.");
  module.attr("KEY_TILE") = kKeyTile;
}
