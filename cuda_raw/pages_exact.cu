// Pages of numbers as they came: copied where dtypes agree, else rounded as NumPy's astype rounds.
#include "pages.cuh"

constexpr int THREADS = 128;

// Eight bit patterns of 16 or 32 bits from one place to another, on 16 bytes or one at a time.
template <class Word>
__device__ __forceinline__ void copy_oct(Word* to, const Word* from, int count, bool aligned) {
  if (aligned && count == OCT) {
    constexpr int VECTORS = OCT * sizeof(Word) / sizeof(uint4);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) reinterpret_cast<uint4*>(to)[v] = reinterpret_cast<const uint4*>(from)[v];
    return;
  }
#pragma unroll
  for (int j = 0; j < OCT; ++j)
    if (j < count) to[j] = from[j];
}

// What NumPy makes of a float16 NaN: its sign and payload, which cvt drops.
__device__ __forceinline__ float widened(u16 bits, float number) {
  if (number == number) return number;
  return __uint_as_float((bits & 0x8000u) << 16 | 0x7fc00000u | (bits & 0x1ffu) << 13);
}

// Grid (octs of a head / THREADS, heads): a record's first bytes are its tokens' numbers, of dtype side.dtype.
__global__ void __launch_bounds__(THREADS)
    encode_exact(const void* x, u8* records, const Places places, const SideSpec side) {
  const u32 item = blockIdx.x * THREADS + threadIdx.x, octs = (side.width + OCT - 1) / OCT;
  const u32 token = item / octs, first = item % octs * OCT, page = token / side.tokens;
  if (page >= (u32)places.pages) return;
  const int count = channels_of(first, side.width);
  const i64 to = (i64)(token % side.tokens) * side.width + first;
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const i64 at = numbers_at(places, head, token) + first;
    u8* record = records + record_at(places, head, page);
    if (places.dtype == side.dtype) {
      if (side.dtype == FLOAT32)
        copy_oct(reinterpret_cast<u32*>(record) + to, static_cast<const u32*>(x) + at, count, places.aligned);
      else
        copy_oct(reinterpret_cast<u16*>(record) + to, static_cast<const u16*>(x) + at, count, places.aligned);
      continue;
    }
    float numbers[OCT];
    load_oct(x, at, places.dtype, count, places.aligned, numbers);
#pragma unroll
    for (int j = 0; j < OCT; ++j) {
      if (j >= count) break;
      const bool half = places.dtype == FLOAT16;
      const float number = half ? widened(static_cast<const u16*>(x)[at + j], numbers[j]) : numbers[j];
      store_number(record, to + j, side.dtype, number);
    }
  }
}

// The numbers of records as float32, which x is; places.dtype is that of the records.
__global__ void __launch_bounds__(THREADS)
    decode_exact(const u8* records, float* x, const Places places, const SideSpec side) {
  const u32 item = blockIdx.x * THREADS + threadIdx.x, octs = (side.width + OCT - 1) / OCT;
  const u32 token = item / octs, first = item % octs * OCT, page = token / side.tokens;
  if (page >= (u32)places.pages) return;
  const int count = channels_of(first, side.width);
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    float numbers[OCT];
    load_oct(records + record_at(places, head, page), (i64)(token % side.tokens) * side.width + first, side.dtype,
             count, places.aligned, numbers);
    store_oct(x + numbers_at(places, head, token) + first, count, places.aligned, numbers);
  }
}
