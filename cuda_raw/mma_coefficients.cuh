// Coefficients of codes as operands B of tensor cores: query times a channel's scale, weight times a token's scale, in
// the eight columns of an operand.
//
// A coefficient is rounded to float16, 11 bits. What rounding left of it goes, as another float16, to a column of its
// own where four query rows leave as many columns free (BY_COLUMN), or to a product of its own (BY_PRODUCT): 22 bits.
// NONE drops it.
//
// Numbers are normalized by powers of two to at most 2^15 while scales are at most 1, so that nothing overflows, and
// what becomes subnormal is 2^-40 of the largest.
#include "mma_codes.cuh"

enum Rest { BY_COLUMN, BY_PRODUCT, NONE };

constexpr int COLUMNS = 8;
constexpr int TOP_EXPONENT = 15;  // normalized numbers are at most 2^15

__device__ __forceinline__ __half2 as_halves(u32 word) { return *reinterpret_cast<const __half2*>(&word); }
__device__ __forceinline__ u32 as_word(__half2 halves) { return *reinterpret_cast<const u32*>(&halves); }
__device__ __forceinline__ float power_of_2(int exponent) { return __int_as_float((127 + exponent) << 23); }
// The exponent of the power of 2 above a number, which stands for what is far from any query as well.
__device__ __forceinline__ int exponent_above(float x) {
  return min(max((int)(__float_as_uint(x) >> 23) - 126, -80), 80);
}
__device__ __forceinline__ uint4 load_16(const void* at) { return *reinterpret_cast<const uint4*>(at); }

__device__ __forceinline__ void unpack(u32* words, const uint4& four) {
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// Coefficients of eight codes of a lane: [half] is an operand of codes 4 * half .. 4 * half + 3.
template <Rest REST>
struct Operands {
  u32 high[2][2], low[2][2];

  // sums += a * coefficients, `a` being the operand of those codes.
  __device__ __forceinline__ void multiply(float* sums, const u32* a, int half) const {
    mma_f16(sums, a, high[half]);
    if (REST == BY_PRODUCT) mma_f16(sums, a, low[half]);
  }
};

// What a lane multiplies by scales: eight numbers of a query row, as a sum of two float16 each. BY_COLUMN the steps are
// the same for the columns of roundings, where high = 0 and low = the number, and for those of what they leave.
template <Rest REST>
struct Coefficients {
  static constexpr int ROWS = REST == BY_COLUMN ? 4 : 8;              // query rows of an operand
  static constexpr int BYTES = (REST == NONE ? 1 : 2) * 32 * GRANULE;  // of a warp in shared memory

  // Pairs of the numbers in the order 0 1, 4 5, 2 3, 6 7: see multiply_all().
  u32 high[4], low[4];

  // Column g of the numbers of query row g % ROWS.
  __device__ __forceinline__ void set(const float* numbers, int g) {
    const bool rest = g >= ROWS;
    const u32 mask = rest ? ~0u : 0;
    const float taken = rest ? -1.f : 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = numbers + 2 * i;
      const __half2 rounded = __floats2half2_rn(pair[0], pair[1]);
      const float2 kept = __half22float2(rounded);
      high[place(i)] = as_word(rounded);
      if (REST == BY_COLUMN) {
        high[place(i)] &= mask;
        low[place(i)] = as_word(__floats2half2_rn(fmaf(taken, kept.x, pair[0]), fmaf(taken, kept.y, pair[1])));
      } else if (REST == BY_PRODUCT) {
        low[place(i)] = as_word(__floats2half2_rn(pair[0] - kept.x, pair[1] - kept.y));
      }
    }
  }

  // To and from shared memory, where lanes lie side by side.
  __device__ __forceinline__ void store(u8* at, int lane) const {
    uint4* to = reinterpret_cast<uint4*>(at) + lane;
    to[0] = make_uint4(high[0], high[1], high[2], high[3]);
    if (REST != NONE) to[32] = make_uint4(low[0], low[1], low[2], low[3]);
  }

  __device__ __forceinline__ void load(const u8* at, int lane) {
    const uint4* from = reinterpret_cast<const uint4*>(at) + lane;
    unpack(high, from[0]);
    if (REST != NONE) unpack(low, from[32]);
  }

  // Times a lane's eight float16 scales.
  __device__ __forceinline__ Operands<REST> times(const uint4& scales) const {
    u32 s[4];
    unpack(s, scales);
    Operands<REST> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 scale = as_halves(s[i]), number = as_halves(high[place(i)]);
      const __half2 rounded = __hmul2_rn(number, scale);
      u32 &to = out.high[i / 2][i % 2], &left = REST == BY_COLUMN ? to : out.low[i / 2][i % 2];
      to = as_word(rounded);
      if (REST != NONE) {
        const __half2 error = __hfma2(number, scale, __hneg2(rounded));
        left = as_word(__hfma2(as_halves(low[place(i)]), scale, error));
      }
    }
    return out;
  }

  // As they are.
  __device__ __forceinline__ Operands<REST> operands() const {
    Operands<REST> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out.high[i / 2][i % 2] = (REST == BY_COLUMN ? low : high)[place(i)];
      if (REST == BY_PRODUCT) out.low[i / 2][i % 2] = low[place(i)];
    }
    return out;
  }

  // Adds the products of a row of eight float16 numbers a lane with all columns: what counts are rows 0..7 of `even`
  // and rows 8..15 of `odd`. Loaded as they lie, numbers 0 1 4 5 are operand rows g and 2 3 6 7 operand rows g + 8, and
  // the other rows of each product are of no use; to bring the numbers in order would take as many moves as tensor
  // cores take steps.
  __device__ __forceinline__ void multiply_all(float* even, float* odd, const uint4& numbers) const {
    u32 a[4];
    unpack(a, numbers);
    if (REST != BY_COLUMN) {
      mma_f16(even, a, high);
      mma_f16(odd, a, high + 2);
    }
    if (REST != NONE) {
      mma_f16(even, a, low);
      mma_f16(odd, a, low + 2);
    }
  }

 private:
  static __device__ __forceinline__ int place(int pair) { return 2 * (pair % 2) + pair / 2; }
};

// Whether one of WORDS pairs of float16, none negative, is above a limit that `slack` stands for. By a warp.
template <int WORDS>
__device__ __forceinline__ bool any_above(const u8* halves, u32 slack, int lane) {
  u32 above = 0;
#pragma unroll
  for (int first = 0; first < WORDS; first += 32)
    if (first + lane < WORDS) above |= reinterpret_cast<const u32*>(halves)[first + lane] + slack;
  return __any_sync(ALL_LANES, above & 0x80008000u);
}

// For any_above(): the limit 2^exponent, 0 <= exponent <= 16. A float16 above it, plus the slack, has the top bit set.
__device__ __forceinline__ u32 slack_below(int exponent) {
  return 0x00010001u * (0x7fff - ((TOP_EXPONENT + exponent) << 10));
}

// The largest of `words` pairs of float16, none negative, as its bits. By a warp.
__device__ __forceinline__ u32 largest_half(const u8* halves, int words, int lane) {
  u32 largest = 0;
  for (int at = lane; at < words; at += 32) {
    const u32 word = reinterpret_cast<const u32*>(halves)[at];
    largest = max(largest, max(word & 0xffff, word >> 16));
  }
  return __reduce_max_sync(ALL_LANES, largest);
}

// The power of two that brings float16 numbers up to that one to at most 1, as the exponent k >= 0 of 2^-k.
__device__ __forceinline__ int exponent_above_1(u32 half) { return max(0, (int)(half >> 10) - 14); }
