// The ATen side of the CUDA kernels: device, stream, workspace, errors. Linked with its own CUDA
// runtime and with none of torch's CUDA libraries, so the module also loads where torch has none.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "ops/cuda.h"

namespace pyattn::cuda {

extern const DeviceKernels batch_double, batch_float, batch_bf16, batch_f16, packed_double, packed_float, packed_bf16,
    packed_f16;

namespace {

const DeviceKernels& kernels(at::ScalarType type, bool packed) {
  switch (type) {
    case at::kDouble: return packed ? packed_double : batch_double;
    case at::kFloat: return packed ? packed_float : batch_float;
    case at::kBFloat16: return packed ? packed_bf16 : batch_bf16;
    default: return packed ? packed_f16 : batch_f16;
  }
}

// torch's current stream of the device. It is looked up at run time, because c10 declares it only in
// a library that a torch without CUDA lacks.
void* current_stream(at::DeviceIndex device) {
  using Get = int32_t (*)(int32_t, void**);
  static const Get get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Get>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
  }();
  void* stream = nullptr;
  TORCH_CHECK(get && get(device, &stream) == 0, "pyattn: torch must have a current CUDA stream, got none on device ",
              static_cast<int>(device));
  return stream;
}

void check(const char* error) { TORCH_CHECK(!error, "pyattn: CUDA kernels can't be launched, got \"", error, "\""); }
void check(cudaError_t error) { check(error == cudaSuccess ? nullptr : cudaGetErrorString(error)); }

// A kernel built for 8.0 also runs on 8.6 and 8.9, the later minor versions; one built for 90a runs on 9.0 only.
void check_architecture(at::DeviceIndex device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  static const std::vector<std::string> built = architectures();
  const auto runs = [&](const std::string& name) {
    const int architecture = std::stoi(name), least = architecture % 10;
    return architecture / 10 == major && (name.back() == 'a' ? least == minor : least <= minor);
  };
  TORCH_CHECK_NOT_IMPLEMENTED(std::any_of(built.begin(), built.end(), runs),
                              "pyattn: the GPU must be one of the architectures of this build (sm_", PYATTN_CUDA_ARCHS,
                              "; PYATTN_CUDA_ARCHITECTURES chooses them), got sm_", major, minor);
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

// Runs f(stream) with q's device current, for torch and for our own CUDA runtime.
template <class F>
void on_device_of(const at::Tensor& q, const ForwardParams& p, F f) {
  check_sizes(p);
  const c10::DeviceGuard guard(q.device());
  check(cudaSetDevice(q.device().index()));
  check_architecture(q.device().index());
  f(current_stream(q.device().index()));
}

at::Tensor scratch(const at::Tensor& q, int64_t bytes) {
  return at::empty({bytes}, q.options().dtype(at::kByte).memory_format(std::nullopt));
}

}  // namespace

std::vector<std::string> architectures() {
  std::istringstream names(PYATTN_CUDA_ARCHS);
  return {std::istream_iterator<std::string>(names), {}};
}

void forward(const at::Tensor& q, ForwardParams& p) {
  on_device_of(q, p, [&](void* stream) {
    const DeviceKernels& table = kernels(q.scalar_type(), p.packed.sequences);
    const at::Tensor workspace = scratch(q, table.forward_bytes(p));
    p.workspace = workspace.mutable_data_ptr();
    check(table.forward(p, stream));
  });
}

void backward(const at::Tensor& q, BackwardParams& p, bool deterministic) {
  on_device_of(q, p, [&](void* stream) {
    const DeviceKernels& table = kernels(q.scalar_type(), p.packed.sequences);
    const at::Tensor workspace = scratch(q, table.backward_bytes(p, deterministic));
    p.workspace = workspace.mutable_data_ptr();
    check(table.backward(p, deterministic, stream));
  });
}

}  // namespace pyattn::cuda
