// A thread's share of a unit of codes (docs/layout.md): bytes 8 i .. 8 i + 7 of each of its vectors, which are eight
// contraction rows of the lanes i, 8 + i, 16 + i and 24 + i ("blocks" 0..3). Eight threads, i = 0..7, hold eight rows
// of all 32 lanes; where a unit has 16 rows (1 and 3 bits), threads 8 lanes apart hold its two halves.
#include "quantize.cuh"

constexpr int VECTOR_BYTES = 64;

template <int BITS>
struct UnitPart {
  static constexpr int ROWS = BITS == 1 || BITS == 3 ? 16 : 8;
  static constexpr int BYTES = 4 * ROWS * BITS;
  // 3 bits: the low two bits, then the high one.
  static constexpr int VECTORS = BITS == 3 ? 2 : BITS == 1 ? 1 : BITS / 2;

  u32 words[VECTORS][2];

  // Bit of a byte of `vector_of(block)` where codes of a block are.
  __device__ __forceinline__ static constexpr int shift_of(int block) {
    return BITS == 1 ? block : BITS == 3 ? 2 * block : BITS * (block % (8 / BITS));
  }
  __device__ __forceinline__ static constexpr int vector_of(int block) {
    return BITS == 1 || BITS == 3 ? 0 : block / (8 / BITS);
  }

  __device__ __forceinline__ UnitPart() {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) words[v][0] = words[v][1] = 0;
  }

  // The code of place `j` of eight and of a block; it comes plus ROUNDER_BITS.
  __device__ __forceinline__ void put(int j, int block, u32 code) {
    if (BITS == 3) {
      words[0][j / 4] += (code & 3) << (8 * (j % 4) + 2 * block);
      words[1][j / 4] += (code >> 2 & 1) << (8 * (j % 4) + block);
    } else {
      words[vector_of(block)][j / 4] += code - ROUNDER_BITS << 8 * (j % 4) + shift_of(block);
    }
  }

  // Codes of a block go, those of places below `count` stay.
  __device__ __forceinline__ void keep(int count, int block) {
#pragma unroll
    for (int j = 0; j < OCT; ++j) {
      if (j < count) continue;
      words[vector_of(block)][j / 4] &= ~((1u << (BITS == 3 ? 2 : BITS)) - 1 << 8 * (j % 4) + shift_of(block));
      if (BITS == 3) words[1][j / 4] &= ~(1u << 8 * (j % 4) + block);
    }
  }

  __device__ __forceinline__ int code(int j, int block) const {
    const int byte = 8 * (j % 4);
    if (BITS == 3)
      return (words[0][j / 4] >> (byte + 2 * block) & 3) | (words[1][j / 4] >> (byte + block) & 1) << 2;
    return words[vector_of(block)][j / 4] >> (byte + shift_of(block)) & ((1 << BITS) - 1);
  }

  // Places and threads of eight lanes change sides: place j of thread i becomes place i of thread j.
  __device__ __forceinline__ void transpose() {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      u32* w = words[v];
      const u32 other = __shfl_xor_sync(ALL_LANES, lane & 4 ? w[0] : w[1], 4);
      w[lane & 4 ? 0 : 1] = other;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 far = __shfl_xor_sync(ALL_LANES, w[half], 2);
        w[half] = lane & 2 ? __byte_perm(far, w[half], 0x7632) : __byte_perm(w[half], far, 0x5410);
        far = __shfl_xor_sync(ALL_LANES, w[half], 1);
        w[half] = lane & 1 ? __byte_perm(far, w[half], 0x7351) : __byte_perm(w[half], far, 0x6240);
      }
    }
  }

  // Write thread i's bytes of a unit, of the half `half` where units have 16 rows; all 32 lanes call it.
  __device__ __forceinline__ void store(u8* unit, int i, int half, bool active) const {
    if (BITS == 1 || BITS == 3) {
      // Each half of the rows is a nibble of every byte: the first thread writes four bytes, the second the other four.
      const u32* signs = words[VECTORS - 1];
      const u32 far = __shfl_xor_sync(ALL_LANES, half ? signs[0] : signs[1], 8);
      const u32 both = half ? far | signs[1] << 4 : signs[0] | far << 4;
      if (!active) return;
      *reinterpret_cast<u32*>(unit + VECTOR_BYTES * (BITS - 1) + 8 * i + 4 * half) = both;
      if (BITS == 3) write(unit + VECTOR_BYTES * half + 8 * i, 0);
    } else if (active) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) write(unit + VECTOR_BYTES * v + 8 * i, v);
    }
  }

  // What `store` wrote.
  __device__ __forceinline__ static UnitPart load(const u8* unit, int i, int half) {
    UnitPart part;
    if (BITS == 1 || BITS == 3) {
      part.read(unit + VECTOR_BYTES * (BITS - 1) + 8 * i, VECTORS - 1);
#pragma unroll
      for (u32& word : part.words[VECTORS - 1]) word = word >> 4 * half & 0x0f0f0f0f;
      if (BITS == 3) part.read(unit + VECTOR_BYTES * half + 8 * i, 0);
    } else {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) part.read(unit + VECTOR_BYTES * v + 8 * i, v);
    }
    return part;
  }

 private:
  __device__ __forceinline__ void write(u8* bytes, int v) const {
    *reinterpret_cast<uint2*>(bytes) = make_uint2(words[v][0], words[v][1]);
  }
  __device__ __forceinline__ void read(const u8* bytes, int v) {
    const uint2 pair = *reinterpret_cast<const uint2*>(bytes);
    words[v][0] = pair.x, words[v][1] = pair.y;
  }
};
