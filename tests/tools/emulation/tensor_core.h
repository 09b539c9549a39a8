// The tensor cores of an emulated GPU: c += a b in a warp's
// fragments, laid out as in csrc/cuda/ptx/ptx.h.
#pragma once

#include <cstdint>

namespace emulation {

void multiply_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

}  // namespace emulation
