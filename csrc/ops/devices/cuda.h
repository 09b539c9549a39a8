// CUDA as the operators see it: the ATen side of the GPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention.h"

namespace pyattn::cuda {

// Launch kernels on the current stream of q's device.
void forward(const at::Tensor& q, ForwardParams& p);
void backward(const at::Tensor& q, BackwardParams& p, bool deterministic);

}  // namespace pyattn::cuda
