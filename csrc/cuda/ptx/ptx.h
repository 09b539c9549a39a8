// Instructions of GPUs from compute capability 8.0 on, and kernel launches: all that the
// kernels know of CUDA. tests/tools/emulation/host.h has the same functions for a host, so
// the kernels' source runs without a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define PYATTN_DEVICE __device__ __forceinline__
// Arguments: the threads of a block and, optionally, how many blocks a multiprocessor shall hold.
#define PYATTN_KERNEL(...) __global__ void __launch_bounds__(__VA_ARGS__)

namespace pyattn::cuda {
namespace {

inline constexpr int kWarpLanes = 32;

PYATTN_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
PYATTN_DEVICE int64_t block_index() { return blockIdx.x; }
PYATTN_DEVICE int64_t block_index_y() { return blockIdx.y; }

PYATTN_DEVICE char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

// ---- Block ----

// With wgmma, what threads have written to shared memory is visible to the tensor cores after a barrier too.
PYATTN_DEVICE void show_tensor_cores() {
#if PYATTN_WARPGROUPS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
PYATTN_DEVICE void barrier() {
  show_tensor_cores();
  __syncthreads();
}
PYATTN_DEVICE bool barrier_or(bool any) {
  show_tensor_cores();
  return __syncthreads_or(any);
}
// Several threads may set the same flag at once.
PYATTN_DEVICE void set_flag(char& flag) { static_cast<volatile char&>(flag) = 1; }
PYATTN_DEVICE void add_atomically(float* to, float x) { atomicAdd(to, x); }

// ---- Warp ----

template <class T>
PYATTN_DEVICE T shuffle_xor(T x, int lanes) {
  return __shfl_xor_sync(0xffffffff, x, lanes);
}

// An address in shared memory.
using SharedAddress = uint32_t;
PYATTN_DEVICE SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}

// Loads four matrices of 8 rows of 16 bytes; lane l gives the address of row l % 8 of matrix
// l / 8. Lane l gets 4-byte word l % 4 of row l / 4 of each; transposed, with 2-byte elements,
// rows 2 (l % 4) and 2 (l % 4) + 1 of column l / 4.
PYATTN_DEVICE void load_matrices(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

PYATTN_DEVICE void load_matrices_transposed(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

PYATTN_DEVICE uint32_t load_word(SharedAddress address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

PYATTN_DEVICE void load_words(uint32_t (&words)[4], SharedAddress address) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Loads 16 bytes of global memory that the kernel only reads, once; the address is a multiple of 16.
PYATTN_DEVICE void load_16_bytes(uint32_t (&words)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
}

// c += a b on tensor cores, a 16 x 16 (or 8), b 16 (or 8) x 8,
// c 16 x 8. With g = lane / 4 and t = lane % 4 a lane holds
//
//   c  rows g, g + 8, columns 2t, 2t + 1       c[0] (g, 2t)  c[1] (g, 2t + 1)  c[2] (g + 8, 2t)  c[3] (g + 8, 2t + 1)
//   a  16-bit pairs: a[0] (g, 2t)  a[1] (g + 8, 2t)  a[2] (g, 2t + 8)  a[3] (g + 8, 2t + 8)     b[0] (2t, g)  b[1] (2t + 8, g)
//      tf32:         a[0] (g, t)   a[1] (g + 8, t)   a[2] (g, t + 4)   a[3] (g + 8, t + 4)      b[0] (t, g)   b[1] (t + 4, g)
#define PYATTN_MMA(shape, types)                                                                                    \
  asm volatile("mma.sync.aligned." shape ".row.col." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
PYATTN_DEVICE void multiply_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  PYATTN_MMA("m16n8k16", "f32.f16.f16.f32");
}
PYATTN_DEVICE void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  PYATTN_MMA("m16n8k16", "f32.bf16.bf16.f32");
}
PYATTN_DEVICE void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  PYATTN_MMA("m16n8k8", "f32.tf32.tf32.f32");
}
#undef PYATTN_MMA

// ---- Asynchronous copies from global to shared memory ----

// Copies the first `bytes` of 16 and sets the others to 0. Both addresses are multiples of 16.
PYATTN_DEVICE void copy_16_bytes(SharedAddress to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Waits for the thread's own copies; other threads may read them after a barrier.
PYATTN_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Arithmetic ----

// 0 below 2^-126, NaN stays NaN; within 2 ulp.
PYATTN_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp; 0 for an infinite x.
PYATTN_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To the nearest with 10 bits of mantissa, ties away from zero.
PYATTN_DEVICE uint32_t round_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// Two 16-bit numbers, low in the low half.
PYATTN_DEVICE uint32_t pack_f16(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
PYATTN_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
PYATTN_DEVICE float widen_f16(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

PYATTN_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
PYATTN_DEVICE float float_of(uint32_t x) { return __uint_as_float(x); }
PYATTN_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }

// x, opaque to the compiler, which therefore computes here what depends on it, instead
// of keeping that in registers from one iteration of a loop to the next.
PYATTN_DEVICE unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- Launch ----

// Both return an error message, or null.

inline const char* message(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears it for the next caller
  return cudaGetErrorString(error);
}

inline const char* clear_memory(void* p, int64_t bytes, void* stream) {
  return message(cudaMemsetAsync(p, 0, bytes, static_cast<cudaStream_t>(stream)));
}

// Blocks of threads.
struct Grid {
  int64_t x, y;

  Grid(int64_t x, int64_t y = 1) : x(x), y(y) {}
};

template <class Params>
const char* launch(void (*kernel)(Params), Grid grid, int threads, int shared_bytes, void* stream, const Params& p) {
  if (grid.x == 0 || grid.y == 0) return nullptr;
  if (grid.x > INT32_MAX) return "more than 2^31 - 1 blocks of rows";
  const void* function = reinterpret_cast<const void*>(kernel);
  void* arguments[] = {const_cast<Params*>(&p)};
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess)
    error = cudaLaunchKernel(function, dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y)),
                             dim3(threads), arguments, shared_bytes, static_cast<cudaStream_t>(stream));
  return message(error);
}

}  // namespace
}  // namespace pyattn::cuda

#include "cuda/ptx/wgmma.h"
