// Numbers float32 of pages of integers; the threads have the shares that they have when pages are encoded.
#include "pages.cuh"

constexpr int THREADS = 128;
constexpr int ITEMS = THREADS / 8;

__device__ __forceinline__ float recovered(int code, float scale, float zero) {
  return __fadd_rn(__fmul_rn((float)code, scale), zero);
}

__device__ __forceinline__ float half_at(const u8* bytes, int at) {
  return half_number(reinterpret_cast<const u16*>(bytes)[at]);
}

// Keys whose groups are tokens of one channel. Grid (items of a head / ITEMS, heads).
template <int BITS>
__device__ __forceinline__ void decode_by_channel_of(const u8* records, float* x, const Places& places,
                                                     const SideSpec& side) {
  constexpr int ROWS = UnitPart<BITS>::ROWS;
  const int i = threadIdx.x % 8, octs = (side.width + OCT - 1) / OCT, blocks = side.tokens / 32;
  const u32 item = blockIdx.x * ITEMS + threadIdx.x / 8;
  const u32 page = item / (blocks * octs), block = item / octs % blocks, first = item % octs * OCT;
  if (page >= (u32)places.pages) return;
  const int count = channels_of(first, side.width);
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const u8* record = records + record_at(places, head, page);
    const int at = block * (side.rows / ROWS) + first / ROWS;
    const auto unit =
        UnitPart<BITS>::load(record + side.codes + at * UnitPart<BITS>::BYTES, i, first / OCT % 2);
    const int group = block * 32 / side.group * side.rows + first;
    float scale[OCT], zero[OCT];
    load_oct(record + side.scale, group, FLOAT16, OCT, true, scale);
    load_oct(record + side.zero, group, FLOAT16, OCT, true, zero);
    float* out = x + numbers_at(places, head, (i64)page * side.tokens + block * 32 + i) + first;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float numbers[OCT];
#pragma unroll
      for (int c = 0; c < OCT; ++c) numbers[c] = recovered(unit.code(c, b), scale[c], zero[c]);
      store_oct(out + 8 * b * places.x_token, count, places.aligned, numbers);
    }
  }
}

__global__ void __launch_bounds__(THREADS, 4)
    decode_by_channel(const u8* records, float* x, const Places places, const SideSpec side) {
  switch (side.bits) {
    case 1: return decode_by_channel_of<1>(records, x, places, side);
    case 2: return decode_by_channel_of<2>(records, x, places, side);
    case 3: return decode_by_channel_of<3>(records, x, places, side);
    case 4: return decode_by_channel_of<4>(records, x, places, side);
    case 8: return decode_by_channel_of<8>(records, x, places, side);
  }
}

// Values, and latents, whose groups are channels of one token. Grid (items of a head / ITEMS, heads): an item is eight
// tokens by 32 channels; all 32 lanes of a warp go through `transpose`.
template <int BITS>
__device__ __forceinline__ void decode_by_token_of(const u8* records, float* x, const Places& places,
                                                   const SideSpec& side) {
  constexpr int ROWS = UnitPart<BITS>::ROWS;
  const int i = threadIdx.x % 8, octs = side.tokens / OCT, blocks = (side.width + 31) / 32;
  const u32 item = blockIdx.x * ITEMS + threadIdx.x / 8;
  const u32 page = item / (blocks * octs), block = item % blocks, oct = item / blocks % octs;
  const bool active = page < (u32)places.pages;
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const u8* record = records + record_at(places, head, page);
    UnitPart<BITS> unit;
    if (active) {
      const int at = block * (side.tokens / ROWS) + oct * OCT / ROWS;
      unit = UnitPart<BITS>::load(record + side.codes + at * UnitPart<BITS>::BYTES, i, oct % 2);
    }
    unit.transpose();
    if (!active) continue;
    const int token = oct * OCT + i;
    float* out = x + numbers_at(places, head, (i64)page * side.tokens + token);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int first = block * 32 + OCT * b, count = channels_of(first, side.width);
      if (!count) break;
      const int group = first / side.group * side.tokens + token;
      const float scale = half_at(record + side.scale, group), zero = half_at(record + side.zero, group);
      float numbers[OCT];
#pragma unroll
      for (int c = 0; c < OCT; ++c) numbers[c] = recovered(unit.code(c, b), scale, zero);
      store_oct(out + first, count, places.aligned, numbers);
    }
  }
}

__global__ void __launch_bounds__(THREADS, 4)
    decode_by_token(const u8* records, float* x, const Places places, const SideSpec side) {
  switch (side.bits) {
    case 1: return decode_by_token_of<1>(records, x, places, side);
    case 2: return decode_by_token_of<2>(records, x, places, side);
    case 3: return decode_by_token_of<3>(records, x, places, side);
    case 4: return decode_by_token_of<4>(records, x, places, side);
    case 8: return decode_by_token_of<8>(records, x, places, side);
  }
}
