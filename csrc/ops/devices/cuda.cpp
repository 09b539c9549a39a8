// The ATen side of the CUDA kernels: device, stream, workspace, errors. It links none of torch's CUDA libraries, so it
// also loads where torch has none.
#include "ops/devices/cuda.h"

#include <ATen/DynamicLibrary.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "library.h"
#include "ops/checks.h"

namespace pyattn::cuda {
namespace {

// torch's current stream of the device. It is looked up at run time, because c10 declares it only in
// a library that a torch without CUDA lacks.
void* current_stream(at::DeviceIndex device) {
  using Get = int32_t (*)(int32_t, void**);
  static at::DynamicLibrary library("libtorch_cuda.so");
  static const auto get = reinterpret_cast<Get>(library.sym("aoti_torch_get_current_cuda_stream"));
  void* stream = nullptr;
  TORCH_CHECK(get(device, &stream) == 0, "pyattn: torch must have a current CUDA stream, got none on device ",
              static_cast<int>(device));
  return stream;
}

void check(const char* error) { TORCH_CHECK(!error, "pyattn: CUDA kernels can't be launched, got \"", error, "\""); }

void check_architecture(int architecture) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      has_gpu_kernels(architecture), "pyattn: the GPU must be one of the architectures of this build (sm_",
      c10::Join(" ", gpu_architectures()), "; PYATTN_CUDA_ARCHITECTURES chooses them), got sm_", architecture);
}

// Tiles are as wide as head_dim, and rows and keys of a head are counted in 32 bits.
void check_sizes(const ForwardParams& p) {
  TORCH_CHECK_NOT_IMPLEMENTED(std::max(p.head_dim, p.head_dim_v) <= 256,
                              "pyattn: on CUDA head_dim must be at most 256, got ", p.head_dim, " for q and k and ",
                              p.head_dim_v, " for v");
  const int64_t group = p.num_heads_kv ? p.num_heads_q / p.num_heads_kv : 0, rows = group * p.seqlen_q;
  const int64_t most = INT32_MAX - 256 * std::max<int64_t>(group, 1);  // leaves room for a tile more of each head
  TORCH_CHECK_NOT_IMPLEMENTED(rows <= most && p.seqlen_k <= most, "pyattn: on CUDA a KV head must have at most ", most,
                              " query rows and keys, got ", rows, " and ", p.seqlen_k);
}

// Runs f(kernels, stream) with q's device current, for torch and for the kernels' own CUDA runtime.
template <class F>
void on_device_of(const at::Tensor& q, const ForwardParams& p, F f) {
  const int architecture = gpu_architecture(q.device().index());
  const DeviceKernels* const kernels = gpu_kernels(dtype_of(q.scalar_type()), p.packed.sequences, architecture);
  TORCH_CHECK_NOT_IMPLEMENTED(kernels, "pyattn: tensors on a GPU need a build with CUDA kernels, got device ",
                              q.device(), " and a build without; rebuild with PYATTN_CUDA=ON, as the README says");
  check_sizes(p);
  const c10::DeviceGuard guard(q.device());
  check(use_gpu(q.device().index()));
  check_architecture(architecture);
  f(*kernels, current_stream(q.device().index()));
}

at::Tensor scratch(const at::Tensor& q, int64_t bytes) {
  return at::empty({bytes}, q.options().dtype(at::kByte).memory_format(std::nullopt));
}

}  // namespace

void forward(const at::Tensor& q, ForwardParams& p) {
  on_device_of(q, p, [&](const DeviceKernels& table, void* stream) {
    const at::Tensor workspace = scratch(q, table.forward_bytes(p));
    p.workspace = workspace.mutable_data_ptr();
    check(table.forward(p, stream));
  });
}

void backward(const at::Tensor& q, BackwardParams& p, bool deterministic) {
  on_device_of(q, p, [&](const DeviceKernels& table, void* stream) {
    const at::Tensor workspace = scratch(q, table.backward_bytes(p, deterministic));
    p.workspace = workspace.mutable_data_ptr();
    check(table.backward(p, deterministic, stream));
  });
}

}  // namespace pyattn::cuda
