// The attention kernels. Compiled once per instruction set, in the namespace PYATTN_ISA and over its header. Everything
// but the table at the end has internal linkage: of a weak symbol the linker keeps one copy, and it might be the one
// that this machine cannot run.
#include PYATTN_ISA_HEADER

#include "rows.h"
#include "simd/math.h"
// Each of these builds on the ones before it.
#include "gemm.h"
#include "tile.h"
#include "stopwatch.h"
#include "mask.h"
#include "operand.h"
#include "softmax.h"
#include "dropout.h"
#include "decode.h"
#include "forward.h"
#include "splits.h"
#include "backward.h"
#include "peak.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
constexpr Kernels kernels_for() {
  return {{"forward", plan_forward<S>, forward<S>},
          {"merge_out", plan_merge_out<S>, merge_out<S>},
          {"backward", plan_backward<S>, backward<S>},
          {"reduce_dq", plan_reduce_dq<S>, reduce_dq<S>},
          peak<S>};
}

}  // namespace

extern const Kernels kernels[kNumDTypes];
const Kernels kernels[kNumDTypes] = {kernels_for<double>(), kernels_for<float>(), kernels_for<bf16>(),
                                     kernels_for<f16>()};

}  // namespace pyattn::PYATTN_ISA
