// Every instruction that CUDA C++ has no word for, once, each with a twin that the tests run on a CPU.
#include "common.cuh"

#ifdef CUDA_HOST

__device__ __forceinline__ void mma_f16(float* d, const u32* a, const u32* b) { cuda_host::mma_f16(d, a, b); }
__device__ __forceinline__ void mma_bf16(float* d, const u32* a, const u32* b) { cuda_host::mma_bf16(d, a, b); }
__device__ __forceinline__ void mma_s8(int* d, const u32* a, const u32* b) { cuda_host::mma_s8(d, a, b); }
__device__ __forceinline__ void mma_u8_s8(int* d, const u32* a, const u32* b) { cuda_host::mma_u8_s8(d, a, b); }
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  cuda_host::cp_async(shared, global, 16);
}
__device__ __forceinline__ void copy_commit() { cuda_host::cp_async_commit(); }
template <int KEEP>
__device__ __forceinline__ void copy_wait() { cuda_host::cp_async_wait(KEEP); }
__device__ __forceinline__ float mul_exact(float a, float b) { return a * b; }
__device__ __forceinline__ float add_exact(float a, float b) { return a + b; }
__device__ __forceinline__ float max_or_nan(float a, float b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ float exp2_fast(float x) { return exp2f(x); }
template <class T>
__device__ __forceinline__ T* kept_pointer(T* x) { return x; }

#else

#if KV_SM >= 80
// d (16, 8) += a (16, 16) b (16, 8): float16 products, float32 sums.
__device__ __forceinline__ void mma_f16(float* d, const u32* a, const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of bfloat16 numbers.
__device__ __forceinline__ void mma_bf16(float* d, const u32* a, const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d (16, 8) += a (16, 32) b (32, 8) of signed bytes.
__device__ __forceinline__ void mma_s8(int* d, const u32* a, const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d (16, 8) += a (16, 32) of bytes without a sign, b (32, 8) of signed ones.
__device__ __forceinline__ void mma_u8_s8(int* d, const u32* a, const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 16 bytes of global memory to shared memory, there once copy_wait says so.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global)
               : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the newest KEEP groups of copies are there.
template <int KEEP>
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory"); }
#endif  // KV_SM >= 80

// Rounded products and sums, not fused and with subnormal numbers: CuPy compiles with -ftz=true, under which CUDA's own
// operators, __fmul_rn and __fadd_rn too, take subnormal numbers for zero.
__device__ __forceinline__ float mul_exact(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}
__device__ __forceinline__ float add_exact(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

// 2 to the power of x within 2^-22; what is below 2^-126 becomes 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A pointer that is computed once and kept in a register, though the compiler would compute it anew at each use.
template <class T>
__device__ __forceinline__ T* kept_pointer(T* x) {
  asm("" : "+l"(x));
  return x;
}

// The larger number, or NaN when either is NaN; fmaxf drops NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if KV_SM >= 80
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a != a || a > b ? a : b;
#endif
}

#endif  // CUDA_HOST
