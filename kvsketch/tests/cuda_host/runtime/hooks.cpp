// What g++ calls in kernels built with -fsanitize=thread and -fsanitize=undefined, whose own libraries are not linked.
#include <cstdio>
#include <cstdlib>

#include "state.hpp"

using namespace cuda_host;

#define CALLER ((uintptr_t)__builtin_return_address(0))

// ------------------------------------------------------------------ accesses
#define ACCESSES(bytes)                                                                                       \
  CUDA_HOST_API void __tsan_read##bytes(void* of) {                                                           \
    check_access((uintptr_t)of, bytes, Access::READ, true, CALLER);                                           \
  }                                                                                                           \
  CUDA_HOST_API void __tsan_write##bytes(void* of) {                                                          \
    check_access((uintptr_t)of, bytes, Access::WRITE, true, CALLER);                                          \
  }                                                                                                           \
  CUDA_HOST_API void __tsan_unaligned_read##bytes(void* of) {                                                 \
    check_access((uintptr_t)of, bytes, Access::READ, true, CALLER);                                           \
  }                                                                                                           \
  CUDA_HOST_API void __tsan_unaligned_write##bytes(void* of) {                                                \
    check_access((uintptr_t)of, bytes, Access::WRITE, true, CALLER);                                          \
  }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
CUDA_HOST_API void __tsan_read_range(void* of, size_t bytes) {
  check_access((uintptr_t)of, bytes, Access::READ, false, CALLER);
}
CUDA_HOST_API void __tsan_write_range(void* of, size_t bytes) {
  check_access((uintptr_t)of, bytes, Access::WRITE, false, CALLER);
}
CUDA_HOST_API void __tsan_init() {}
CUDA_HOST_API void __tsan_func_entry(void*) {}
CUDA_HOST_API void __tsan_func_exit() {}

CUDA_HOST_API void cuda_host_atomic(const volatile void* of, unsigned bytes, void* caller) {
  check_access((uintptr_t)of, bytes, Access::ATOMIC, true, caller ? (uintptr_t)caller : CALLER);
}
CUDA_HOST_API void cuda_host_read(const void* of, size_t bytes, void* caller) {
  check_access((uintptr_t)of, bytes, Access::READ, false, caller ? (uintptr_t)caller : CALLER);
}
CUDA_HOST_API void cuda_host_write(void* of, size_t bytes, void* caller) {
  check_access((uintptr_t)of, bytes, Access::WRITE, false, caller ? (uintptr_t)caller : CALLER);
}

// ------------------------------------------------------------------ cp.async
CUDA_HOST_API void cuda_host_copy_async(void* to, const void* from, unsigned bytes, unsigned from_bytes) {
  if (((uintptr_t)to | (uintptr_t)from) & (bytes - 1)) cuda_host_fail("MISALIGNED cp.async: it needs %u bytes", bytes);
  Copy copy{to, from, bytes, from_bytes};
  begin_copy(copy, CALLER);
  // The hardware may copy at once or as late as at the wait; late is what shows a missing wait.
  if (!options.check && options.order == RANDOM && random_number() % 2)
    end_copy(copy, CALLER);
  else
    self()->copies.back().push_back(copy);
}
CUDA_HOST_API void cuda_host_copy_commit() { self()->copies.emplace_back(); }
CUDA_HOST_API void cuda_host_copy_wait(unsigned keep) {
  auto& groups = self()->copies;
  while (groups.size() > keep + 1) {
    for (const Copy& copy : groups[0]) end_copy(copy, CALLER);
    groups.erase(groups.begin());
  }
}

// ------------------------------------------------------------------ undefined behaviour
struct Place {
  const char* file;
  uint32_t line, column;
};
static void undefined(const char* what, const Place* at) {
  if (cuda_host_current) cuda_host_fail("UNDEFINED BEHAVIOUR (%s) at %s:%u", what, at->file, at->line);
  fprintf(stderr, "undefined behaviour (%s) at %s:%u outside a launch\n", what, at->file, at->line);
  abort();
}
#define UNDEFINED(handler, what)                                                      \
  CUDA_HOST_API void __ubsan_handle_##handler(Place* at) { undefined(what, at); }      \
  CUDA_HOST_API void __ubsan_handle_##handler##_abort(Place* at) { undefined(what, at); }
UNDEFINED(type_mismatch_v1, "null or misaligned address")
UNDEFINED(out_of_bounds, "array index out of bounds")
UNDEFINED(shift_out_of_bounds, "shift out of bounds")
UNDEFINED(divrem_overflow, "division by zero or overflow of it")
UNDEFINED(add_overflow, "signed addition overflows")
UNDEFINED(sub_overflow, "signed subtraction overflows")
UNDEFINED(mul_overflow, "signed multiplication overflows")
UNDEFINED(negate_overflow, "signed negation overflows")
UNDEFINED(float_cast_overflow, "number does not fit the integer it is cast to")
