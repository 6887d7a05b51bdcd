// CUDA's words and built-in names for g++. A generated module includes this before the text of the kernels.
#pragma once
// g++ does not report the read of a struct that a call takes by value, such as a half number. So calls of device
// functions are inlined where accesses are checked; NVIDIA's headers declare theirs `static __attribute__((unused))`.
#ifdef CUDA_HOST_CHECKED
#define CUDA_HOST_INLINED __attribute__((always_inline))
#define unused unused, always_inline
#else
#define CUDA_HOST_INLINED
#endif
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#undef unused
#include <math.h>
#include <vector_functions.h>

#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include "abi.hpp"

#define CUDA_HOST 1
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __managed__
#undef __forceinline__
#undef __noinline__
#undef __inline_hint__
#undef __launch_bounds__
#undef __maxnreg__
#undef __grid_constant__
#undef assert
#define __global__
#define __device__ CUDA_HOST_INLINED
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
// Blocks run one after another on one operating system thread, so a static variable belongs to one block at a time.
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __inline_hint__ inline
#define __builtin_assume(condition) ((void)0)
#define assert(condition) \
  ((condition) ? (void)0 : cuda_host_fail("assert(%s) does not hold at %s:%d", #condition, __FILE__, __LINE__))

#define threadIdx (cuda_host_current->thread_idx)
#define blockIdx (cuda_host_current->block_idx)
#define blockDim (cuda_host_current->block_dim)
#define gridDim (cuda_host_current->grid_dim)
constexpr int warpSize = 32;
// `extern __shared__ T name[];` in the text of a module becomes this.
#define CUDA_HOST_DYNAMIC_SHARED(T, name) T* name = (T*)(cuda_host_current->dynamic_shared)

// The caller's place, for functions whose failures name it.
#define CUDA_HOST_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
// Not looked at by the access checker: code of the harness, not of a kernel.
#define CUDA_HOST_UNCHECKED __attribute__((no_sanitize_thread, noinline))

[[noreturn]] inline void __trap() { cuda_host_fail("__trap()"); }

#include "atomics.hpp"
#include "intrinsics.hpp"
// after the float functions that it uses
#include "half.hpp"
#include "launch.hpp"
#include "tensor.hpp"
#include "warp.hpp"

// g++ does not report what memcpy and memset touch.
__forceinline__ void* cuda_host_memcpy(void* to, const void* from, size_t bytes) {
  cuda_host_read(from, bytes, nullptr);
  cuda_host_write(to, bytes, nullptr);
  return __builtin_memcpy(to, from, bytes);
}
__forceinline__ void* cuda_host_memset(void* to, int value, size_t bytes) {
  cuda_host_write(to, bytes, nullptr);
  return __builtin_memset(to, value, bytes);
}
#define memcpy cuda_host_memcpy
#define memset cuda_host_memset
