// The Python module pyattn._C: introspection of libpyattn. It knows no torch. Tensor functions are operators of ops/: one
// bound here would be invisible to the dispatcher, and so to torch.compile, autograd and the profiler.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <string>

#include "library.h"

using namespace pyattn;

// No function here touches Python objects of another thread, and the state that they share is atomic or under a mutex, so
// free-threaded Pythons keep running without the GIL (csrc/README.md).
PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
  m.attr("version") = PYATTN_VERSION;
  m.attr("compiler") = PYATTN_COMPILER;
  m.def("compiled_isas", &compiled_isas, "Instruction sets in this build.");
  m.def("available_isas", &available_isas, "Instruction sets of this build that the CPU supports, best first.");
  m.attr("cuda_archs") = gpu_architectures();
  m.def("active_isa", &active_isa, "The instruction set in use.");
  const std::map<std::string, DType> dtypes{{"float64", DType::kFloat64},
                                            {"float32", DType::kFloat32},
                                            {"bfloat16", DType::kBFloat16},
                                            {"float16", DType::kFloat16}};
  m.def(
      "spin", [dtypes](const std::string& dtype, int64_t rounds) { return peak(dtypes.at(dtype), rounds); },
      pybind11::arg("dtype"), pybind11::arg("rounds"), pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Multiply and add between registers only, and return the number of floating-point operations.");
  m.attr("phases") = std::vector<std::string>(std::begin(kPhaseNames), std::end(kPhaseNames));
  pybind11::class_<TaskProfile>(m, "TaskProfile", "The part of a pass that one thread ran.")
      .def_property_readonly("pass_name", [](const TaskProfile& t) { return t.pass; })
      .def_readonly("isa", &TaskProfile::isa)
      .def_readonly("thread", &TaskProfile::thread, "The system's ID of the thread, as in torch's profiler.")
      .def_readonly("begin_ns", &TaskProfile::begin_ns, "Nanoseconds since 1970.")
      .def_readonly("end_ns", &TaskProfile::end_ns)
      .def_readonly("items", &TaskProfile::items, "How many of the pass's work items it ran.")
      .def_property_readonly(
          "ticks", [](const TaskProfile& t) { return std::to_array(t.counts.ticks); },
          "Ticks of the processor's time-stamp counter, by phase.")
      .def_property_readonly(
          "flops", [](const TaskProfile& t) { return std::to_array(t.counts.flops); },
          "Floating-point operations of the products, by phase, including those for masked keys in a tile.");
  m.def("start_profile", &start_profile, "Start recording the tasks of each pass.");
  m.def("stop_profile", &stop_profile, "Stop recording, and return the tasks since start_profile.");
  m.def("set_isa", &set_isa, pybind11::arg("name"), "Make the instruction set with that name the active one.");
}
