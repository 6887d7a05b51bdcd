// KIVI's quantizer, bit for bit that of kvsketch.reference.kivi.quantize_block.
#include "numbers.cuh"
#include "ptx.cuh"

// A float is 2^23 + 2^22 plus an integer: its last bits are the integer's, and adding it rounds half to even.
constexpr float ROUNDER = 12582912.f;
constexpr u32 ROUNDER_BITS = 0x4b400000u;

// Least and largest number of a group; `high` is NaN when the group has one.
struct Range {
  float low, high;

  __device__ __forceinline__ static Range none() { return {-NEGATIVE_INFINITY, NEGATIVE_INFINITY}; }
  __device__ __forceinline__ void add(float x) { low = fminf(low, x), high = max_or_nan(high, x); }
  __device__ __forceinline__ void add(const Range& other) {
    low = fminf(low, other.low), high = max_or_nan(high, other.high);
  }
};

// What is stored of a group: float16 bits. `saturated` counts what float16 could not hold.
struct StoredGroup {
  u16 scale, zero;
  int saturated;
};

__device__ __forceinline__ float clamp(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }

__device__ __forceinline__ StoredGroup store_group(const Range& range, float levels) {
  if (range.high != range.high) return {0, HALF_NAN, 0};
  const float low = clamp(range.low, LARGEST_FLOAT);
  const float step = __fdiv_rn(clamp(range.high, LARGEST_FLOAT) - low, levels);
  const u16 scale = half_bits(fminf(step, LARGEST_HALF)), zero = half_bits(clamp(low, LARGEST_HALF));
  // -0.0 is stored as 0.0, so that equal groups have equal bytes; the step is -0.0 where 0.0 and -0.0 make a group.
  return {(u16)(scale == 0x8000 ? 0 : scale), (u16)(zero == 0x8000 ? 0 : zero),
          (step > LARGEST_HALF) + (fabsf(low) > LARGEST_HALF)};
}

// Codes of a group's numbers. A group whose scale is 0 has codes 0.
//
// The rule is clip(rint(RN(RN(clip(x, +-65504) - zero) / scale)), 0, levels). All of it is monotone, so numbers may be
// clipped once, between 0 and what gives the highest code, after the zero is taken off. The quotient is the correctly
// rounded one without a division: scale has 11 significant bits, so the remainder of a first quotient, a few units off,
// is exact; and no quotient of a float by such a scale is nearer than 2^-12 units to the middle of two floats, which is
// more than what an approximate 1/scale spoils in the correction. (Subnormal quotients, which are not rounded so, have
// code 0 all the same.)
struct Coder {
  float zero, scale, inverse, top;

  __device__ __forceinline__ Coder(float scale, float zero, float levels) {
    const bool flat = !(scale > 0.f);
    this->zero = flat ? 0.f : zero;
    this->scale = flat ? 0.f : scale;
    inverse = flat ? 0.f : __fdividef(1.f, scale);
    top = flat ? 0.f : fminf(LARGEST_HALF - zero, levels * scale);
  }

  // The code plus ROUNDER_BITS, so that it may be shifted into place and summed before that is taken off.
  __device__ __forceinline__ u32 operator()(float x) const {
    const float distance = fminf(fmaxf(x - zero, 0.f), top);
    const float first = distance * inverse;
    const float quotient = __fmaf_rn(__fmaf_rn(-first, scale, distance), inverse, first);
    return __float_as_uint(quotient + ROUNDER);
  }
};
