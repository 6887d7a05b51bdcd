// Signs and codes to bit streams and back. A thread has eight numbers of a row; rows whose streams follow one another
// without gaps are given as one.
#include "streams.cuh"

constexpr int THREADS = 128;

// Eight neighbours, loaded and stored as vectors where they are aligned.
template <class Word>
struct __align__(8 * sizeof(Word) < 16 ? 8 * sizeof(Word) : 16) Eight {
  Word words[OCT];
};

// Which eight numbers of (rows, n) a thread has.
struct Place {
  i64 row, first;
  int count;  // 0: none

  __device__ __forceinline__ Place(i64 rows, i64 n) {
    const i64 index = (i64)blockIdx.x * THREADS + threadIdx.x, octs = (n + OCT - 1) / OCT;
    row = rows == 1 ? 0 : index / octs;
    first = (index - row * octs) * OCT;
    count = row < rows && first < n ? (int)min((i64)OCT, n - first) : 0;
  }
};

// The numbers of a place; missing ones are the first.
template <class Word>
__device__ __forceinline__ Eight<Word> load_eight(const Word* from, int count, bool aligned) {
  if (aligned && count == OCT) return *reinterpret_cast<const Eight<Word>*>(from);
  Eight<Word> numbers;
#pragma unroll
  for (int j = 0; j < OCT; ++j) numbers.words[j] = from[j < count ? j : 0];
  return numbers;
}

// Bits 1 where the bit pattern of one of `count` numbers from `at` on is at most `largest` or is `zero`.
template <class Word>
__device__ __forceinline__ u32 signs_of(const void* x, i64 at, int count, u64 largest, u64 zero, bool aligned) {
  const Eight<Word> numbers = load_eight(static_cast<const Word*>(x) + at, count, aligned);
  u32 byte = 0;
#pragma unroll
  for (int j = 0; j < OCT; ++j)
    byte |= (u32)(j < count && (numbers.words[j] <= largest || numbers.words[j] == zero)) << j;
  return byte;
}

// Bits 1 where x >= 0, which for every dtype of 1, 2, 4 or 8 `bytes` is signs_of with the right two numbers.
__global__ void __launch_bounds__(THREADS)
    pack_signs(const void* x, u8* packed, const i64 rows, const i64 n, const u64 largest, const u64 zero,
               const int bytes, const int aligned) {
  const Place place(rows, n);
  if (!place.count) return;
  const i64 at = place.row * n + place.first;
  packed[place.row * ((n + 7) / 8) + place.first / 8] =
      bytes == 1   ? signs_of<u8>(x, at, place.count, largest, zero, aligned)
      : bytes == 2 ? signs_of<u16>(x, at, place.count, largest, zero, aligned)
      : bytes == 4 ? signs_of<u32>(x, at, place.count, largest, zero, aligned)
                   : signs_of<u64>(x, at, place.count, largest, zero, aligned);
}

__global__ void __launch_bounds__(THREADS)
    pack_codes(const u8* codes, u8* packed, const i64 rows, const i64 n, const int bits, const int aligned) {
  const Place place(rows, n);
  if (!place.count) return;
  const Eight<u8> numbers = load_eight(codes + place.row * n + place.first, place.count, aligned);
  u64 stream = 0;
#pragma unroll
  for (int j = 0; j < OCT; ++j)
    if (j < place.count) stream |= (u64)(numbers.words[j] & ((1 << bits) - 1)) << j * bits;
  u8* to = packed + place.row * ((n * bits + 7) / 8) + place.first / 8 * bits;
  store_stream(to, stream, bits, stream_bytes(place.count, bits), aligned);
}

// Codes, or the signs 1 and -1 of codes of one bit.
__global__ void __launch_bounds__(THREADS)
    unpack_codes(const u8* packed, u8* codes, const i64 rows, const i64 n, const int bits, const int signs,
                 const int aligned) {
  const Place place(rows, n);
  if (!place.count) return;
  const u8* from = packed + place.row * ((n * bits + 7) / 8) + place.first / 8 * bits;
  const u64 stream = load_stream(from, stream_bytes(place.count, bits));
  Eight<u8> numbers;
#pragma unroll
  for (int j = 0; j < OCT; ++j) {
    const int code = code_of(stream, j, bits);
    numbers.words[j] = signs ? 2 * code - 1 : code;
  }
  u8* to = codes + place.row * n + place.first;
  if (aligned && place.count == OCT) {
    *reinterpret_cast<Eight<u8>*>(to) = numbers;
    return;
  }
#pragma unroll
  for (int j = 0; j < OCT; ++j)
    if (j < place.count) to[j] = numbers.words[j];
}
