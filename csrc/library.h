// The library libpyattn as its callers see it: passes, profiles, instruction sets, GPU kernels. It
// knows neither torch nor Python, so it is compiled once for all of them. One border for each torch
// (ops/) makes tensors of its results, and the module _C (bindings.cpp) tells Python about it.
#pragma once

#include <string>
#include <vector>

#include "attention.h"

#ifndef _WIN32
#define PYATTN_API __attribute__((visibility("default")))
#elif defined(pyattn_EXPORTS)  // by CMake, for the library's own files
#define PYATTN_API __declspec(dllexport)
#else
#define PYATTN_API __declspec(dllimport)
#endif

namespace pyattn {

// Memory of the host, to be given back by free(context).
struct Memory {
  void* data;
  void* context;
  void (*free)(void* context);
};

// The threads and memory of the library's caller. The library starts no threads: torch sets the number of its
// OpenMP threads lazily and for each calling thread, which a second team would not follow.
struct Host {
  int64_t (*max_tasks)();  // the number of threads that run_tasks may use
  // Calls task(data) `tasks` times, on several threads. Rethrows the first exception.
  void (*run_tasks)(int64_t tasks, void (*task)(void* data), void* data);
  Memory (*allocate)(int64_t bytes);  // throws
};

// Run all passes of the active instruction set. They neither check params nor keep them.
PYATTN_API void run_forward(const Host& host, DType type, ForwardParams& p);
PYATTN_API void run_backward(const Host& host, DType type, BackwardParams& p);

// Instruction sets.
PYATTN_API std::vector<std::string> compiled_isas();   // those of this build
PYATTN_API std::vector<std::string> available_isas();  // those that this CPU has, best first
PYATTN_API std::string active_isa();
PYATTN_API void set_isa(const std::string& name);  // throws std::invalid_argument
// Multiplies and adds in registers of the active instruction set; returns the number of operations.
PYATTN_API double peak(DType type, int64_t rounds);

// The part of a pass that one thread ran.
struct TaskProfile {
  const char* pass;
  std::string isa;
  int64_t thread;            // the system's ID, as in torch's profiler
  int64_t begin_ns, end_ns;  // since 1970
  int64_t items;             // how many of the pass's work items it ran
  PhaseCounts counts;
};
PYATTN_API void start_profile();
PYATTN_API std::vector<TaskProfile> stop_profile();

// The compute capabilities that this build has GPU kernels for: "80" for sm_80. None in a build without CUDA.
PYATTN_API std::vector<std::string> gpu_architectures();
// The kernels for a GPU of this architecture; null in a build without CUDA.
PYATTN_API const DeviceKernels* gpu_kernels(DType type, bool packed, int architecture);
// Makes a GPU current for the kernels' own CUDA runtime; returns an error, or null.
PYATTN_API const char* use_gpu(int index);
PYATTN_API int gpu_architecture(int index);         // 90 for sm_90
PYATTN_API bool has_gpu_kernels(int architecture);  // that run on such a GPU

}  // namespace pyattn
