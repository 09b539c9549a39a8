// The C functions through which ctypes calls the emulated kernels (../emulated.py).
#include "attention.h"

namespace pyattn::cuda {
// Weak: null for the dtypes that a library was not compiled for.
extern const DeviceKernels batch_double [[gnu::weak]], batch_float [[gnu::weak]], batch_bf16 [[gnu::weak]],
    batch_f16_warpgroups [[gnu::weak]], packed_double [[gnu::weak]], packed_float [[gnu::weak]],
    packed_bf16 [[gnu::weak]], packed_f16_warpgroups [[gnu::weak]];
}  // namespace pyattn::cuda

using namespace pyattn;

static const DeviceKernels& table(int dtype, const ForwardParams* p) {
  const DeviceKernels* const tables[][kNumDTypes] = {
      {&cuda::batch_double, &cuda::batch_float, &cuda::batch_bf16, &cuda::batch_f16_warpgroups},
      {&cuda::packed_double, &cuda::packed_float, &cuda::packed_bf16, &cuda::packed_f16_warpgroups}};
  return *tables[p->packed.sequences != nullptr][dtype];
}

extern "C" {
int64_t params_bytes() { return sizeof(BackwardParams); }
int64_t forward_bytes(int dtype, const ForwardParams* p) { return table(dtype, p).forward_bytes(*p); }
int64_t backward_bytes(int dtype, const BackwardParams* p, bool deterministic) {
  return table(dtype, p).backward_bytes(*p, deterministic);
}
const char* forward(int dtype, const ForwardParams* p) { return table(dtype, p).forward(*p, nullptr); }
const char* backward(int dtype, const BackwardParams* p, bool deterministic) {
  return table(dtype, p).backward(*p, deterministic, nullptr);
}
}
