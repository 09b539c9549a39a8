// The hyperbolic tangent of softcap.
#pragma once

#include "cuda/ptx/primitives.h"

namespace pyattn::cuda {
namespace {

// tanh(x) of any float. NaN stays NaN; +-1 from 9.02 on; odd, and exactly x below 2^-13.
// Error at most 2 ulp where exp2 and reciprocal are exact to half an ulp, 5 with a GPU's.
// |x| below 0.625: x + x^3 P(x^2); above: 1 - 2 / (exp(2 |x|) + 1), which near 0 would cancel.
// P minimizes the largest relative error of tanh, 4e-9 (least squares, reweighted).
PYATTN_DEVICE float tanh(float x) {
  const float square = x * x;
  float p = -5.7169935e-3f;
  p = fmaf(p, square, 2.0650536e-2f);
  p = fmaf(p, square, -5.374348e-2f);
  p = fmaf(p, square, 0.13331491f);
  p = fmaf(p, square, -0.33333284f);
  const float magnitude = fabsf(x), near = fmaf(p * square, x, x);
  const float far = fmaf(-2, reciprocal(exp2(magnitude * 2.8853901f) + 1), 1);  // 2 log2(e)
  return magnitude < 0.625f ? near : copysignf(far, x);
}

// 1 - tanh(x)^2 = w (2 - w), w = 1 - tanh|x|, because 1 - t * t cancels where t is near 1. NaN stays NaN; 1 at 0,
// 0 where exp(2 |x|) is infinite. Its relative error grows as that of exp2: 4e-6 at 20.
PYATTN_DEVICE float tanh_derivative(float x) {
  const float w = 2 * reciprocal(exp2(fabsf(x) * 2.8853901f) + 1);
  return fmaf(-w, w, w + w);
}

}  // namespace
}  // namespace pyattn::cuda
