// The Python module pyattn._C: importing it registers the operators of ops.cpp. It carries introspection only; a tensor
// function bound here would be invisible to the dispatcher, and so to torch.compile, autograd and the profiler.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "attention.h"
#include "cpu/dispatch.h"

PYBIND11_MODULE(_C, m) {
  m.attr("version") = PYATTN_VERSION;
  m.attr("torch_version") = PYATTN_TORCH_VERSION;
  m.attr("compiler") = PYATTN_COMPILER;
  m.def("compiled_isas", &pyattn::compiled_isas, "Instruction sets in this build, best first.");
  m.def("available_isas", &pyattn::available_isas, "Those of them that this CPU runs, best first.");
  m.def("active_isa", &pyattn::active_isa, "The instruction set in use.");
  const std::map<std::string, pyattn::DType> dtypes{{"float64", pyattn::DType::kFloat64},
                                                    {"float32", pyattn::DType::kFloat32},
                                                    {"bfloat16", pyattn::DType::kBFloat16},
                                                    {"float16", pyattn::DType::kFloat16}};
  m.def(
      "spin",
      [dtypes](const std::string& dtype, int64_t rounds) { return pyattn::kernels(dtypes.at(dtype)).peak(rounds); },
      pybind11::arg("dtype"), pybind11::arg("rounds"), pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Do nothing but multiply and add between registers, and return how many floating-point operations that were.");
  m.def("set_isa", &pyattn::set_isa, pybind11::arg("name"), "Use the instruction set of that name from now on.");
}
