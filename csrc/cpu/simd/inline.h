// Requests to the compiler: inlining and unrolling.
#pragma once

#define PYATTN_MEMBER_INLINE __attribute__((always_inline))
#define PYATTN_INLINE static inline PYATTN_MEMBER_INLINE

// Loads x into a vector register here: gcc 12 would store a loaded vector to the stack, to read it from there twice.
#if defined(__x86_64__)
#define PYATTN_IN_REGISTER(x) asm("" : "+v"(x))
#elif defined(__aarch64__)
#define PYATTN_IN_REGISTER(x) asm("" : "+w"(x))
#else
#define PYATTN_IN_REGISTER(x)
#endif

// Before a loop: unrolls it n times, and fully if it has at most n iterations; 1 keeps it rolled.
#define PYATTN_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define PYATTN_UNROLL(n) PYATTN_PRAGMA(clang loop unroll_count(n))
#else
#define PYATTN_UNROLL(n) PYATTN_PRAGMA(GCC unroll n)
#endif
