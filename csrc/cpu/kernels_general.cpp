// As kernels.cpp, for the other score. In one object, each would keep the compiler from inlining
// what both call, which took up to 8 % of the time of short sequences.
#include "cpu/kernels.h"
#include "cpu/tiles/score.h"

namespace pyattn::PYATTN_ISA {

extern const Kernels general_kernels[kNumDTypes];
const Kernels general_kernels[kNumDTypes] = {kernels_for<double, General>(), kernels_for<float, General>(),
                                             kernels_for<bf16, General>(), kernels_for<f16, General>()};

}  // namespace pyattn::PYATTN_ISA
