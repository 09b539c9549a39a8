// GPUs: which kernels this build has, and whether the current one can run them. Linked with its own
// CUDA runtime and with none of torch's CUDA libraries, so the library also loads without any.
#include "library.h"

#ifdef PYATTN_CUDA_ARCHS

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
#include <sstream>

namespace pyattn {

namespace cuda {

extern const DeviceKernels batch_double, batch_float, batch_bf16, batch_f16, packed_double, packed_float, packed_bf16,
    packed_f16;
#ifdef PYATTN_WARPGROUPS
extern const DeviceKernels batch_bf16_warpgroups, batch_f16_warpgroups, packed_bf16_warpgroups, packed_f16_warpgroups;
#endif

}  // namespace cuda

std::vector<std::string> gpu_architectures() {
  std::istringstream names(PYATTN_CUDA_ARCHS);
  return {std::istream_iterator<std::string>(names), {}};
}

const DeviceKernels* gpu_kernels(DType type, bool packed, [[maybe_unused]] int architecture) {
#ifdef PYATTN_WARPGROUPS
  if (architecture == 90 && type == DType::kBFloat16)
    return packed ? &cuda::packed_bf16_warpgroups : &cuda::batch_bf16_warpgroups;
  if (architecture == 90 && type == DType::kFloat16)
    return packed ? &cuda::packed_f16_warpgroups : &cuda::batch_f16_warpgroups;
#endif
  switch (type) {
    case DType::kFloat64: return packed ? &cuda::packed_double : &cuda::batch_double;
    case DType::kFloat32: return packed ? &cuda::packed_float : &cuda::batch_float;
    case DType::kBFloat16: return packed ? &cuda::packed_bf16 : &cuda::batch_bf16;
    default: return packed ? &cuda::packed_f16 : &cuda::batch_f16;
  }
}

const char* use_gpu(int index) {
  const cudaError_t error = cudaSetDevice(index);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// A kernel built for 8.0 also runs on 8.6 and 8.9, the later minor versions; one built for 90a runs on 9.0 only.
bool has_gpu_kernels(int architecture) {
  static const std::vector<std::string> built = gpu_architectures();
  return std::any_of(built.begin(), built.end(), [=](const std::string& name) {
    const int own = std::stoi(name);
    return name.back() == 'a' ? own == architecture : own / 10 == architecture / 10 && own <= architecture;
  });
}

int gpu_architecture(int index) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  return 10 * major + minor;
}

}  // namespace pyattn

#else

namespace pyattn {

std::vector<std::string> gpu_architectures() { return {}; }
const DeviceKernels* gpu_kernels(DType, bool, int) { return nullptr; }
const char* use_gpu(int) { return nullptr; }
int gpu_architecture(int) { return 0; }
bool has_gpu_kernels(int) { return false; }

}  // namespace pyattn

#endif
