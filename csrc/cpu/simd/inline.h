// Requests to the compiler: inlining and unrolling.
#pragma once

#define PYATTN_MEMBER_INLINE __attribute__((always_inline))
#define PYATTN_INLINE static inline PYATTN_MEMBER_INLINE

// Before a loop: unrolls it n times, and fully if it has at most n iterations; 1 keeps it rolled.
#define PYATTN_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define PYATTN_UNROLL(n) PYATTN_PRAGMA(clang loop unroll_count(n))
#else
#define PYATTN_UNROLL(n) PYATTN_PRAGMA(GCC unroll n)
#endif
