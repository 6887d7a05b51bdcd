// float16 and bfloat16 functions that NVIDIA's headers declare for devices alone.
#pragma once

// Takes numbers by value, see host.hpp.
#define CUDA_HOST_BY_VALUE CUDA_HOST_INLINED inline

namespace cuda_host {
CUDA_HOST_BY_VALUE float widened(half x) { return __half2float(x); }
CUDA_HOST_BY_VALUE float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
// From double, in which a product and a sum of two half or bfloat16 numbers lose nothing: one rounding.
template <class T>
T narrowed(double x);
template <>
inline half narrowed<half>(double x) { return __double2half(x); }
template <>
inline __nv_bfloat16 narrowed<__nv_bfloat16>(double x) { return __double2bfloat16(x); }
template <class T>
CUDA_HOST_BY_VALUE T fused(T a, T b, T c) {
  return narrowed<T>((double)widened(a) * widened(b) + widened(c));
}
}  // namespace cuda_host

CUDA_HOST_BY_VALUE half __hfma(half a, half b, half c) { return cuda_host::fused(a, b, c); }
CUDA_HOST_BY_VALUE half2 __hfma2(half2 a, half2 b, half2 c) {
  return half2{__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
CUDA_HOST_BY_VALUE __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return cuda_host::fused(a, b, c);
}
CUDA_HOST_BY_VALUE __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __nv_bfloat162{__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

// __half2int_rn(x) and the like: of an integer type and a rounding, saturated as the float functions are.
#define CUDA_HOST_HALF_TO_INTEGER(type, round)                                                                    \
  CUDA_HOST_BY_VALUE type __half2##type##_##round(half x) { return __float2##type##_##round(__half2float(x)); }   \
  CUDA_HOST_BY_VALUE type __bfloat162##type##_##round(__nv_bfloat16 x) {                                          \
    return __float2##type##_##round(__bfloat162float(x));                                                         \
  }
typedef unsigned uint;
CUDA_HOST_HALF_TO_INTEGER(int, rn)
CUDA_HOST_HALF_TO_INTEGER(int, rd)
CUDA_HOST_HALF_TO_INTEGER(int, ru)
CUDA_HOST_HALF_TO_INTEGER(uint, rn)
CUDA_HOST_HALF_TO_INTEGER(uint, rd)
CUDA_HOST_HALF_TO_INTEGER(uint, ru)

// h...(x) of one number and h2...(x) of a pair, by the float function.
#define CUDA_HOST_HALF_FUNCTION(name, of)                                                                         \
  CUDA_HOST_BY_VALUE half h##name(half x) { return __float2half(of(__half2float(x))); }                           \
  CUDA_HOST_BY_VALUE half2 h2##name(half2 x) { return half2{h##name(x.x), h##name(x.y)}; }                        \
  CUDA_HOST_BY_VALUE __nv_bfloat16 h##name(__nv_bfloat16 x) { return __float2bfloat16(of(__bfloat162float(x))); } \
  CUDA_HOST_BY_VALUE __nv_bfloat162 h2##name(__nv_bfloat162 x) {                                                  \
    return __nv_bfloat162{h##name(x.x), h##name(x.y)};                                                            \
  }
namespace cuda_host {
inline float reciprocal(float x) { return 1.0f / x; }
inline float reciprocal_root(float x) { return 1.0f / sqrtf(x); }
}  // namespace cuda_host
CUDA_HOST_HALF_FUNCTION(exp, expf)
CUDA_HOST_HALF_FUNCTION(exp2, exp2f)
CUDA_HOST_HALF_FUNCTION(log, logf)
CUDA_HOST_HALF_FUNCTION(exp10, exp10f)
CUDA_HOST_HALF_FUNCTION(log2, log2f)
CUDA_HOST_HALF_FUNCTION(log10, log10f)
CUDA_HOST_HALF_FUNCTION(tanh, tanhf)
CUDA_HOST_HALF_FUNCTION(sqrt, sqrtf)
CUDA_HOST_HALF_FUNCTION(rsqrt, cuda_host::reciprocal_root)
CUDA_HOST_HALF_FUNCTION(rcp, cuda_host::reciprocal)
CUDA_HOST_HALF_FUNCTION(sin, sinf)
CUDA_HOST_HALF_FUNCTION(cos, cosf)
CUDA_HOST_HALF_FUNCTION(floor, floorf)
CUDA_HOST_HALF_FUNCTION(ceil, ceilf)
CUDA_HOST_HALF_FUNCTION(rint, rintf)
CUDA_HOST_HALF_FUNCTION(trunc, truncf)
