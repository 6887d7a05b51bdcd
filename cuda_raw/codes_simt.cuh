// Codes of the units of docs/layout.md as float32 numbers. Lane 4 * i + t of a warp takes, of a block of 32 lanes of a
// unit, those that are i modulo 8 (one of each plane, 4 in all) and of the rows every fourth run of four, a quad: a
// 32-bit word holds a quad of one lane or of several planes.
#include "attention.cuh"

constexpr int PLANES = 4, QUAD = 4, LANES = 32;

__device__ __forceinline__ u32 load_word(const u8* at) { return *reinterpret_cast<const u32*>(at); }

template <int BITS>
struct Unit {
  static constexpr int QUADS = BITS == 1 || BITS == 3 ? 4 : 2;
  static constexpr int BYTES = LANES * QUAD * QUADS * BITS / 8;

  // Bytes from one block of 32 lanes to the next, of `rows` rows (a multiple of the unit's).
  static __device__ __forceinline__ int block_bytes(int rows) { return rows / (QUAD * QUADS) * BYTES; }

  // bytes[p] = the codes of lane 8 * p + i in the rows of a quad, a byte each.
  static __device__ __forceinline__ void read(u32* bytes, const u8* block, int quad, int i) {
    const u8* at = block + quad / QUADS * BYTES + 8 * i + 4 * (quad & 1);
    const int late = quad >> 1 & 1;  // rows 8..15 of a unit of 16
    if constexpr (BITS == 1) {
      const u32 word = load_word(at) >> 4 * late;
#pragma unroll
      for (int p = 0; p < PLANES; ++p) bytes[p] = word >> p & 0x01010101u;
    } else if constexpr (BITS == 3) {
      const u32 low = load_word(at + 64 * late), high = load_word(at + 128) >> 4 * late;
#pragma unroll
      for (int p = 0; p < PLANES; ++p) bytes[p] = (low >> 2 * p & 0x03030303u) | (high >> p & 0x01010101u) << 2;
    } else {
      constexpr int A_BYTE = 8 / BITS;
      constexpr u32 MASK = 0x01010101u * ((1u << BITS) - 1u);
#pragma unroll
      for (int vector = 0; vector < PLANES / A_BYTE; ++vector) {
        const u32 word = load_word(at + 64 * vector);
#pragma unroll
        for (int j = 0; j < A_BYTE; ++j) bytes[A_BYTE * vector + j] = word >> BITS * j & MASK;
      }
    }
  }

  // A code as a float without a conversion: its byte among the bits of a constant, which makes (code + OFFSET) / COUNT.
  static constexpr float COUNT = BITS == 8 ? 1.f : 64.f, OFFSET = BITS == 8 ? 32768.f : 128.f;
  static __device__ __forceinline__ float number(u32 bytes, int r) {
    if constexpr (BITS == 8) return __uint_as_float(__byte_perm(bytes, 0x47000000u, 0x7404u | r << 4));
    return __uint_as_float(__byte_perm(bytes, 0x40000000u, 0x7044u | r << 8));
  }
};

// The scales and zeros of a quad, so that code * scale + zero is `number * slope + start`.
template <int BITS>
struct QuadScales {
  float slope[QUAD], start[QUAD];

  __device__ __forceinline__ void set(int r, float scale, float zero) {
    slope[r] = Unit<BITS>::COUNT * scale;
    start[r] = fmaf(-Unit<BITS>::OFFSET, scale, zero);
  }

  // From four float16 scales and zeros, each at a multiple of 8 bytes.
  __device__ __forceinline__ void read(const u8* scales, const u8* zeros) {
    const uint2 s = *reinterpret_cast<const uint2*>(scales), z = *reinterpret_cast<const uint2*>(zeros);
    const float2 s01 = both(s.x), s23 = both(s.y), z01 = both(z.x), z23 = both(z.y);
    set(0, s01.x, z01.x);
    set(1, s01.y, z01.y);
    set(2, s23.x, z23.x);
    set(3, s23.y, z23.y);
  }

  // The numbers that the codes of a quad stand for.
  __device__ __forceinline__ void decode(float* out, u32 bytes) const {
#pragma unroll
    for (int r = 0; r < QUAD; ++r) out[r] = fmaf(Unit<BITS>::number(bytes, r), slope[r], start[r]);
  }

 private:
  static __device__ __forceinline__ float2 both(u32 halves) {
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
  }
};

// In which planes of a block of 32 channels a group begins, groups being channels of a token: the first one counts as
// if it did, and those with no channel do not.
struct PlaneGroups {
  u32 planes;

  __device__ __forceinline__ PlaneGroups(int first_channel, const SideSpec& spec) : planes(1) {
#pragma unroll
    for (int p = 1; p < PLANES; ++p) {
      const int channel = first_channel + 8 * p;
      if (channel < spec.width && channel % spec.group == 0) planes |= 1u << p;
    }
  }
  __device__ __forceinline__ bool begins(int p) const { return planes >> p & 1; }
};

// The sum over t of x[p], in the lanes with t = p: lane 4 * i + t ends up with what lane 8 * t + i of a unit is due.
__device__ __forceinline__ float sum_quads(const float* x, int t) {
  const bool high = t & 2, odd = t & 1;
  const float first = (high ? x[2] : x[0]) + __shfl_xor_sync(ALL_LANES, high ? x[0] : x[2], 2);
  const float second = (high ? x[3] : x[1]) + __shfl_xor_sync(ALL_LANES, high ? x[1] : x[3], 2);
  return (odd ? second : first) + __shfl_xor_sync(ALL_LANES, odd ? first : second, 1);
}
