// The Python module pyattn._C: importing it registers the operators of ops.cpp. It carries introspection only; a tensor
// function bound here would be invisible to the dispatcher, and so to torch.compile, autograd and the profiler.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/dispatch.h"

PYBIND11_MODULE(_C, m) {
  m.attr("version") = PYATTN_VERSION;
  m.attr("torch_version") = PYATTN_TORCH_VERSION;
  m.attr("compiler") = PYATTN_COMPILER;
  m.def("compiled_isas", &pyattn::compiled_isas, "Instruction sets in this build, best first.");
  m.def("available_isas", &pyattn::available_isas, "Those of them that this CPU runs, best first.");
  m.def("active_isa", &pyattn::active_isa, "The instruction set in use.");
  m.def("set_isa", &pyattn::set_isa, pybind11::arg("name"), "Use the instruction set of that name from now on.");
}
