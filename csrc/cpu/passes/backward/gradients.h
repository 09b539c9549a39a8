// Gradients: writes sums of dQ, dK and dV, scaled and rounded. Those of a part of the keys are not
// rounded: the caller adds them to other parts' in the compute type.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/pack.h"
#include "cpu/simd/simd.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// sums[rows][head_dim] -> dq of the rows from r0 on.
template <class S>
void write_rows(const BackwardParams& p, const Head& head, int64_t r0, Matrix<const Compute<S>> sums, int64_t rows,
                Compute<S> scale) {
  using T = Compute<S>;
  if (p.part)
    unpack_rows<T>(sums, rows, p.head_dim, scale, [&](int64_t i) { return head.row<T>(p.dq, r0 + i); });
  else
    unpack_rows<S>(sums, rows, p.head_dim, scale, [&](int64_t i) { return head.row<S>(p.dq, r0 + i); });
}

// The same for dk or dv, of the keys from j0 on.
template <class S>
void write_keys(const BackwardParams& p, const Head& head, const View& gradient, int64_t j0,
                Matrix<const Compute<S>> sums, int64_t keys, int64_t cols, Compute<S> scale) {
  using T = Compute<S>;
  if (p.part)
    unpack_rows<T>(sums, keys, cols, scale, [&](int64_t j) { return head.key<T>(gradient, j0 + j); });
  else
    unpack_rows<S>(sums, keys, cols, scale, [&](int64_t j) { return head.key<S>(gradient, j0 + j); });
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
