// Codes as little-endian bit streams (kvsketch.bitpack): eight codes of 2 bits, say, are 2 whole bytes.
#include "numbers.cuh"

// Bytes that `count` of eight codes take.
__device__ __forceinline__ int stream_bytes(int count, int bits) { return (count * bits + 7) / 8; }

// The first `bytes` bytes of eight codes of `bits` bits; all of them in one store where that is `aligned`.
__device__ __forceinline__ void store_stream(u8* to, u64 stream, int bits, int bytes, bool aligned) {
  if (aligned && bytes == bits && bits != 3) {
    if (bits == 1) *to = stream;
    if (bits == 2) *reinterpret_cast<u16*>(to) = stream;
    if (bits == 4) *reinterpret_cast<u32*>(to) = stream;
    if (bits == 8) *reinterpret_cast<u64*>(to) = stream;
    return;
  }
#pragma unroll
  for (int b = 0; b < 8; ++b)
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

__device__ __forceinline__ int code_of(u64 stream, int j, int bits) {
  return (int)(stream >> j * bits) & ((1 << bits) - 1);
}
