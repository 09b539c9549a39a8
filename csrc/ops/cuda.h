// CUDA as the operators see it. A build without it has
// no_cuda.cpp in place of cuda.cpp and the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention.h"

namespace pyattn::cuda {

// Compute capabilities that there are kernels for, as in sm_80: "80".
std::vector<std::string> architectures();

// On q's device, on its current stream.
void forward(const at::Tensor& q, ForwardParams& p);
void backward(const at::Tensor& q, BackwardParams& p, bool deterministic);

}  // namespace pyattn::cuda
