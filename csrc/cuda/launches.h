// Kernel launches on a stream, in order; after one that fails, none follows.
#pragma once

#include "cuda/primitives.h"
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
  // A kernel of which a warp takes an item.
  template <class Params>
  void run_warps(void (*kernel)(Params), int64_t items, int warps, const Params& p) {
    run(kernel, ceil_div(items, warps), warps * kWarpLanes, 0, p);
  }
  // A kernel that has a shape.
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
