// Codes of pages (docs/layout.md) as operands of tensor cores, without a conversion.
//
// A chunk is 32 lanes by 32 contraction rows. Lane 4 * g + t of a warp takes the codes of lanes g, 8 + g, 16 + g and
// 24 + g (one of each plane) in rows 8 * t .. 8 * t + 7, which one load of 64 bits of each vector holds. In the order
// (t, row) of the contraction these are the operands A of two m16n8k16 for planes 0 and 1 and of two for 2 and 3.
//
// A code put into the ten low bits of a float16 is a number of 2^-24 units, exact, with no offset to take off
// afterwards. Tensor cores take such subnormal numbers as they are (Fasi, Higham, Mikaitis and Pranesh, Numerical
// behavior of NVIDIA tensor cores, 2021). What they add up they align to the largest exponents of the operands, 2^-14
// for these, and cut off 24 or 25 bits below; so codes of one and two bits are brought up in the word, the further the
// smaller that error. Codes of plane b are 2^plane_shift(b) times too large; what is scored or mixed from them is
// scaled in the end.
#include "ptx.cuh"

constexpr int PLANES = 4, QUAD = 4, CHUNK = 32, GRANULE = 16;
constexpr int CODE_EXPONENT = 24;  // a code is a number of 2^-24

template <int BITS>
struct Chunk {
  static constexpr int BYTES = CHUNK * CHUNK * BITS / 8, GRANULES = BYTES / GRANULE;
  static constexpr int UNIT_ROWS = BITS == 1 || BITS == 3 ? 16 : 8, UNIT_BYTES = 4 * UNIT_ROWS * BITS;
  static constexpr int LIFT = 6;  // of planes that would lie lowest, into the highest of ten bits
  static constexpr int VECTORS = BITS == 3 || BITS == 4 ? 2 : BITS == 8 ? 4 : 1;

  // Where granule x + first of the codes lies in shared memory, so that the 16 lanes of half a warp, which read 32
  // bytes of each of four units, find them in different banks; `first` is a multiple of 32.
  static __device__ __forceinline__ int swizzle(int x, int first = 0) {
    return (x ^ shuffled(x) ^ shuffled(first)) + first;
  }

  static __device__ __forceinline__ int plane_shift(int b) {
    if (BITS == 1) return LIFT + b;
    if (BITS == 2) return 2 * b + (b < 2 ? LIFT : 0);
    return BITS == 3 ? 4 * (b / 2) : BITS == 4 ? 4 * (b % 2) : 0;
  }

  // words[v][half]: rows 8 * t + 4 * half .. + 3 of the four planes, in the vectors v that codes_of() expects.
  static __device__ __forceinline__ void load(u32 (*words)[2], const u8* chunk, int lane) {
    const int g = lane / QUAD, t = lane % QUAD;
    if constexpr (BITS == 1) {
      read(words[0], chunk + 64 * (t / 2) + 8 * g);  // in bits 0..3 of bytes where t is even, else 4..7
    } else if constexpr (BITS == 3) {
      u32 low[2], high[2];
      read(low, chunk + UNIT_BYTES * (t / 2) + 64 * (t % 2) + 8 * g);
      read(high, chunk + UNIT_BYTES * (t / 2) + 128 + 8 * g);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 h = high[half] >> 4 * (t % 2);
        words[0][half] = with_high_bits(low[half], h);
        words[1][half] = with_high_bits(low[half] >> 2, h >> 1);
      }
    } else {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v)
        read(words[v], chunk + GRANULE * swizzle(UNIT_BYTES / GRANULE * t + 4 * v + g / 2) + 8 * (g % 2));
    }
  }

  // Codes of plane b in a word's rows 0, 1 (pair 0) or 2, 3 (pair 1), as two float16; `lifted` are the bytes of one or
  // two bits a code, moved up.
  static __device__ __forceinline__ u32 codes_of(const u32 (*pairs)[2], const u32* lifted, int b, int pair) {
    if constexpr (BITS == 1) return lifted[pair] & 0x00010001u << plane_shift(b);
    if constexpr (BITS == 2) return (b < 2 ? lifted[pair] : pairs[0][pair]) & 0x00030003u << plane_shift(b);
    if constexpr (BITS == 3) return pairs[b % 2][pair] & 0x00070007u << 4 * (b / 2);
    if constexpr (BITS == 4) return pairs[b / 2][pair] & 0x000f000fu << 4 * (b % 2);
    return pairs[b][pair];
  }

  // a[half][j]: the operand of rows 8 * t + 4 * half .. + 3 for planes 2 * j (its rows 0..7) and 2 * j + 1 (8..15).
  static __device__ __forceinline__ void operands(u32 (*a)[2][4], const u32 (*words)[2], int lane) {
    const int lift = BITS == 1 ? LIFT - 4 * (lane % 2) : LIFT;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 pairs[VECTORS][2];
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        pairs[v][0] = __byte_perm(words[v][half], 0, 0x4140);
        pairs[v][1] = __byte_perm(words[v][half], 0, 0x4342);
      }
      const u32 lifted[2] = {pairs[0][0] << lift, pairs[0][1] << lift};
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) a[half][j][r] = codes_of(pairs, lifted, 2 * j + r % 2, r / 2);
    }
  }

  // Planes 0 and 2 of 3-bit codes in place, from their low two bits and, in bits 0 and 2 of each byte, their high one.
  static __device__ __forceinline__ u32 with_high_bits(u32 low, u32 high) {
    return low & 0x33333333u | high << 2 & 0x04040404u | high << 4 & 0x40404040u;
  }

 private:
  static __device__ __forceinline__ int shuffled(int x) {
    if constexpr (BITS == 2) return (x >> 3 & 1) << 1;
    if constexpr (BITS == 4) return (x >> 3 & 3) << 1;
    if constexpr (BITS == 8) return (x >> 4 & 3) << 1;
    return 0;
  }

  static __device__ __forceinline__ void read(u32* words, const u8* at) {
    const uint2 both = *reinterpret_cast<const uint2*>(at);
    words[0] = both.x;
    words[1] = both.y;
  }
};
