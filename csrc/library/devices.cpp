#include <c10/util/Exception.h>

#include "ops/cuda.h"

namespace pyattn::cuda {
namespace {

[[noreturn]] void refuse(const at::Tensor& q) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "pyattn: tensors on a GPU need a build with CUDA kernels, got device ", q.device(),
                              " and a build without; rebuild with PYATTN_CUDA=ON, as the README says");
}

}  // namespace

std::vector<std::string> architectures() { return {}; }
void forward(const at::Tensor& q, ForwardParams&) { refuse(q); }
void backward(const at::Tensor& q, BackwardParams&, bool) { refuse(q); }

}  // namespace pyattn::cuda
