// The attention kernels for GPUs. Compiled for each dtype (PYATTN_DTYPE), once for batches and once for
// packed sequences (PYATTN_PACKED), over a header of primitives: ptx.h for a GPU, the emulator's host.h
// for a host. All of it but the table at the end has internal linkage.
#include <type_traits>

#include "cuda/passes/add_queries.h"
#include "cuda/passes/backward_keys.h"
#include "cuda/passes/backward_queries.h"
#include "cuda/passes/bias_gradient.h"
#include "cuda/plan/bias_items.h"
#include "cuda/passes/decode.h"
#include "cuda/passes/float64.h"
#include "cuda/passes/forward.h"
#include "cuda/passes/forward_together.h"
#include "cuda/plan/forward_splits.h"
#include "cuda/launches.h"
#include "cuda/passes/mask_rows.h"
#include "cuda/passes/merge.h"
#include "cuda/ptx/primitives.h"
#include "cuda/passes/relative_gradient.h"
#include "cuda/passes/row_terms.h"
#include "cuda/tiles/score.h"
#include "cuda/plan/sequences.h"
#include "cuda/plan/workspace.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

int64_t kv_heads(const ForwardParams& p) { return p.batch * p.num_heads_kv; }
int64_t all_keys(const ForwardParams& p) {
  return p.num_heads_kv * (PYATTN_PACKED ? p.packed.total_k : p.batch * p.seqlen_k);
}
int64_t rows_of_head(const ForwardParams& p) { return p.seqlen_q * group_size(p); }
int64_t row_blocks(const ForwardParams& p, int64_t rows) { return kv_heads(p) * ceil_div(rows_of_head(p), rows); }
int64_t key_blocks(const ForwardParams& p, int64_t keys) { return kv_heads(p) * ceil_div(p.seqlen_k, keys); }

// Calls f(kDim) with the smallest head dimension, among those with kernels, that holds both of the call's.
// General scores, packed sequences and splits have half as many (kFew), which halves their compile time.
template <class Score, bool kFew = Score::kGeneral || PYATTN_PACKED || PYATTN_WARPGROUPS, class F>
void with_dim(const ForwardParams& p, F f) {
  const int64_t dim = max(p.head_dim, p.head_dim_v);
  if constexpr (!kFew) {
    if (dim <= 32) return f(std::integral_constant<int, 32>());
    if (64 < dim && dim <= 96) return f(std::integral_constant<int, 96>());
    if (128 < dim && dim <= 192) return f(std::integral_constant<int, 192>());
  }
  if (dim <= 64) return f(std::integral_constant<int, 64>());
  if (dim <= 128) return f(std::integral_constant<int, 128>());
  f(std::integral_constant<int, 256>());
}

// Calls f(std::type_identity<Score>) with the score of the call.
template <class S, class Params, class F>
void with_score(const Params& p, F f) {
  if (general_score(p))
    f(std::type_identity<General<S>>());
  else
    f(std::type_identity<Plain<S>>());
}

// Fills the tokens of no packed sequence.
template <class S>
void launch_rest(Launches& launches, const ForwardParams& p, const View& to, int64_t cols, Filled what) {
  launches.run_warps(fill_rest<S>, what == Filled::kKeys ? p.packed.total_k : p.packed.total_q, kFillWarps,
                     Rest{p, to, cols, what});
}

// Places packed sequences and computes the mask's summaries, where there are any. params.workspace then
// begins after them.
template <class S>
void launch_mask(Launches& launches, ForwardParams& p) {
  if constexpr (PYATTN_PACKED) launches.run(place_sequences<S>, 1, kWarpLanes, 0, p);
  if (!needs_blocks(p)) return;
  place_mask(p);
  launches.run_warps(mask_rows<S>, mask_rows_count(p), kMaskWarps, p);
  launches.run(mask_blocks<S>, ceil_div(mask_blocks_count(p), kMaskThreads), kMaskThreads, 0, p);
}

// Forward for heads whose keys are split.
template <class S, class Score>
void launch_splits(Launches& launches, const ForwardParams& few) {
  const bool few_rows = most_rows(few) <= kDecodeRows && decodes(few);  // every head's
  with_dim<Score, true>(few, [&](auto dim) {
    if (few_rows || (PYATTN_PACKED && decodes(few)))
      launches.run_shape<DecodeShape<S, dim>>(decode<S, dim, Score>, {kv_heads(few), most_splits(few)}, few);
    if (few_rows) return;
    using Shape = ForwardShape<S, dim, Score, true>;
    launches.run_shape<Shape>(forward<S, dim, Score, true>, {row_blocks(few, Shape::kRows), most_splits(few)}, few);
  });
  launches.run(merge_splits<S, Score>, {kv_heads(few), rows_of_head(few)}, kMergeWarps * kWarpLanes, merge_bytes(few),
               few);
}

template <class S>
const char* launch_forward(const ForwardParams& params, void* stream) {
  Launches launches(stream);
  ForwardParams p = params;
  launch_mask<S>(launches, p);
  if constexpr (PYATTN_PACKED) launch_rest<S>(launches, p, p.out, p.head_dim_v, Filled::kOut);
  if constexpr (std::is_same_v<S, double>)
    launches.run_warps(float64_forward<S, General<S>>, all_rows(p), kFloat64Warps, p);
  else
    with_score<S>(p, [&](auto chosen) {
      using Score = typename decltype(chosen)::type;
      const ForwardParams few = with_few_rows(p);
      const bool splits = most_splits(few) > 1;
      if (PYATTN_PACKED || !splits)  // of packed sequences, some may be split and others not
        with_dim<Score>(p, [&](auto dim) {
          if constexpr (!Score::kGeneral && kTeamOf<S, dim> == Team::kWarpgroup) {
            using Shape = TogetherShape<S, dim, Score>;
            launches.run_shape<Shape>(forward_together<S, dim, Score>, row_blocks(p, Shape::kRows), p);
          } else {
            using Shape = ForwardShape<S, dim, Score, false>;
            launches.run_shape<Shape>(forward<S, dim, Score, false>, row_blocks(p, Shape::kRows), p);
          }
        });
      if (splits) launch_splits<S, Score>(launches, few);
    });
  return launches.error();
}

// Whether the pass over keys adds up dQ. dslopes and drelative need the pass over queries, which computes dQ too.
template <class S>
bool adds_queries(const BackwardParams& p, bool deterministic) {
  return sizeof(S) == 2 && !deterministic && !p.dslopes && !p.drelative;
}

// Computes dQ, dK and dV, the row terms that dslopes, dsinks and drelative sum up, and dbias where it does not broadcast.
template <class S, class Score>
void launch_gradients(Launches& launches, const BackwardParams& p, bool deterministic) {
  launches.run_warps(row_terms<S, Score>, all_rows(p), kRowTermsWarps, p);
  if constexpr (sizeof(S) == 2)
    if (adds_queries<S>(p, deterministic)) {
      const int64_t sums = all_rows(p) * p.head_dim;
      if (sums)  // 0 without heads, rows or columns
        launches.clear(query_sums_of(p, 0, 0), sums * sizeof(float));
      with_dim<Score>(p, [&](auto dim) {
        using Keys = KeysShape<S, dim, Score>;
        launches.run_shape<Keys>(backward_keys<S, dim, true, Score>, key_blocks(p, Keys::kKeys), p);
      });
      return launches.run(round_queries<S>, ceil_div(sums, kRoundThreads), kRoundThreads, 0, p);
    }
  with_dim<Score>(p, [&](auto dim) {
    using Keys = KeysShape<S, dim, Score>;
    using Queries = QueriesShape<S, dim, Score>;
    launches.run_shape<Keys>(backward_keys<S, dim, false, Score>, key_blocks(p, Keys::kKeys), p);
    launches.run_shape<Queries>(backward_queries<S, dim, Score>, row_blocks(p, Queries::kRows), p);
  });
}

template <class S>
void launch_gradients(Launches& launches, const BackwardParams& p, [[maybe_unused]] bool deterministic) {
  if constexpr (std::is_same_v<S, double>) {
    using Score = General<S>;
    launches.run_warps(float64_backward_keys<S, Score>, all_keys(p), kFloat64Warps, p);
    launches.run_warps(float64_backward_queries<S, Score>, all_rows(p), kFloat64Warps, p);
  } else {
    with_score<S>(
        p, [&](auto chosen) { launch_gradients<S, typename decltype(chosen)::type>(launches, p, deterministic); });
  }
}

// Computes dbias where it broadcasts, and in float64.
template <class S>
void launch_bias(Launches& launches, const BackwardParams& p) {
  using Score = General<S>;
  if constexpr (std::is_same_v<S, double>)
    launches.run_warps(float64_backward_bias<S, Score>, BiasItems<1, 1>(p).count(), kFloat64Warps, p);
  else
    with_dim<Score>(p, [&](auto dim) {
      using Shape = HeadShape<S, dim, Score>;
      launches.run_shape<Shape>(backward_bias<S, dim, Score>, BiasItems<Shape::kRows, Shape::kKeys>(p).count(), p);
    });
}

template <class T>
void launch_row_sums(Launches& launches, const BackwardParams& p, const T* terms, void* sums, bool one_for_all) {
  if (!sums) return;
  RowSums<T> rows{terms, static_cast<T*>(sums), p.batch, p.num_heads_q, p.seqlen_q, one_for_all, nullptr};
  if (PYATTN_PACKED) rows.rows = p.packed.total_q;
  if (PYATTN_PACKED && one_for_all) rows.batch = 1;
  if (PYATTN_PACKED && !one_for_all) rows.sequences = p.packed.sequences;
  launches.run_warps(sum_rows<T>, (one_for_all ? 1 : p.batch) * p.num_heads_q, kRowSumWarps, rows);
}

// Computes drelative after the pass over queries. Entries that no score takes become 0.
template <class S, class T>
void launch_relative(Launches& launches, const BackwardParams& p) {
  using Score = General<S>;
  if constexpr (std::is_same_v<S, double>)
    launches.run_warps(float64_backward_relative<S, Score>, Bands<1>(p).count(p), kFloat64Warps, p);
  else
    with_dim<Score>(p, [&](auto dim) {
      using Shape = BandShape<S, dim, Score>;
      launches.run_shape<Shape>(backward_relative<S, dim, Score>, Bands<Shape::kDiagonals>(p).count(p), p);
    });
  for (int end = 0; end < 2; ++end)
    launch_row_sums(launches, p, end_terms_of<T>(p, end), end_sums_of<T>(p, end), false);
  launches.run(sum_relative<T>, ceil_div(relative_entries(p), kRelativeThreads), kRelativeThreads, 0, p);
}

// The gradients of a batch, with dbias where it is wanted.
template <class S>
void launch_gradients_and_bias(Launches& launches, const BackwardParams& p, bool deterministic) {
  const bool bias_pass = p.dbias.data && (std::is_same_v<S, double> || !one_score_each(p));
  BackwardParams main = p;
  if (bias_pass) main.dbias.data = nullptr;
  if (const int64_t scores = p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k; main.dbias.data && scores) {
    const int64_t bytes = p.dbias.type == BiasType::kFloat32 ? sizeof(float) : sizeof(S);
    launches.clear(p.dbias.data, scores * bytes);  // tiles that no row sees are skipped
  }
  launch_gradients<S>(launches, main, deterministic);
  if (bias_pass) launch_bias<S>(launches, p);
}

// Packed sequences have no bias. Rows of no sequence add 0 to dslopes and dsinks, and nothing to drelative.
template <class S, class T>
void launch_packed_gradients(Launches& launches, const BackwardParams& p, bool deterministic) {
  if (const int64_t terms = ((p.dslopes ? 1 : 0) + (p.dsinks ? 1 : 0)) * all_rows(p); terms)
    launches.clear(slope_terms_of<T>(p), terms * sizeof(T));
  launch_gradients<S>(launches, p, deterministic);
  with_written<S>(p, [&](auto type) {
    using R = decltype(type);
    launch_rest<R>(launches, p, p.dq, p.head_dim, Filled::kQueries);
    launch_rest<R>(launches, p, p.dk, p.head_dim, Filled::kKeys);
    launch_rest<R>(launches, p, p.dv, p.head_dim_v, Filled::kKeys);
  });
}

template <class S>
const char* launch_backward(const BackwardParams& params, bool deterministic, void* stream) {
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  Launches launches(stream);
  BackwardParams p = params;
  launch_mask<S>(launches, p);
  if (const int64_t terms = 2 * all_rows(p); p.drelative && terms)
    launches.clear(end_terms_of<T>(p, 0), terms * sizeof(T));
  if constexpr (PYATTN_PACKED)
    launch_packed_gradients<S, T>(launches, p, deterministic);
  else
    launch_gradients_and_bias<S>(launches, p, deterministic);
  launch_row_sums(launches, p, slope_terms_of<T>(p), p.dslopes, !p.score.slopes_stride_b);
  launch_row_sums(launches, p, sink_terms_of<T>(p), p.dsinks, true);
  if (p.drelative) launch_relative<S, T>(launches, p);
  return launches.error();
}

template <class S>
int64_t forward_bytes(const ForwardParams& p) {
  return mask_bytes(p) + (std::is_same_v<S, double> ? 0 : SplitResults::bytes(with_few_rows(p)));
}

template <class S>
int64_t backward_bytes(const BackwardParams& p, bool deterministic) {
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  return mask_bytes(p) + workspace_bytes<T>(p, adds_queries<S>(p, deterministic));
}

}  // namespace

// batch_float, packed_float and so on.
#if PYATTN_WARPGROUPS
#define PYATTN_TABLE_OF(layout, dtype) layout##_##dtype##_warpgroups
#else
#define PYATTN_TABLE_OF(layout, dtype) layout##_##dtype
#endif
#define PYATTN_TABLE(layout, dtype) PYATTN_TABLE_OF(layout, dtype)
#if PYATTN_PACKED
#define PYATTN_LAYOUT packed
#else
#define PYATTN_LAYOUT batch
#endif
extern const DeviceKernels PYATTN_TABLE(PYATTN_LAYOUT, PYATTN_DTYPE);
const DeviceKernels PYATTN_TABLE(PYATTN_LAYOUT, PYATTN_DTYPE) = {
    forward_bytes<PYATTN_DTYPE>, backward_bytes<PYATTN_DTYPE>, launch_forward<PYATTN_DTYPE>,
    launch_backward<PYATTN_DTYPE>};

}  // namespace pyattn::cuda
