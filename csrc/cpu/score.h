// Scores: the one place where a product of a query and a key becomes a score, and where the
// gradient of a score is taken back to the product. Kernels are templates over the score;
// softmax does not know which one it was.
#pragma once

#include "attention.h"
#include "matrix.h"
#include "simd.h"
#include "strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// score = softmax_scale * (q . k), and softmax_scale = power * factor, power being the
// power of two below it, with its sign, and at most 1. Q is packed times power, which is
// exact and can't overflow, so tiles hold score / factor: the score is rounded once, as
// it enters the exponential. (Q times softmax_scale * log2(e) would be rounded, and
// overflow for scores near the largest number.)
template <class T>
class Plain {
 public:
  T power = 0;  // what Q is packed times
  T dscale;     // what dQ = dS K and dK = dS^T Q are multiplied by when they leave

  explicit Plain(const ForwardParams& p) : dscale(static_cast<T>(p.softmax_scale)) {
    if (p.softmax_scale == 0) return;
    int exponent;  // of a fraction in [1/2, 1)
    __builtin_frexp(p.softmax_scale, &exponent);
    const double magnitude = __builtin_ldexp(1.0, exponent > 1 ? 0 : exponent - 1);
    const double exact = __builtin_copysign(magnitude, p.softmax_scale);
    power = static_cast<T>(exact), factor_ = static_cast<T>(p.softmax_scale / exact);
  }

  // S[keys][queries] or, in decoding, S[queries][keys], products -> what exp
  // takes, in place: here they are the same.
  void to_scores(Matrix<T>, const Tile&, Strip) const {}
  void to_scores_by_rows(Matrix<T>, const Tile&) const {}

  // dS[keys][queries], gradient of what exp takes -> gradient of the product over
  // dscale, in place: here they are the same.
  void to_products(Matrix<T>, const Tile&, Strip) const {}

  // exp(score) for s = score / factor; exactly 1 at 0.
  PYATTN_MEMBER_INLINE vec<T> exp(vec<T> s) const { return exp2<T>(s * static_cast<T>(factor_ * kLog2e)); }

  // log(sum of exp(score)), with row_max = largest score / factor and
  // row_sum = sum of exp(score - largest score).
  T lse(T row_max, T row_sum) const { return factor_ * row_max + log(row_sum); }

 private:
  T factor_ = 1;
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
