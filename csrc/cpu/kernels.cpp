// The attention kernels, compiled once per instruction set, in the namespace PYATTN_ISA and over
// the header PYATTN_ISA_HEADER. Everything but the table at the end has internal linkage: of a weak
// symbol the linker keeps one copy, perhaps one that this machine can't run.
#include "attention.h"
#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "mask_rows.h"
#include "merge.h"
#include "peak.h"
#include "score.h"
#include "splits.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
constexpr Kernels kernels_for() {
  return {{"bias_rows", plan_bias_rows<S>, bias_rows<S>},
          {"mask_blocks", plan_mask_blocks<S>, mask_blocks<S>},
          {"forward", plan_forward<S>, forward<S, Plain>},
          {"merge_out", plan_merge_out<S>, merge_out<S, Plain>},
          {"backward", plan_backward<S>, backward<S, Plain>},
          {"reduce_dq", plan_reduce_dq<S>, reduce_dq<S, Plain>},
          peak<S>};
}

}  // namespace

extern const Kernels kernels[kNumDTypes];
const Kernels kernels[kNumDTypes] = {kernels_for<double>(), kernels_for<float>(), kernels_for<bf16>(),
                                     kernels_for<f16>()};

}  // namespace pyattn::PYATTN_ISA
