// The first pass of backward: each row's terms for the other passes, above all
// delta = rowsum(dO * O), and its share of dsinks; and the last one, sums of such shares. One warp per row, or sum.
#pragma once

#include "attention.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/tiles/score.h"
#include "cuda/plan/sequences.h"
#include "cuda/plan/workspace.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

// Whether row r adds 0 to every gradient although its weights are 0 / 0, because all its visible keys score -inf: its
// out and lse have gradients of 0, as those of a row that was merged with weight 0. Any other such row adds NaN.
// All lanes of a warp ask for the same row.
template <class S, class T>
PYATTN_DEVICE bool adds_nothing(const BackwardParams& p, const Head& head, int64_t r, T row_max, T row_sum, T dlse) {
  if ((row_sum != 0 && row_max != kNegInf) || dlse != 0) return false;
  const S* dout = head.row<const S>(p.dout, r);
  int given = 0;
  for (int64_t c = lane(); c < p.head_dim_v; c += kWarpLanes) given += widen(dout[c]) != 0;
  return sum_lanes(given) == 0;
}

inline constexpr int kRowTermsWarps = 4;

template <class S, class Score>
PYATTN_KERNEL(kRowTermsWarps* kWarpLanes)
row_terms(const __grid_constant__ BackwardParams p) {
  const int64_t at = block_index() * kRowTermsWarps + warp();
  const Item row = row_at(p, at);
  if (!row.there) return;
  const Head head(p, row.head);
  const int64_t r = row.place, index = head.index(p, r);
  const S *out = head.row<const S>(p.out, r), *dout = head.row<const S>(p.dout, r);
  float delta = 0;
  for (int64_t c = lane(); c < p.head_dim_v; c += kWarpLanes) delta = fmaf(widen(dout[c]), widen(out[c]), delta);
  delta = sum_lanes(delta);
  const float dlse = p.dlse ? static_cast<const float*>(p.dlse)[index] : 0;
  const float row_max = static_cast<const float*>(p.row_max)[index],
              row_sum = static_cast<const float*>(p.row_sum)[index];
  const bool nothing = adds_nothing<S>(p, head, r, row_max, row_sum, dlse);
  if (lane() != 0) return;
  const Score score(p);
  const float sink =
      p.score.sinks ? score.from_sink(static_cast<const float*>(p.score.sinks)[head.query_head(r)]) : kNegInf;
  const bool alone = !p.part && sink == kNegInf && Mask(p, head).exact_keys_of<S>(r).count() == 1;
  const RowTerms terms =
      nothing ? RowTerms{}
              : RowTerms{score.shift(row_max), 1 / row_sum, (alone ? 0 : delta) - dlse, alone ? 0.0f : 1.0f};
  row_terms_of(p, 0, 0)[at] = terms;
  // A row that sees neither a key nor a sink has row_sum 0.
  if (p.dsinks)
    sink_terms_of<float>(p)[index] =
        sink == kNegInf ? 0 : score.weight_of_sink(sink, row_max) * terms.factor * -terms.delta;
}

// ---- Gradients of slopes and sinks: sums over the rows of a query head, in double, in one order ----

inline constexpr int kRowSumWarps = 4;

template <class T>
struct RowSums {
  const T* terms;  // (batch, heads, rows)
  T* sums;         // (batch or 1, heads)
  int64_t batch, heads, rows;
  bool one_for_all;           // one sum for all sequences
  const Sequence* sequences;  // packed, with terms (heads, rows) and sums (batch, heads); else null
};

template <class T>
PYATTN_KERNEL(kRowSumWarps* kWarpLanes)
sum_rows(const __grid_constant__ RowSums<T> p) {
  const int64_t at = block_index() * kRowSumWarps + warp(), count = (p.one_for_all ? 1 : p.batch) * p.heads;
  if (at >= count) return;
  double sum = 0;
  const auto add = [&](int64_t first, int64_t rows) {
    for (int64_t i = lane(); i < rows; i += kWarpLanes) sum += p.terms[first + i];
  };
  if (p.sequences) {
    const Sequence& own = p.sequences[at / p.heads];
    add(at % p.heads * p.rows + own.first_q, own.seqlen_q);
  } else {
    for (int64_t head = at; head < p.batch * p.heads; head += count) add(head * p.rows, p.rows);
  }
  sum = sum_lanes(sum);
  if (lane() == 0) p.sums[at] = static_cast<T>(sum);
}

}  // namespace
}  // namespace pyattn::cuda
