// The attention kernels for GPUs. Compiled once per dtype (PYATTN_DTYPE) over a header of
// primitives: ptx.h for a GPU, another for a host that emulates one. All of it has internal
// linkage but the table at the end.
#include <cstdint>
#include <type_traits>

#include "add_queries.h"
#include "attention.h"
#include "backward_keys.h"
#include "backward_queries.h"
#include "float64.h"
#include "forward.h"
#include "gradient.h"
#include "heads.h"
#include "primitives.h"
#include "row_terms.h"
#include "score.h"

namespace pyattn::cuda {
namespace {

int64_t kv_heads(const ForwardParams& p) { return p.batch * p.num_heads_kv; }
int64_t all_keys(const ForwardParams& p) { return kv_heads(p) * p.seqlen_k; }
int64_t rows_of_head(const ForwardParams& p) { return p.seqlen_q * group_size(p); }
int64_t all_rows(const ForwardParams& p) { return kv_heads(p) * rows_of_head(p); }
int64_t row_blocks(const ForwardParams& p, int64_t rows) { return kv_heads(p) * ceil_div(rows_of_head(p), rows); }
int64_t key_blocks(const ForwardParams& p, int64_t keys) { return kv_heads(p) * ceil_div(p.seqlen_k, keys); }

template <class S>
constexpr bool kMayAddQueries = sizeof(S) == 2;

// f(kDim) for the smallest head dimension with kernels that holds both of the call's.
template <class F>
const char* with_dim(const ForwardParams& p, F f) {
  const int64_t dim = max(p.head_dim, p.head_dim_v);
  if (dim <= 32) return f(std::integral_constant<int, 32>());
  if (dim <= 64) return f(std::integral_constant<int, 64>());
  if (dim <= 96) return f(std::integral_constant<int, 96>());
  if (dim <= 128) return f(std::integral_constant<int, 128>());
  if (dim <= 192) return f(std::integral_constant<int, 192>());
  return f(std::integral_constant<int, 256>());
}

template <class S>
const char* launch_forward(const ForwardParams& p, void* stream) {
  if constexpr (std::is_same_v<S, double>)
    return launch(float64_forward<S, Plain<S>>, ceil_div(all_rows(p), kFloat64Warps), kFloat64Threads, 0, stream, p);
  else
    return with_dim(p, [&](auto dim) {
      using Shape = ForwardShape<S, dim>;
      return launch(forward<S, dim, Plain<S>>, row_blocks(p, Shape::kRows), Shape::kThreads, Shape::kBytes, stream, p);
    });
}

template <class S>
const char* launch_adding_queries(const BackwardParams& p, void* stream) {
  const int64_t sums = all_rows(p) * p.head_dim;
  const char* error = nullptr;
  if (sums)  // there are none without heads, rows or columns
    error = clear_memory(static_cast<RowTerms*>(p.workspace) + all_rows(p), sums * sizeof(float), stream);
  if (error) return error;
  error = with_dim(p, [&](auto dim) {
    using Keys = KeysShape<S, dim>;
    return launch(backward_keys<S, dim, true, Plain<S>>, key_blocks(p, Keys::kKeys), Keys::kThreads, Keys::kBytes,
                  stream, p);
  });
  return error ? error : launch(round_queries<S, Plain<S>>, ceil_div(sums, kRoundThreads), kRoundThreads, 0, stream, p);
}

template <class S>
const char* launch_backward(const BackwardParams& p, [[maybe_unused]] bool deterministic, void* stream) {
  const char* error;
  if constexpr (std::is_same_v<S, double>) {
    error =
        launch(float64_backward_keys<S, Plain<S>>, ceil_div(all_keys(p), kFloat64Warps), kFloat64Threads, 0, stream, p);
    if (error) return error;
    return launch(float64_backward_queries<S, Plain<S>>, ceil_div(all_rows(p), kFloat64Warps), kFloat64Threads, 0,
                  stream, p);
  } else {
    error = launch(row_terms<S, Plain<S>>, ceil_div(all_rows(p), kRowTermsWarps), kRowTermsWarps * kWarpLanes, 0,
                   stream, p);
    if (error) return error;
    if constexpr (kMayAddQueries<S>)
      if (!deterministic) return launch_adding_queries<S>(p, stream);
    return with_dim(p, [&](auto dim) {
      using Keys = KeysShape<S, dim>;
      using Queries = QueriesShape<S, dim>;
      const char* error = launch(backward_keys<S, dim, false, Plain<S>>, key_blocks(p, Keys::kKeys), Keys::kThreads,
                                 Keys::kBytes, stream, p);
      if (error) return error;
      return launch(backward_queries<S, dim, Plain<S>>, row_blocks(p, Queries::kRows), Queries::kThreads,
                    Queries::kBytes, stream, p);
    });
  }
}

template <class S>
int64_t workspace_bytes(const BackwardParams& p, bool deterministic) {
  const bool sums = kMayAddQueries<S> && !deterministic;
  return all_rows(p) * (sizeof(RowTerms) + (sums ? p.head_dim * sizeof(float) : 0));
}

}  // namespace

#define PYATTN_TABLE_OF(dtype) kernels_##dtype
#define PYATTN_TABLE(dtype) PYATTN_TABLE_OF(dtype)
extern const DeviceKernels PYATTN_TABLE(PYATTN_DTYPE);
const DeviceKernels PYATTN_TABLE(PYATTN_DTYPE) = {workspace_bytes<PYATTN_DTYPE>, launch_forward<PYATTN_DTYPE>,
                                                  launch_backward<PYATTN_DTYPE>};

}  // namespace pyattn::cuda
