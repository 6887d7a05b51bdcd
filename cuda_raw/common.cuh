// Types, constants and warp operations that all kernels share. Headers are put in place once each: see _compile.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef KV_SM
#error "KV_SM must name the architecture, such as 90"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float LARGEST_HALF = 65504.f;
constexpr float LARGEST_FLOAT = 3.402823466e38f;
constexpr float LOG2_E = 1.4426950408889634f;
// NVRTC has neither INFINITY nor NAN.
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int apart = 16; apart; apart >>= 1) x += __shfl_xor_sync(ALL_LANES, x, apart);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int apart = 16; apart; apart >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, apart));
  return x;
}
