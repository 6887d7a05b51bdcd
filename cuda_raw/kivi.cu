// Grouped integers that are arrays: codes as a bit stream for each token, scales and zeros beside them (kvsketch.kivi).
#include "pages.cuh"
#include "streams.cuh"

constexpr int THREADS = 128;

// The fields of GROUPS in kivi.py, in their order: n tokens of each of `heads` heads.
struct Groups {
  i64 tokens;
  int heads, width, bits, group, parts;  // parts: groups along the grouped axis
  int by_token;                          // groups are channels of one token, not tokens of one channel
  int bytes;                             // of a token's codes

  // Where the scale and the zero of a number are.
  __device__ __forceinline__ i64 at(int head, i64 token, int channel) const {
    if (by_token) return (head * tokens + token) * parts + channel / group;
    return ((i64)head * parts + token / group) * width + channel;
  }
};

__device__ __forceinline__ void write_group(const Range& range, float levels, i64 at, u16* scale, u16* zero,
                                            u32* saturated) {
  const StoredGroup group = store_group(range, levels);
  scale[at] = group.scale, zero[at] = group.zero;
  if (group.saturated) atomicAdd(saturated, (u32)group.saturated);
}

// Groups of tokens: a thread has one of a channel. Grid (groups * blocks of channels, heads).
__global__ void __launch_bounds__(THREADS)
    scale_tokens(const void* x, u16* scale, u16* zero, u32* saturated, const Places places, const Groups groups) {
  const int blocks = (groups.width + THREADS - 1) / THREADS, part = blockIdx.x / blocks;
  const int channel = blockIdx.x % blocks * THREADS + threadIdx.x;
  if (channel >= groups.width) return;
  const i64 first = (i64)part * groups.group, end = min(first + groups.group, groups.tokens);
  for (int head = blockIdx.y; head < groups.heads; head += gridDim.y) {
    Range range = Range::none();
#pragma unroll 8
    for (i64 token = first; token < end; ++token)
      range.add(load_number(x, numbers_at(places, head, token) + channel, places.dtype));
    write_group(range, (1 << groups.bits) - 1, groups.at(head, first, channel), scale, zero, saturated);
  }
}

// Groups of channels: eight threads have one of a token. Grid (groups of a head / 16, heads).
__global__ void __launch_bounds__(THREADS)
    scale_channels(const void* x, u16* scale, u16* zero, u32* saturated, const Places places, const Groups groups) {
  const i64 index = (i64)blockIdx.x * (THREADS / 8) + threadIdx.x / 8, token = index / groups.parts;
  const int first = index % groups.parts * groups.group, end = min(first + groups.group, groups.width);
  const bool active = token < groups.tokens;
  for (int head = blockIdx.y; head < groups.heads; head += gridDim.y) {
    Range range = Range::none();
    if (active)
      for (int channel = first + threadIdx.x % 8; channel < end; channel += 8)
        range.add(load_number(x, numbers_at(places, head, token) + channel, places.dtype));
#pragma unroll
    for (int apart = 4; apart; apart /= 2)
      range.add(Range{__shfl_xor_sync(ALL_LANES, range.low, apart), __shfl_xor_sync(ALL_LANES, range.high, apart)});
    if (active && threadIdx.x % 8 == 0)
      write_group(range, (1 << groups.bits) - 1, groups.at(head, token, first), scale, zero, saturated);
  }
}

// Codes (heads, tokens, bytes): a thread has eight channels of a token. Grid (octs of a head / THREADS, heads).
__global__ void __launch_bounds__(THREADS)
    quantize(const void* x, const u16* scale, const u16* zero, u8* codes, const Places places, const Groups groups) {
  const int octs = (groups.width + OCT - 1) / OCT;
  const i64 index = (i64)blockIdx.x * THREADS + threadIdx.x, token = index / octs;
  const int first = index % octs * OCT, count = channels_of(first, groups.width);
  if (token >= groups.tokens) return;
  const float levels = (1 << groups.bits) - 1;
  for (int head = blockIdx.y; head < groups.heads; head += gridDim.y) {
    float numbers[OCT];
    load_oct(x, numbers_at(places, head, token) + first, places.dtype, count, places.aligned, numbers);
    u64 stream = 0;
#pragma unroll
    for (int j = 0; j < OCT; ++j) {
      if (j >= count) break;
      const i64 at = groups.at(head, token, first + j);
      const Coder coder(half_number(scale[at]), half_number(zero[at]), levels);
      stream |= (u64)(coder(numbers[j]) - ROUNDER_BITS) << j * groups.bits;
    }
    u8* to = codes + (head * groups.tokens + token) * groups.bytes + first / OCT * groups.bits;
    store_stream(to, stream, groups.bits, stream_bytes(count, groups.bits), groups.width % OCT == 0);
  }
}

// Numbers (heads, tokens, width) of a dtype; beyond float16 they are its largest.
__global__ void __launch_bounds__(THREADS)
    dequantize(const u8* codes, const u16* scale, const u16* zero, void* x, const int dtype, const Groups groups) {
  const int octs = (groups.width + OCT - 1) / OCT;
  const i64 index = (i64)blockIdx.x * THREADS + threadIdx.x, token = index / octs;
  const int first = index % octs * OCT, count = channels_of(first, groups.width);
  if (token >= groups.tokens) return;
  for (int head = blockIdx.y; head < groups.heads; head += gridDim.y) {
    const i64 row = head * groups.tokens + token;
    const u64 stream = load_stream(codes + row * groups.bytes + first / OCT * groups.bits,
                                   stream_bytes(count, groups.bits));
    float numbers[OCT];
#pragma unroll
    for (int j = 0; j < OCT; ++j) {
      if (j >= count) break;
      const i64 at = groups.at(head, token, first + j);
      const float code = code_of(stream, j, groups.bits);
      const float number = __fadd_rn(__fmul_rn(code, half_number(scale[at])), half_number(zero[at]));
      numbers[j] = dtype == FLOAT16 && fabsf(number) > LARGEST_HALF ? copysignf(LARGEST_HALF, number) : number;
    }
    store_oct(x, row * groups.width + first, dtype, count, groups.width % OCT == 0, numbers);
  }
}
