// Kernel launches on a stream, in order. After an error, nothing more is launched.
#pragma once

#include "cuda/ptx/primitives.h"
#include "shared/index.h"

namespace pyattn::cuda {
namespace {

class Launches {
 public:
  explicit Launches(void* stream) : stream_(stream) {}

  template <class Params>
  void run(void (*kernel)(Params), Grid grid, int threads, int shared_bytes, const Params& p) {
    if (!error_) error_ = launch(kernel, grid, threads, shared_bytes, stream_, p);
  }
  // Launches a kernel with one warp per item.
  template <class Params>
  void run_warps(void (*kernel)(Params), int64_t items, int warps, const Params& p) {
    run(kernel, ceil_div(items, warps), warps * kWarpLanes, 0, p);
  }
  // Launches a kernel whose Shape gives its threads and shared memory.
  template <class Shape, class Params>
  void run_shape(void (*kernel)(Params), Grid grid, const Params& p) {
    run(kernel, grid, Shape::kThreads, Shape::kBytes, p);
  }
  void clear(void* memory, int64_t bytes) {
    if (!error_) error_ = clear_memory(memory, bytes, stream_);
  }
  const char* error() const { return error_; }

 private:
  void* stream_;
  const char* error_ = nullptr;
};

}  // namespace
}  // namespace pyattn::cuda
