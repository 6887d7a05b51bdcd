// From one stack to another: a few instructions on x86-64, the C library (ten times slower) elsewhere.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)

struct Context {
  void* stack_pointer;
};
extern "C" void cuda_host_switch(void** save, void* to);
asm(R"(
.text
.globl cuda_host_switch
.hidden cuda_host_switch
.type cuda_host_switch,@function
cuda_host_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size cuda_host_switch,.-cuda_host_switch
)");

inline void switch_context(Context& from, Context& to) { cuda_host_switch(&from.stack_pointer, to.stack_pointer); }

inline void make_context(Context& context, char* stack, size_t bytes, void (*run)()) {
  void** top = (void**)(((uintptr_t)stack + bytes - 64) & ~(uintptr_t)15);
  *--top = nullptr;  // run's return address: it never returns
  *--top = (void*)run;
  for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers that cuda_host_switch restores
  context.stack_pointer = top;
}

#else
#include <ucontext.h>

struct Context {
  ucontext_t of;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.of, &to.of); }

inline void make_context(Context& context, char* stack, size_t bytes, void (*run)()) {
  getcontext(&context.of);
  context.of.uc_stack.ss_sp = stack;
  context.of.uc_stack.ss_size = bytes;
  context.of.uc_link = nullptr;
  makecontext(&context.of, run, 0);
}

#endif
