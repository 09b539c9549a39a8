// Products by a warpgroup, four consecutive warps, on the tensor cores of compute capability 9.0: wgmma reads matrices from
// shared memory itself, and computes while the warps go on. Matrices are panels of 128 bytes a row (SharedMatrix),
// which begin at a multiple of 1024 bytes.
#pragma once

#include <cstdint>
#include <type_traits>

namespace pyattn {
struct bf16;

namespace cuda {
namespace {

// A matrix as wgmma takes it, in units of 16 bytes: its address, the steps from a panel to the next and from eight rows to the
// next; and that 128 bytes are swizzled.
PYATTN_DEVICE uint64_t descriptor(SharedAddress address, int panel, int eight_rows) {
  return uint64_t{1} << 62 | static_cast<uint64_t>(eight_rows >> 4) << 32 | static_cast<uint64_t>(panel >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}
inline constexpr int kEightRows = 8 * 128;

// The compiler has written these registers here, and has given them to no other value until now.
PYATTN_DEVICE void settle(float (&x)[4]) {
  asm volatile("" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])::"memory");
}
PYATTN_DEVICE void settle(uint32_t (&x)[4]) {
  asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])::"memory");
}
template <class T, int kCount>
PYATTN_DEVICE void settle(T (&rows)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) settle(rows[i]);
}

// Before products: their sums and their factors in registers, which the tensor cores see as they are now.
template <class... T>
PYATTN_DEVICE void begin_products(T&... registers) {
  (settle(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Closes a group of products, possibly of none.
PYATTN_DEVICE void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all groups but the last kLeft. The sums and factors of those it waits for must be named: the tensor cores use
// them until now. ptxas knows that of sums alone: it gave the registers of factors to other values.
template <int kLeft, class... T>
PYATTN_DEVICE void wait_for_products(T&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
  (settle(registers), ...);
}

#define PYATTN_SUMS_1(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define PYATTN_SUMS_4(n) PYATTN_SUMS_1(n), PYATTN_SUMS_1(n + 1), PYATTN_SUMS_1(n + 2), PYATTN_SUMS_1(n + 3)
#define PYATTN_SUMS_8(n) PYATTN_SUMS_4(n), PYATTN_SUMS_4(n + 4)
#define PYATTN_SUMS_16(n) PYATTN_SUMS_8(n), PYATTN_SUMS_8(n + 8)
#define PYATTN_NAMES_4 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PYATTN_NAMES_8 PYATTN_NAMES_4 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PYATTN_NAMES_16                                                                                               \
  PYATTN_NAMES_8                                                                                                      \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
// The factors and `add_at`, whether the product is added to the sums, are numbers of operands; `transposed` says it of the factors.
#define PYATTN_WGMMA(kN, columns, type, factors, add_at, transposed, ...)                                       \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns \
               "k16.f32." type "." type " {" PYATTN_NAMES_##kN "}, " factors ", add, 1, 1, " transposed ";\n}"  \
               : PYATTN_SUMS_##kN(0)                                                                            \
               : __VA_ARGS__, "r"(add ? 1 : 0))
#define PYATTN_WGMMA_OF(...)                \
  if constexpr (std::is_same_v<S, bf16>)    \
    PYATTN_WGMMA_TYPE("bf16", __VA_ARGS__); \
  else                                      \
    PYATTN_WGMMA_TYPE("f16", __VA_ARGS__)
#define PYATTN_WGMMA_TYPE(type, kN, columns, ...) PYATTN_WGMMA(kN, columns, type, __VA_ARGS__)

// c = a b^T, or c += a b^T, for 64 rows of a and 8 kN rows of b, over 16 columns that begin at these addresses.
template <class S, int kN>
PYATTN_DEVICE void multiply_shared(float (&c)[kN][4], SharedAddress a_from, SharedAddress b_from, bool add) {
  static_assert(kN == 4 || kN == 8 || kN == 16);
  const uint64_t a = descriptor(a_from, 16, kEightRows), b = descriptor(b_from, 16, kEightRows);
  if constexpr (kN == 4) {
    PYATTN_WGMMA_OF(4, "32", "%16, %17", "%18", "0, 0", "l"(a), "l"(b));
  } else if constexpr (kN == 8) {
    PYATTN_WGMMA_OF(8, "64", "%32, %33", "%34", "0, 0", "l"(a), "l"(b));
  } else {
    PYATTN_WGMMA_OF(16, "128", "%64, %65", "%66", "0, 0", "l"(a), "l"(b));
  }
}

// c += a b, with 16 rows of a for each warp, in its lanes' registers, and 16 rows of b, 8 kN columns in panels of `panel` bytes.
template <class S, int kN>
PYATTN_DEVICE void multiply_columns(float (&c)[kN][4], const uint32_t (&a)[4], SharedAddress b_from, int panel) {
  static_assert(kN == 8 || kN == 16);
  constexpr bool add = true;
  const uint64_t b = descriptor(b_from, panel, kEightRows);
  if constexpr (kN == 8) {
    PYATTN_WGMMA_OF(8, "64", "{%32,%33,%34,%35}, %36", "%37", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    PYATTN_WGMMA_OF(16, "128", "{%64,%65,%66,%67}, %68", "%69", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                    "l"(b));
  }
}

}  // namespace
}  // namespace cuda
}  // namespace pyattn
