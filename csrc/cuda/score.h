// Scores: the one place where a product of a query and a key becomes a score, and where the
// gradient of a score is taken back to the product. Kernels are templates over the score;
// softmax does not know which one it was.
#pragma once

#include "attention.h"
#include "primitives.h"
#include "product.h"

namespace pyattn::cuda {
namespace {

inline constexpr double kLog2e = 1.4426950408889634;
inline constexpr float kNegInf = -__builtin_inff();

// score = softmax_scale * (q . k) = factor * s, where s is the product with the sign of
// softmax_scale: a row's largest s is its largest score, and the factor enters with the
// exponential. row_max of the params is in units of s.
template <class S>
class Plain {
 public:
  PYATTN_DEVICE explicit Plain(const ForwardParams& p)
      : p_(p), exponent_(fmaxf(static_cast<float>(fabs(p.softmax_scale) * kLog2e), 0x1p-126f)) {}

  // Products of queries and keys -> s, in place, whichever way the tile lies.
  template <int kM, int kN>
  PYATTN_DEVICE void to_scores(Sums<kM, kN>& C) const {
    if (signbit(p_.softmax_scale)) each_sum<kM, kN>([&](int m, int n, int i, int, int) { C[m][n][i] = -C[m][n][i]; });
  }

  // dS, gradient of the scores -> gradient of the products
  // over dscale, in place: here they are the same.
  template <int kM, int kN>
  PYATTN_DEVICE void to_products(Sums<kM, kN>&) const {}

  // What dQ = dS K and dK = dS^T Q are multiplied by when they leave.
  PYATTN_DEVICE float dscale() const { return static_cast<float>(p_.softmax_scale); }

  // What exp takes for row_max. -inf - -inf is NaN: where nothing was seen yet, 0 is subtracted.
  PYATTN_DEVICE float shift(float row_max) const {
    if (row_max == kNegInf) return 0;
    return sizeof(S) == 4 ? row_max : row_max * exponent_;
  }

  // exp(score - largest score). In 16 bits one rounding fewer for
  // each weight, and one more that all weights of a row share.
  PYATTN_DEVICE float exp(float s, float shift) const {
    return sizeof(S) == 4 ? exp2((s - shift) * exponent_) : exp2(fmaf(s, exponent_, -shift));
  }

  // log(sum of exp(score)), with row_max = largest s and
  // row_sum = sum of exp(score - largest score).
  PYATTN_DEVICE float lse(float row_max, float row_sum) const {
    return row_max * static_cast<float>(fabs(p_.softmax_scale)) + logf(row_sum);
  }

 private:
  const ForwardParams& p_;
  float exponent_;  // factor * log2(e), and not 0, so that -inf stays what it is
};

// The kernels for float64 take scores one by one, and
// nothing is left for the exponential: row_max is a score.
template <>
class Plain<double> {
 public:
  PYATTN_DEVICE explicit Plain(const ForwardParams& p) : scale_(p.softmax_scale) {}

  PYATTN_DEVICE double to_score(double product) const { return scale_ * product; }
  PYATTN_DEVICE double dscale() const { return scale_; }

 private:
  double scale_;
};

}  // namespace
}  // namespace pyattn::cuda
