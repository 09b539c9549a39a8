// Products by the warps of a pass, each by itself or four together.
#pragma once

#include "cuda/products/fragment.h"
#include "cuda/products/matrix.h"
#include "cuda/products/product.h"
#include "cuda/products/warpgroup.h"

namespace pyattn::cuda {
namespace {

// C = A B^T: rows of A from the warp's first one on, rows of B from 0 on.
template <class S, Team kTeam, int kM, int kN, class TA, class TB>
PYATTN_DEVICE void multiply_rows(Sums<kM, kN>& C, TA A, int row, TB B) {
  if constexpr (kTeam == Team::kWarpgroup)
    multiply_together([&] { start_rows(C[0], A, row, B); }, C[0]);
  else
    multiply_rows<S>(C, A, row, B);
}

// Two such products of the same rows: P = A B^T and dP = dA dB^T.
template <class S, Team kTeam, int kM, int kN, class TA, class TB>
PYATTN_DEVICE void multiply_rows(Sums<kM, kN>& P, TA A, TB B, Sums<kM, kN>& dP, TA dA, TB dB, int row) {
  if constexpr (kTeam == Team::kWarpgroup)
    multiply_together([&] { start_rows(P[0], A, row, B), start_rows(dP[0], dA, row, dB); }, P[0], dP[0]);
  else
    multiply_rows<S>(P, A, row, B), multiply_rows<S>(dP, dA, row, dB);
}

// C += W B for the columns of the part.
template <class S, Team kTeam, int kParts, int kM, int kK, int kN, class TB>
PYATTN_DEVICE void multiply_sums(Sums<kM, kN>& C, const Sums<kM, kK>& W, TB B, int part) {
  if constexpr (kTeam == Team::kWarpgroup) {
    Factors<S, kK / 2> factors;
    factors.take(W[0]);
    multiply_together([&] { start_sums(C[0], factors, B); }, C[0], factors.slice);
  } else {
    multiply_sums<S, kParts>(C, W, B, part);
  }
}

}  // namespace
}  // namespace pyattn::cuda
