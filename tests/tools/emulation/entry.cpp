// The emulated kernels for ctypes (../emulated.py).
#include "attention.h"

namespace pyattn::cuda {
extern const DeviceKernels kernels_double, kernels_float, kernels_bf16, kernels_f16;
}

using namespace pyattn;

static const DeviceKernels& table(int dtype) {
  const DeviceKernels* const tables[] = {&cuda::kernels_double, &cuda::kernels_float, &cuda::kernels_bf16,
                                         &cuda::kernels_f16};
  return *tables[dtype];
}

extern "C" {
int64_t params_bytes() { return sizeof(BackwardParams); }
int64_t forward_bytes(int dtype, const ForwardParams* p) { return table(dtype).forward_bytes(*p); }
int64_t backward_bytes(int dtype, const BackwardParams* p, bool deterministic) {
  return table(dtype).backward_bytes(*p, deterministic);
}
const char* forward(int dtype, const ForwardParams* p) { return table(dtype).forward(*p, nullptr); }
const char* backward(int dtype, const BackwardParams* p, bool deterministic) {
  return table(dtype).backward(*p, deterministic, nullptr);
}
}
