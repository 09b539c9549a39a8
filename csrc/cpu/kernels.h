// The table of the kernels for one score.
#pragma once

#include "attention.h"
#include "cpu/passes/backward.h"
#include "cpu/passes/bias_gradient.h"
#include "cpu/passes/decode.h"
#include "cpu/passes/forward.h"
#include "cpu/passes/head_gradients.h"
#include "cpu/passes/mask_rows.h"
#include "cpu/passes/merge.h"
#include "cpu/products/peak.h"
#include "cpu/passes/reduce.h"
#include "cpu/plan/units.h"

namespace pyattn::PYATTN_ISA {
namespace {

// A score without a bias has no gradient of one: a pass without items.
template <class S, template <class> class Score>
constexpr Pass<BackwardParams> bias_gradient_pass() {
  if constexpr (Score<S>::kBias)
    return {"bias_gradient", plan_bias_gradient<S>, bias_gradient<S, Score>};
  else
    return {"bias_gradient", [](const BackwardParams&) { return Plan{}; }, nullptr};
}

template <class S, template <class> class Score>
constexpr Kernels kernels_for() {
  return {{"count_units", plan_count_units<S>, count_units<S>},
          {"mask_rows", plan_mask_rows<S>, mask_rows<S>},
          {"bias_rows", plan_bias_rows<S>, bias_rows<S>},
          {"mask_blocks", plan_mask_blocks<S>, mask_blocks<S>},
          {"forward", plan_forward<S>, forward<S, Score>},
          {"merge_out", plan_merge_out<S>, merge_out<S, Score>},
          {"backward", plan_backward<S>, backward<S, Score>},
          {"reduce", plan_reduce<S>, reduce<S, Score>},
          bias_gradient_pass<S, Score>(),
          {"head_gradients", plan_head_gradients<S>, head_gradients<S, Score>},
          peak<S>};
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
