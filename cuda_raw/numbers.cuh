// Numbers of float32, float16 and bfloat16 arrays whose dtype is known at run time, eight at a time.
#include "common.cuh"

// kvsketch.layout.DTYPE_CODES.
constexpr int FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2;
// Numbers that a thread reads and writes at a time.
constexpr int OCT = 8;

constexpr u16 HALF_NAN = 0x7e00;

// float16 bits as NumPy rounds to them: NaN keeps its sign and the top of its payload, which cvt does not.
__device__ __forceinline__ u16 half_bits(float x) {
  if (x == x) return __half_as_ushort(__float2half_rn(x));
  const u32 bits = __float_as_uint(x);
  return HALF_NAN | (bits >> 16 & 0x8000) | (bits >> 13 & 0x1ff);
}

__device__ __forceinline__ float half_number(u16 bits) { return __half2float(__ushort_as_half(bits)); }

// bfloat16 bits as ml_dtypes rounds to them.
__device__ __forceinline__ u16 bfloat16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return 0x7fc0 | (bits >> 16 & 0x8000);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ __forceinline__ float bfloat16_number(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ float number_of(u16 bits, int dtype) {
  return dtype == FLOAT16 ? half_number(bits) : bfloat16_number(bits);
}

__device__ __forceinline__ u16 bits_of(float x, int dtype) {
  return dtype == FLOAT16 ? half_bits(x) : bfloat16_bits(x);
}

// An unsigned integer in the order of floats, NaN above all; and the float again.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) {
  if (key == 0xffffffffu) return NOT_A_NUMBER;
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Whether x >= 0, by its bits: with -ftz=true a comparison takes subnormal numbers for zero. Not so for NaN.
__device__ __forceinline__ bool is_positive(float x) {
  const u32 bits = __float_as_uint(x);
  return bits <= 0x7f800000u || bits == 0x80000000u;
}

// Number `at` of an array.
__device__ __forceinline__ float load_number(const void* x, i64 at, int dtype) {
  if (dtype == FLOAT32) return static_cast<const float*>(x)[at];
  return number_of(static_cast<const u16*>(x)[at], dtype);
}

__device__ __forceinline__ void store_number(void* x, i64 at, int dtype, float number) {
  if (dtype == FLOAT32)
    static_cast<float*>(x)[at] = number;
  else
    static_cast<u16*>(x)[at] = bits_of(number, dtype);
}

// What an aligned oct is in memory, before it becomes numbers.
struct WideOct {
  float4 low, high;

  __device__ __forceinline__ explicit WideOct(const void* x, i64 at) {
    const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(x) + at);
    low = source[0], high = source[1];
  }
  __device__ __forceinline__ void get(float* numbers) const {
    numbers[0] = low.x, numbers[1] = low.y, numbers[2] = low.z, numbers[3] = low.w;
    numbers[4] = high.x, numbers[5] = high.y, numbers[6] = high.z, numbers[7] = high.w;
  }
};
struct NarrowOct {
  uint4 four;

  __device__ __forceinline__ explicit NarrowOct(const void* x, i64 at)
      : four(*reinterpret_cast<const uint4*>(static_cast<const u16*>(x) + at)) {}
  __device__ __forceinline__ void get(int dtype, float* numbers) const {
    const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < OCT; ++j) numbers[j] = number_of(words[j / 2] >> (16 * (j % 2)), dtype);
  }
};

// Numbers at, at + 1, ... of an array; missing ones, from the `count`th on, become the first one. `aligned` says that a
// whole oct lies on 16 bytes.
__device__ __forceinline__ void load_oct(const void* x, i64 at, int dtype, int count, bool aligned, float* numbers) {
  const bool whole = aligned && count == OCT;
  if (dtype == FLOAT32) {
    const float* source = static_cast<const float*>(x) + at;
    if (whole) {
      WideOct(x, at).get(numbers);
      return;
    }
#pragma unroll
    for (int j = 0; j < OCT; ++j) numbers[j] = source[j < count ? j : 0];
    return;
  }
  if (whole) {
    NarrowOct(x, at).get(dtype, numbers);
    return;
  }
  const u16* source = static_cast<const u16*>(x) + at;
#pragma unroll
  for (int j = 0; j < OCT; ++j) numbers[j] = number_of(source[j < count ? j : 0], dtype);
}

// Four aligned octs, `step` numbers apart, all asked for before the first one is used.
__device__ __forceinline__ void load_octs(const void* x, i64 at, i64 step, int dtype, float (*numbers)[OCT]) {
  if (dtype == FLOAT32) {
    const WideOct octs[4] = {WideOct(x, at), WideOct(x, at + step), WideOct(x, at + 2 * step),
                             WideOct(x, at + 3 * step)};
#pragma unroll
    for (int b = 0; b < 4; ++b) octs[b].get(numbers[b]);
  } else {
    const NarrowOct octs[4] = {NarrowOct(x, at), NarrowOct(x, at + step), NarrowOct(x, at + 2 * step),
                               NarrowOct(x, at + 3 * step)};
#pragma unroll
    for (int b = 0; b < 4; ++b) octs[b].get(dtype, numbers[b]);
  }
}

// The first `count` of eight numbers to an array of float32; `aligned` as above.
__device__ __forceinline__ void store_oct(float* x, int count, bool aligned, const float* numbers) {
  if (aligned && count == OCT) {
    float4* target = reinterpret_cast<float4*>(x);
    target[0] = make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
    target[1] = make_float4(numbers[4], numbers[5], numbers[6], numbers[7]);
    return;
  }
#pragma unroll
  for (int j = 0; j < OCT; ++j)
    if (j < count) x[j] = numbers[j];
}

// The same to an array of a dtype known at run time.
__device__ __forceinline__ void store_oct(void* x, i64 at, int dtype, int count, bool aligned, const float* numbers) {
  if (dtype == FLOAT32) {
    store_oct(static_cast<float*>(x) + at, count, aligned, numbers);
    return;
  }
  u16* target = static_cast<u16*>(x) + at;
  u16 bits[OCT];
#pragma unroll
  for (int j = 0; j < OCT; ++j) bits[j] = bits_of(numbers[j], dtype);
  if (aligned && count == OCT) {
    *reinterpret_cast<uint4*>(target) = make_uint4(bits[0] | (u32)bits[1] << 16, bits[2] | (u32)bits[3] << 16,
                                                   bits[4] | (u32)bits[5] << 16, bits[6] | (u32)bits[7] << 16);
    return;
  }
#pragma unroll
  for (int j = 0; j < OCT; ++j)
    if (j < count) target[j] = bits[j];
}
