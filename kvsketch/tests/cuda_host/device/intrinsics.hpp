// Integer and float intrinsics that are no C functions. Float functions named "fast" in CUDA are the exact ones here.
#pragma once

// ------------------------------------------------------------------ bits
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
// Byte i of the result is the byte of (b, a) that nibble i of `selector` names; its bit 3 spreads that byte's sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    unsigned nibble = selector >> (4 * i) & 15, byte = (unsigned)(bytes >> (8 * (nibble & 7))) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return (unsigned)(((uint64_t)high << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
  return (unsigned)(((uint64_t)high << 32 | low) << (by < 32 ? by : 32) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
  return (unsigned)(((uint64_t)high << 32 | low) >> (by < 32 ? by : 32));
}

namespace cuda_host {
// Byte i of a word, as T.
template <class T>
inline int byte_of(unsigned word, int i) {
  return (int)(T)(word >> (8 * i));
}
// c + the sum of the products of the four bytes of a, as A, and of b, as B.
template <class A, class B>
inline unsigned dot_bytes(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; i++) c += (unsigned)(byte_of<A>(a, i) * byte_of<B>(b, i));
  return c;
}
// lop3: the bitwise function of three words whose table of 8 results is `table`.
inline unsigned lop3(unsigned a, unsigned b, unsigned c, unsigned table) {
  unsigned r = 0;
  for (unsigned i = 0; i < 8; i++)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
inline int saturated(double x) {
  return x != x ? 0 : x >= 2147483647.0 ? 0x7fffffff : x <= -2147483648.0 ? (int)0x80000000 : (int)x;
}
inline unsigned saturated_unsigned(double x) { return !(x > 0) ? 0u : x >= 4294967295.0 ? ~0u : (unsigned)x; }
}  // namespace cuda_host

inline int __dp4a(int a, int b, int c) {
  return (int)cuda_host::dot_bytes<signed char, signed char>((unsigned)a, (unsigned)b, (unsigned)c);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  return cuda_host::dot_bytes<unsigned char, unsigned char>(a, b, c);
}
inline int __mulhi(int a, int b) { return (int)(((int64_t)a * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}

// ------------------------------------------------------------------ the same bits as another type
#define CUDA_HOST_CAST(name, From, To)                  \
  inline To name(From from) {                           \
    static_assert(sizeof(From) == sizeof(To), "sizes"); \
    To to;                                              \
    __builtin_memcpy(&to, &from, sizeof to);            \
    return to;                                          \
  }
CUDA_HOST_CAST(__float_as_int, float, int)
CUDA_HOST_CAST(__float_as_uint, float, unsigned)
CUDA_HOST_CAST(__int_as_float, int, float)
CUDA_HOST_CAST(__uint_as_float, unsigned, float)
CUDA_HOST_CAST(__double_as_longlong, double, long long)
CUDA_HOST_CAST(__longlong_as_double, long long, double)

// ------------------------------------------------------------------ float arithmetic
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
__forceinline__ void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return (float)(1.0 / sqrt((double)a)); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }  // 0 for NaN

// ------------------------------------------------------------------ conversions: to an integer they saturate
inline int __float2int_rn(float x) { return cuda_host::saturated(nearbyint((double)x)); }
inline int __float2int_rz(float x) { return cuda_host::saturated(trunc((double)x)); }
inline int __float2int_rd(float x) { return cuda_host::saturated(floor((double)x)); }
inline int __float2int_ru(float x) { return cuda_host::saturated(ceil((double)x)); }
inline unsigned __float2uint_rn(float x) { return cuda_host::saturated_unsigned(nearbyint((double)x)); }
inline unsigned __float2uint_rz(float x) { return cuda_host::saturated_unsigned(trunc((double)x)); }
inline unsigned __float2uint_rd(float x) { return cuda_host::saturated_unsigned(floor((double)x)); }
inline unsigned __float2uint_ru(float x) { return cuda_host::saturated_unsigned(ceil((double)x)); }
inline int __double2int_rn(double x) { return cuda_host::saturated(nearbyint(x)); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }

// ------------------------------------------------------------------ min and max of mixed types, as CUDA declares them
#define CUDA_HOST_MIN_MAX(A, B, R)                            \
  inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; } \
  inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
CUDA_HOST_MIN_MAX(int, int, int)
CUDA_HOST_MIN_MAX(unsigned, unsigned, unsigned)
CUDA_HOST_MIN_MAX(int, unsigned, unsigned)
CUDA_HOST_MIN_MAX(unsigned, int, unsigned)
CUDA_HOST_MIN_MAX(long, long, long)
CUDA_HOST_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUDA_HOST_MIN_MAX(long long, long long, long long)
CUDA_HOST_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }
