// Switches between stacks on one thread of a host.
#pragma once

#include <cstddef>

#ifdef __x86_64__
namespace emulation {

// Where a stack is left: what a resumed call needs beside the registers that every function saves for its caller.
struct Context {
  void *stack, *frame, *next;
};

// Makes a context that calls the function, which never returns, on a stack that is aligned to 16 bytes. Elsewhere than
// on x86-64 it may be copied only after it was resumed.
inline void begin(Context& context, char* stack, size_t bytes, void (*function)()) {
  context = {stack + bytes - sizeof(void*), nullptr, reinterpret_cast<void*>(function)};  // as if just called
}

// Leaves the stack and resumes the other one. Returns once that or another one resumes this one.
//
// longjmp instead leaves calls without a return, after which a processor predicts each further return wrong.
[[gnu::noinline]] inline void leave_for(Context& mine, const Context& other) {
  asm volatile(
      "movq %%rsp, (%0)\n"
      "movq %%rbp, 8(%0)\n"
      "leaq 1f(%%rip), %%rax\n"
      "movq %%rax, 16(%0)\n"
      "movq (%1), %%rsp\n"
      "movq 8(%1), %%rbp\n"
      "jmpq *16(%1)\n"
      "1:"
      :
      : "r"(&mine), "r"(&other)
      : "rax", "rbx", "r12", "r13", "r14", "r15", "memory", "cc");
}

}  // namespace emulation
#else
#include <setjmp.h>
#include <ucontext.h>

namespace emulation {

struct Context {
  bool begun = false;
  ucontext_t fresh;
  jmp_buf next;
};

inline void begin(Context& context, char* stack, size_t bytes, void (*function)()) {
  getcontext(&context.fresh);
  context.fresh.uc_stack.ss_sp = stack, context.fresh.uc_stack.ss_size = bytes, context.fresh.uc_link = nullptr;
  makecontext(&context.fresh, function, 0);
}

inline void leave_for(Context& mine, Context& other) {
  mine.begun = true;
  if (_setjmp(mine.next) != 0) return;
  if (other.begun) _longjmp(other.next, 1);
  setcontext(&other.fresh);
}

}  // namespace emulation
#endif
