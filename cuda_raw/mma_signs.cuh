// Products of the stored signs of 32 tokens with columns of integers, on tensor cores.
//
// Integers of up to 16 bits are two bytes, high and low, operands of m16n8k32 whose other operand is the bits where
// they lie in bytes: bit b of plane b is 2^b. A lane needs two operations for eight bits. Bit planes of the integers
// times the bits as they are (m16n8k256.b1) would take the bits in the order of lanes first, which takes as long, then
// operations for each plane.
#include "mma_coefficients.cuh"
#include "mma_team.cuh"

constexpr float LEVELS = 127.f * 256.f;  // the largest integer whose high byte, rounded, is a signed one

// The two bytes of 16 integers of a lane, as a sum 256 * high + low.
struct TwoBytes {
  u32 high[4] = {}, low[4] = {};

  __device__ __forceinline__ void set(int i, int x) {
    high[i / 4] |= ((x + 128) >> 8 & 255) << 8 * (i % 4);
    low[i / 4] |= (x & 255) << 8 * (i % 4);
  }
};

// Integers in shared memory are 16 bytes a lane of each chunk, each stream of them after the other.
__device__ __forceinline__ uint4* lane_bytes(u8* at, int lane) { return reinterpret_cast<uint4*>(at) + lane; }
__device__ __forceinline__ uint4 pack(const u32* words) { return make_uint4(words[0], words[1], words[2], words[3]); }

// Signs of at most 64 * CHUNKS rows: a chunk is four units, one for each lane of a quad. Norms follow.
template <int CHUNKS>
struct Signs {
  using Bits = Chunk<2>;  // whose units are of the same size
  static constexpr int CHUNK_ROWS = 64, UNIT_ROWS = 16, UNIT_BYTES = 64, CHUNK_BYTES = 4 * UNIT_BYTES;
  static constexpr int NORM_BYTES = 2 * CHUNK, BYTES = CHUNKS * CHUNK_BYTES + NORM_BYTES;
  static constexpr int STREAM_BYTES = CHUNKS * 32 * GRANULE;  // of bytes to multiply with

  template <class Team>
  static __device__ __forceinline__ void copy(u8* to, const u8* codes, const u8* norms, int rows) {
    constexpr int A_UNIT = UNIT_BYTES / GRANULE, OF_NORMS = NORM_BYTES / GRANULE;
    Team::template each<CHUNKS * CHUNK_BYTES / GRANULE>((u32)rows / UNIT_ROWS * A_UNIT, [&](int x, int first) {
      copy_async_16(to + GRANULE * Bits::swizzle(x, first), codes + GRANULE * (x + first));
    });
    Team::template each<OF_NORMS>(OF_NORMS, [&](int x, int first) {
      copy_async_16(to + CHUNKS * CHUNK_BYTES + GRANULE * (x + first), norms + GRANULE * (x + first));
    });
  }

  // Adds to sums[s] the products of the bits with stream s, of `own` streams at `first` and the others at `second`.
  template <int STREAMS, int OWN>
  static __device__ __forceinline__ void multiply(int (*sums)[2][4], const u8* signs, const u8* first, const u8* second,
                                                  int lane) {
    const int g = lane / QUAD, t = lane % QUAD;
    const u8* own = signs + GRANULE * Bits::swizzle(UNIT_BYTES / GRANULE * t + g / 2) + 8 * (g % 2);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      // Of tokens g, 8 + g, 16 + g, 24 + g, rows 0..3 and 8..11 of unit t, then the others.
      const uint2 words = *reinterpret_cast<const uint2*>(own + chunk * CHUNK_BYTES);
      u32 b[STREAMS][4];
#pragma unroll
      for (int s = 0; s < STREAMS; ++s)
        unpack(b[s], load_16((s < OWN ? first + s * STREAM_BYTES : second + (s - OWN) * STREAM_BYTES) +
                             (chunk * 32 + lane) * GRANULE));
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows 0..7 of units, then 8..15
        const u32 x = words.x >> 4 * half, y = words.y >> 4 * half;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const u32 even = 0x01010101u << 2 * j, odd = even << 1, a[4] = {x & even, x & odd, y & even, y & odd};
#pragma unroll
          for (int s = 0; s < STREAMS; ++s) mma_u8_s8(sums[s][j], a, b[s] + 2 * half);
        }
      }
    }
  }

  // The norm of a token.
  static __device__ __forceinline__ float norm(const u8* signs, int token) {
    return __half2float(reinterpret_cast<const __half*>(signs + CHUNKS * CHUNK_BYTES)[token]);
  }
};
