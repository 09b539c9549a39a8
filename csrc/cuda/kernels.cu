// The attention kernels for GPUs. Compiled for each dtype (PYATTN_DTYPE), once for batches and once for
// packed sequences (PYATTN_PACKED), over a header of primitives: ptx.h for a GPU, another for a host that
// emulates one. All of it has internal linkage but the table at the end.
#include <cstdint>
#include <type_traits>

#include "attention.h"
#include "cuda/add_queries.h"
#include "cuda/backward_keys.h"
#include "cuda/backward_queries.h"
#include "cuda/bias_gradient.h"
#include "cuda/bias_items.h"
#include "cuda/float64.h"
#include "cuda/forward.h"
#include "cuda/forward_splits.h"
#include "cuda/head_gradients.h"
#include "cuda/mask_rows.h"
#include "cuda/merge.h"
#include "cuda/primitives.h"
#include "cuda/row_terms.h"
#include "cuda/score.h"
#include "cuda/sequences.h"
#include "cuda/workspace.h"
#include "shared/bias.h"
#include "shared/heads.h"
#include "shared/index.h"
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

// f(kDim) for the smallest head dimension with kernels that holds both of the call's. General, packed
// sequences and splits have half as many (kFew), which take half as long to compile.
template <class Score, bool kFew = Score::kGeneral || PYATTN_PACKED, class F>
const char* with_dim(const ForwardParams& p, F f) {
  const int64_t dim = max(p.head_dim, p.head_dim_v);
  if constexpr (!kFew) {
    if (dim <= 32) return f(std::integral_constant<int, 32>());
    if (64 < dim && dim <= 96) return f(std::integral_constant<int, 96>());
    if (128 < dim && dim <= 192) return f(std::integral_constant<int, 192>());
  }
  if (dim <= 64) return f(std::integral_constant<int, 64>());
  if (dim <= 128) return f(std::integral_constant<int, 128>());
  return f(std::integral_constant<int, 256>());
}

template <class Score>
struct Chosen {
  using type = Score;
};

// f(Chosen<Score>) for the score of the call.
template <class S, class Params, class F>
const char* with_score(const Params& p, F f) {
  return general_score(p) ? f(Chosen<General<S>>()) : f(Chosen<Plain<S>>());
}

// Fills what no packed sequence has.
template <class S>
const char* launch_rest(const ForwardParams& p, const View& to, int64_t cols, Filled what, void* stream) {
  const int64_t tokens = what == Filled::kKeys ? p.packed.total_k : p.packed.total_q;
  return launch(fill_rest<S>, ceil_div(tokens, kFillWarps), kFillWarps * kWarpLanes, 0, stream,
                Rest{p, to, cols, what});
}

// Finds packed sequences, makes the mask's summaries where there are any, and leaves the rest of
// params.workspace.
template <class S>
const char* launch_mask(ForwardParams& p, void* stream) {
  if constexpr (PYATTN_PACKED)
    if (const char* error = launch(place_sequences<S>, 1, kWarpLanes, 0, stream, p)) return error;
  if (!needs_blocks(p)) return nullptr;
  place_mask(p);
  const char* error = launch(mask_rows<S>, ceil_div(mask_rows_count(p), kMaskWarps), kMaskThreads, 0, stream, p);
  if (error) return error;
  return launch(mask_blocks<S>, ceil_div(mask_blocks_count(p), kMaskThreads), kMaskThreads, 0, stream, p);
}

// Heads whose keys are split.
template <class S, class Score>
const char* launch_splits(const ForwardParams& few, void* stream) {
  const char* error = with_dim<Score, true>(few, [&](auto dim) {
    using Shape = ForwardShape<S, dim, Score, true>;
    return launch(forward<S, dim, Score, true>, {row_blocks(few, Shape::kRows), most_splits(few)}, Shape::kThreads,
                  Shape::kBytes, stream, few);
  });
  if (error) return error;
  return launch(merge_splits<S, Score>, {kv_heads(few), ceil_div(rows_of_head(few), kMergeWarps)},
                kMergeWarps * kWarpLanes, 0, stream, few);
}

template <class S>
const char* launch_forward(const ForwardParams& params, void* stream) {
  ForwardParams p = params;
  const char* error = launch_mask<S>(p, stream);
  if constexpr (PYATTN_PACKED)
    if (!error) error = launch_rest<S>(p, p.out, p.head_dim_v, Filled::kOut, stream);
  if (error) return error;
  if constexpr (std::is_same_v<S, double>)
    return launch(float64_forward<S, General<S>>, ceil_div(all_rows(p), kFloat64Warps), kFloat64Threads, 0, stream, p);
  else
    return with_score<S>(p, [&](auto chosen) {
      using Score = typename decltype(chosen)::type;
      const ForwardParams few = with_few_rows(p);
      const bool splits = most_splits(few) > 1;
      const char* error = nullptr;
      if (PYATTN_PACKED || !splits)  // packed, some sequences may be split and others not
        error = with_dim<Score>(p, [&](auto dim) {
          using Shape = ForwardShape<S, dim, Score, false>;
          return launch(forward<S, dim, Score, false>, row_blocks(p, Shape::kRows), Shape::kThreads, Shape::kBytes,
                        stream, p);
        });
      return !error && splits ? launch_splits<S, Score>(few, stream) : error;
    });
}

// dQ by the pass over keys. dslopes needs the pass over queries, which makes dQ too.
template <class S>
bool adds_queries(const BackwardParams& p, bool deterministic) {
  return sizeof(S) == 2 && !deterministic && !p.dslopes;
}

// dQ, dK and dV, what dslopes and dsinks are the sums of, and dbias where it does not broadcast.
template <class S, class Score>
const char* launch_gradients(const BackwardParams& p, bool deterministic, void* stream) {
  const char* error =
      launch(row_terms<S, Score>, ceil_div(all_rows(p), kRowTermsWarps), kRowTermsWarps * kWarpLanes, 0, stream, p);
  if (error) return error;
  if constexpr (sizeof(S) == 2)
    if (adds_queries<S>(p, deterministic)) {
      const int64_t sums = all_rows(p) * p.head_dim;
      if (sums)  // there are none without heads, rows or columns
        error = clear_memory(query_sums_of(p, 0, 0), sums * sizeof(float), stream);
      if (error) return error;
      error = with_dim<Score>(p, [&](auto dim) {
        using Keys = KeysShape<S, dim, Score>;
        return launch(backward_keys<S, dim, true, Score>, key_blocks(p, Keys::kKeys), Keys::kThreads, Keys::kBytes,
                      stream, p);
      });
      return error ? error : launch(round_queries<S>, ceil_div(sums, kRoundThreads), kRoundThreads, 0, stream, p);
    }
  return with_dim<Score>(p, [&](auto dim) {
    using Keys = KeysShape<S, dim, Score>;
    using Queries = QueriesShape<S, dim, Score>;
    const char* error = launch(backward_keys<S, dim, false, Score>, key_blocks(p, Keys::kKeys), Keys::kThreads,
                               Keys::kBytes, stream, p);
    if (error) return error;
    return launch(backward_queries<S, dim, Score>, row_blocks(p, Queries::kRows), Queries::kThreads, Queries::kBytes,
                  stream, p);
  });
}

template <class S>
const char* launch_gradients(const BackwardParams& p, [[maybe_unused]] bool deterministic, void* stream) {
  if constexpr (std::is_same_v<S, double>) {
    using Score = General<S>;
    const char* error =
        launch(float64_backward_keys<S, Score>, ceil_div(all_keys(p), kFloat64Warps), kFloat64Threads, 0, stream, p);
    if (error) return error;
    return launch(float64_backward_queries<S, Score>, ceil_div(all_rows(p), kFloat64Warps), kFloat64Threads, 0, stream,
                  p);
  } else {
    return with_score<S>(
        p, [&](auto chosen) { return launch_gradients<S, typename decltype(chosen)::type>(p, deterministic, stream); });
  }
}

// dbias where it broadcasts, and in float64.
template <class S>
const char* launch_bias(const BackwardParams& p, void* stream) {
  using Score = General<S>;
  if constexpr (std::is_same_v<S, double>)
    return launch(float64_backward_bias<S, Score>, ceil_div(BiasItems<1, 1>(p).count(), kFloat64Warps), kFloat64Threads,
                  0, stream, p);
  else
    return with_dim<Score>(p, [&](auto dim) {
      using Shape = QueriesShape<S, dim, Score>;
      return launch(backward_bias<S, dim, Score>, BiasItems<Shape::kRows, Shape::kKeys>(p).count(), Shape::kThreads,
                    Shape::kBytes, stream, p);
    });
}

template <class T>
const char* launch_row_sums(const BackwardParams& p, const T* terms, void* sums, bool one_for_all, void* stream) {
  if (!sums) return nullptr;
  RowSums<T> rows{terms, static_cast<T*>(sums), p.batch, p.num_heads_q, p.seqlen_q, one_for_all, nullptr};
  if (PYATTN_PACKED) rows.rows = p.packed.total_q;
  if (PYATTN_PACKED && one_for_all) rows.batch = 1;
  if (PYATTN_PACKED && !one_for_all) rows.sequences = p.packed.sequences;
  return launch(sum_rows<T>, ceil_div((one_for_all ? 1 : p.batch) * p.num_heads_q, kRowSumWarps),
                kRowSumWarps * kWarpLanes, 0, stream, rows);
}

// dbias, where there is one.
template <class S>
const char* launch_gradients_and_bias(const BackwardParams& p, bool deterministic, void* stream) {
  const bool bias_pass = p.dbias.data && (std::is_same_v<S, double> || !one_score_each(p));
  BackwardParams main = p;
  if (bias_pass) main.dbias.data = nullptr;
  const char* error = nullptr;
  if (const int64_t scores = p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k; main.dbias.data && scores) {
    const int64_t bytes = p.dbias.type == BiasType::kFloat32 ? sizeof(float) : sizeof(S);
    error = clear_memory(p.dbias.data, scores * bytes, stream);  // what no row sees is not reached
  }
  if (!error) error = launch_gradients<S>(main, deterministic, stream);
  return !error && bias_pass ? launch_bias<S>(p, stream) : error;
}

// Packed sequences have no bias. Rows of no sequence have no share of dslopes and dsinks.
template <class S, class T>
const char* launch_packed_gradients(const BackwardParams& p, bool deterministic, void* stream) {
  const char* error = nullptr;
  if (const int64_t terms = ((p.dslopes ? 1 : 0) + (p.dsinks ? 1 : 0)) * all_rows(p); terms)
    error = clear_memory(slope_terms_of<T>(p), terms * sizeof(T), stream);
  if (!error) error = launch_gradients<S>(p, deterministic, stream);
  if (!error) error = launch_rest<S>(p, p.dq, p.head_dim, Filled::kQueries, stream);
  if (!error) error = launch_rest<S>(p, p.dk, p.head_dim, Filled::kKeys, stream);
  return error ? error : launch_rest<S>(p, p.dv, p.head_dim_v, Filled::kKeys, stream);
}

template <class S>
const char* launch_backward(const BackwardParams& params, bool deterministic, void* stream) {
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  BackwardParams p = params;
  const char* error = launch_mask<S>(p, stream);
  if constexpr (PYATTN_PACKED) {
    if (!error) error = launch_packed_gradients<S, T>(p, deterministic, stream);
  } else {
    if (!error) error = launch_gradients_and_bias<S>(p, deterministic, stream);
  }
  if (!error) error = launch_row_sums(p, slope_terms_of<T>(p), p.dslopes, !p.score.slopes_stride_b, stream);
  if (!error) error = launch_row_sums(p, sink_terms_of<T>(p), p.dsinks, true, stream);
  return error;
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
#define PYATTN_TABLE_OF(layout, dtype) layout##_##dtype
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
