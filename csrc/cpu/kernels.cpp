// The attention kernels, compiled once per instruction set, in the namespace PYATTN_ISA and over
// the header PYATTN_ISA_HEADER. Everything but the table at the end has internal linkage: of a weak
// symbol the linker keeps one copy, perhaps one that this machine can't run.
#include "cpu/kernels.h"
#include "cpu/tiles/score.h"

namespace pyattn::PYATTN_ISA {

extern const Kernels kernels[kNumDTypes];
const Kernels kernels[kNumDTypes] = {kernels_for<double, Plain>(), kernels_for<float, Plain>(),
                                     kernels_for<bf16, Plain>(), kernels_for<f16, Plain>()};

}  // namespace pyattn::PYATTN_ISA
