// Codes as little-endian bit streams (kvsketch.bitpack): eight codes of BITS bits are BITS whole bytes.
#include "numbers.cuh"

// Bytes that `count` of eight codes take.
__device__ __forceinline__ int stream_bytes(int count, int bits) { return (count * bits + 7) / 8; }

// The first `bytes` bytes of eight codes, or all of them in one store where that is `aligned`.
template <int BITS>
__device__ __forceinline__ void store_stream(u8* to, u64 stream, int bytes, bool aligned) {
  if (aligned && bytes == BITS && BITS != 3) {
    if (BITS == 1) *to = stream;
    if (BITS == 2) *reinterpret_cast<u16*>(to) = stream;
    if (BITS == 4) *reinterpret_cast<u32*>(to) = stream;
    if (BITS == 8) *reinterpret_cast<u64*>(to) = stream;
    return;
  }
#pragma unroll
  for (int b = 0; b < BITS; ++b)
    if (b < bytes) to[b] = stream >> 8 * b;
}

// The first `bytes` bytes of a stream, at most eight; the rest are 0.
__device__ __forceinline__ u64 load_stream(const u8* from, int bytes) {
  u64 stream = 0;
#pragma unroll
  for (int b = 0; b < 8; ++b)
    if (b < bytes) stream |= (u64)from[b] << 8 * b;
  return stream;
}

__device__ __forceinline__ int code_of(u64 stream, int j, int bits) { return (int)(stream >> j * bits) & ((1 << bits) - 1); }
