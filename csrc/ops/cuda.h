// CUDA as the operators see it. A build without CUDA has no_cuda.cpp instead of cuda.cpp and the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention.h"

namespace pyattn::cuda {

// The compute capabilities that this build has kernels for: "80" for sm_80.
std::vector<std::string> architectures();

// Launch kernels on the current stream of q's device.
void forward(const at::Tensor& q, ForwardParams& p);
void backward(const at::Tensor& q, BackwardParams& p, bool deterministic);

}  // namespace pyattn::cuda
