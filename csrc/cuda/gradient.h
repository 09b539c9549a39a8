// The gradient of softmax, elementwise between the products of
// backward, in the passes over queries and over keys alike.
#pragma once

#include "attention.h"
#include "primitives.h"
#include "product.h"

namespace pyattn::cuda {
namespace {

// What backward needs to know of a row.
struct alignas(16) RowTerms {
  float shift, factor;  // P = exp(S, shift) * factor
  float delta;          // rowsum(dO * O) - dlse
  float share;          // 1; 0 for a row that sees one key alone, whose weight is 1 whatever dP is
};

// S -> W = P * D and dP -> dS, in place, in sums that begin at row, or key, `first` of the
// tile; terms(at, row) are those of the at-th of the lane's rows. D is what dropout
// multiplies the weights by.
//
//   P = exp(S - lse)      dS = P * (dP * D - delta)
template <Layout kLayout, class Score, class Dropout, class Terms, int kM, int kN>
PYATTN_DEVICE void to_gradients(const Score& score, const Dropout& dropout, Sums<kM, kN>& S, Sums<kM, kN>& dP,
                                int first, Terms terms) {
  score.to_scores(S);
  dropout.template apply<kLayout>(dP, first);
  each_query<kLayout, kM, kN>(first, [&](int at, int row, auto each_key) {
    const RowTerms of_row = terms(at, row);
    each_key([&](int m, int n, int i, int) {
      S[m][n][i] = score.exp(S[m][n][i], of_row.shift) * of_row.factor;
      dP[m][n][i] = S[m][n][i] * fmaf(dP[m][n][i], of_row.share, -of_row.delta);
    });
  });
  score.to_products(dP);
  dropout.template apply<kLayout>(S, first);
}

}  // namespace
}  // namespace pyattn::cuda
