// The attention kernels, compiled once per instruction set, in the namespace PYATTN_ISA, over the header PYATTN_ISA_HEADER.
// Everything but the table at the end has internal linkage: the linker keeps one copy of a weak symbol, perhaps one that this
// machine can't run.
#include "attention.h"
#include "cpu/passes/backward/backward.h"
#include "cpu/passes/backward/bias_gradient.h"
#include "cpu/passes/forward.h"
#include "cpu/passes/backward/head_gradients.h"
#include "cpu/passes/listed/backward.h"
#include "cpu/passes/listed/block_backward.h"
#include "cpu/passes/listed/block_forward.h"
#include "cpu/passes/listed/few_rows.h"
#include "cpu/passes/listed/forward.h"
#include "cpu/passes/listed/lane_backward.h"
#include "cpu/passes/listed/lane_rows.h"
#include "cpu/passes/mask_rows.h"
#include "cpu/passes/merge.h"
#include "cpu/passes/backward/reduce.h"
#include "cpu/plan/units.h"
#include "cpu/products/peak.h"
#include "cpu/tiles/score.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The function that runs a pass with products: it configures the thread's tile registers first, where there are any.
template <class P, void (*kRun)(const P&, int64_t, int64_t, void*)>
constexpr auto with_products() {
#ifdef PYATTN_HAS_TILE_REGISTERS
  return +[](const P& p, int64_t begin, int64_t end, void* scratch) {
    const TileRegisters registers;
    kRun(p, begin, end, scratch);
  };
#else
  return kRun;
#endif
}

// Forward and backward: passes/listed has them for calls that run through segments, which have plain scores.
template <class S>
Plan plan_any_forward(const ForwardParams& p) {
  if (!uses_segments<S>(p)) return plan_forward<S, S>(p);
  if (uses_listed_blocks<S>(p)) return plan_block_forward<S>(p);
  return few_rows<S>(p, most_rows(p)) ? plan_listed_forward<S, FewListedRows<S>>(p)
                                      : plan_listed_forward<S, LaneListedRows<S>>(p);
}
template <class S, template <class> class Score>
void any_forward(const ForwardParams& p, int64_t begin, int64_t end, void* scratch) {
  if constexpr (!Score<S>::kBias) {
    if (uses_listed_blocks<S>(p)) return block_forward<S, Score<S>>(p, begin, end, scratch);
    if (uses_segments<S>(p))
      return few_rows<S>(p, most_rows(p)) ? listed_forward<S, Score<S>, FewListedRows<S>>(p, begin, end, scratch)
                                          : listed_forward<S, Score<S>, LaneListedRows<S>>(p, begin, end, scratch);
  }
  forward<S, Score, S>(p, begin, end, scratch);
}
template <class S>
Plan plan_any_backward(const BackwardParams& p) {
  if (!uses_segments<S>(p)) return plan_backward<S>(p);
  if (uses_listed_blocks<S>(p)) return plan_block_backward<S>(p);
  return few_rows<S>(p, most_rows(p)) ? plan_listed_backward<S>(p) : plan_lane_backward<S>(p);
}
template <class S, template <class> class Score>
void any_backward(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  if constexpr (!Score<S>::kBias) {
    if (uses_listed_blocks<S>(p)) return block_backward<S, Score<S>>(p, begin, end, scratch);
    if (uses_segments<S>(p))
      return few_rows<S>(p, most_rows(p)) ? listed_backward<S, Score<S>>(p, begin, end, scratch)
                                          : lane_backward<S, Score<S>>(p, begin, end, scratch);
  }
  backward<S, Score>(p, begin, end, scratch);
}

// A score without a bias has no bias gradient: its pass has no items.
template <class S, template <class> class Score>
constexpr Pass<BackwardParams> bias_gradient_pass() {
  if constexpr (Score<S>::kBias)
    return {"bias_gradient", plan_bias_gradient<S>, with_products<BackwardParams, bias_gradient<S, Score>>()};
  else
    return {"bias_gradient", [](const BackwardParams&) { return Plan{}; }, nullptr};
}

// Forward of float queries over keys and values stored in 8 bits, as KV: among float's kernels, and where the instruction
// set multiplies bytes, over int8 among bfloat16's, which are all that such a set has.
template <class S, template <class> class Score, class KV>
constexpr Pass<ForwardParams> byte_pass(const char* name) {
#ifdef PYATTN_HAS_BYTE_PRODUCTS
  constexpr bool kHas = std::is_same_v<KV, i8>;
#else
  constexpr bool kHas = std::is_same_v<S, float>;
#endif
  if constexpr (kHas)
    return {name, plan_forward<float, KV>, with_products<ForwardParams, forward<float, Score, KV>>()};
  else
    return {name, nullptr, nullptr};
}

template <class S, template <class> class Score>
constexpr Kernels kernels_for() {
  return {{"count_units", plan_count_units, count_units<S>},
          {"mask_rows", plan_mask_rows, mask_rows<S>},
          {"bias_rows", plan_bias_rows, bias_rows<S>},
          {"mask_blocks", plan_mask_blocks<S>, mask_blocks<S>},
          {"forward", plan_any_forward<S>, with_products<ForwardParams, any_forward<S, Score>>()},
          byte_pass<S, Score, i8>("forward_int8"),
          byte_pass<S, Score, f8>("forward_float8"),
          {"merge_out", plan_merge_out<S>, merge_out<S, Score>},
          {"backward", plan_any_backward<S>, with_products<BackwardParams, any_backward<S, Score>>()},
          {"reduce", plan_reduce<S>, reduce<S, Score>},
          bias_gradient_pass<S, Score>(),
          {"head_gradients", plan_head_gradients, head_gradients<S, Score>},
          {"relative_gradient", plan_relative_gradient, relative_gradient<S>},
          peak<S>};
}

template <class S>
constexpr DTypeKernels both_scores() {
  return {kernels_for<S, Plain>(), kernels_for<S, General>()};
}

}  // namespace

#ifdef PYATTN_HAS_BF16_PAIRS  // the kernels of other dtypes are AVX-512's
extern const DTypeKernels kernels[1];
const DTypeKernels kernels[1] = {both_scores<bf16>()};
#else
extern const DTypeKernels kernels[kNumDTypes];
const DTypeKernels kernels[kNumDTypes] = {both_scores<double>(), both_scores<float>(), both_scores<bf16>(),
                                          both_scores<f16>()};
#endif

}  // namespace pyattn::PYATTN_ISA
