// The attention kernels. Compiled once per instruction set, PYATTN_ISA naming both its header under simd/ and the
// namespace. Everything but the table at the end has internal linkage: of a weak symbol the linker keeps one copy, and
// it might be the one that this machine cannot run.
#define PYATTN_QUOTE(x) #x
#define PYATTN_HEADER(isa) PYATTN_QUOTE(simd / isa.h)
#include PYATTN_HEADER(PYATTN_ISA)

#include "simd/math.h"
// Each of these builds on the ones before it.
#include "gemm.h"
#include "mask.h"
#include "tile.h"
#include "softmax.h"
#include "forward.h"
#include "backward.h"

namespace pyattn::PYATTN_ISA {

#define PYATTN_KERNELS(S)                                                                               \
  {                                                                                                     \
    {plan_forward<S>, forward<S>}, {plan_backward<S>, backward<S>}, { plan_reduce_dq<S>, reduce_dq<S> } \
  }

extern const Kernels kernels[kNumDTypes];
const Kernels kernels[kNumDTypes] = {PYATTN_KERNELS(double), PYATTN_KERNELS(float), PYATTN_KERNELS(bf16),
                                     PYATTN_KERNELS(f16)};

}  // namespace pyattn::PYATTN_ISA
