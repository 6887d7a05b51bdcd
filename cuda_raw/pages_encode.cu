// Pages of integers from the numbers of keys and values. Blocks are of 128 threads; eight threads work on eight
// contraction rows by 32 lanes at a time (units.cuh).
#include "pages.cuh"

constexpr int THREADS = 128;
constexpr int ITEMS = THREADS / 8;
// Channels of a block of lanes.
constexpr int LANES = 32;
// Blocks of encode_by_channel that a multiprocessor holds: what its registers allow without spilling any.
constexpr int CHANNEL_BLOCKS = KV_SM >= 100 ? 4 : 5;
// Most (token, group) of a block of encode_by_token.
constexpr int GROUPS = 512;

__device__ __forceinline__ void count_saturated(u32* saturated, int found) {
  if (found) atomicAdd(saturated, (u32)found);
}

// What the eight threads of an item know of eight channels is brought together: thread i gets channel i.
__device__ __forceinline__ Range share_channels(Range* channels, int i) {
#pragma unroll
  for (int apart = 4; apart; apart /= 2) {
    const bool upper = i & apart;
#pragma unroll
    for (int c = 0; c < apart; ++c) {
      const Range given = upper ? channels[c] : channels[c + apart];
      Range kept = upper ? channels[c + apart] : channels[c];
      kept.add(Range{__shfl_xor_sync(ALL_LANES, given.low, apart), __shfl_xor_sync(ALL_LANES, given.high, apart)});
      channels[c] = kept;
    }
  }
  return channels[0];
}

// Up to eight channels of four tokens, eight tokens apart.
__device__ __forceinline__ void load_channels(const void* x, i64 at, const Places& places, int count,
                                              float (*numbers)[OCT]) {
  if (places.aligned && count == OCT) {
    load_octs(x, at, 8 * places.x_token, places.dtype, numbers);
    return;
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) load_oct(x, at + 8 * b * places.x_token, places.dtype, count, places.aligned, numbers[b]);
}

// Up to 32 neighbours of one token; nothing for octs of which none is there.
__device__ __forceinline__ void load_lanes(const void* x, i64 at, const Places& places, int count,
                                           float (*numbers)[OCT]) {
  if (places.aligned && count >= LANES) {
    load_octs(x, at, OCT, places.dtype, numbers);
    return;
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int here = channels_of(OCT * b, count);
    if (here) load_oct(x, at + OCT * b, places.dtype, here, places.aligned, numbers[b]);
  }
}

// Keys: groups are tokens of one channel. Grid (items of a head / ITEMS, heads): an item is eight channels by the
// tokens of one group, of which thread i has 8 b + i. Groups of 32 tokens are read once, others again, from the cache.
template <int BITS>
__global__ void __launch_bounds__(THREADS, CHANNEL_BLOCKS)
    encode_by_channel(const void* x, u8* records, u32* saturated, const Places places, const SideSpec side) {
  const int i = threadIdx.x % 8, octs = side.rows / OCT, blocks = side.group / 32;
  const u32 item = blockIdx.x * ITEMS + threadIdx.x / 8;
  const u32 page = item / (side.groups * octs), part = item / octs % side.groups, oct = item % octs;
  const int first = oct * OCT;
  const bool active = page < (u32)places.pages;
  const int count = active ? channels_of(first, side.width) : 0;
  const float levels = (1 << BITS) - 1;
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const i64 start = numbers_at(places, head, (i64)page * side.tokens + part * side.group + i) + first;
    u8* record = records + record_at(places, head, page);
    float numbers[4][OCT] = {};
    Range ranges[OCT];
#pragma unroll
    for (Range& range : ranges) range = Range::none();
    if (count)
      for (int block = 0; block < blocks; ++block) {
        load_channels(x, start + 32 * block * places.x_token, places, count, numbers);
#pragma unroll
        for (int b = 0; b < 4; ++b)
#pragma unroll
          for (int c = 0; c < OCT; ++c) ranges[c].add(numbers[b][c]);
      }
    const Range own = share_channels(ranges, i);
    StoredGroup group{0, 0, 0};
    if (i < count) group = store_group(own, levels);
    count_saturated(saturated, group.saturated);
    if (active) {
      const int at = 2 * (part * side.rows + first + i);
      *reinterpret_cast<u16*>(record + side.scale + at) = group.scale;
      *reinterpret_cast<u16*>(record + side.zero + at) = group.zero;
    }
    const u32 both = group.scale | (u32)group.zero << 16;
    for (int block = 0; block < blocks; ++block) {
      if (blocks > 1 && count) load_channels(x, start + 32 * block * places.x_token, places, count, numbers);
      UnitPart<BITS> unit;
#pragma unroll
      for (int c = 0; c < OCT; ++c) {
        const u32 halves = __shfl_sync(ALL_LANES, both, c, 8);
        const Coder coder(half_number(halves), half_number(halves >> 16), levels);
#pragma unroll
        for (int b = 0; b < 4; ++b) unit.put(c, b, coder(numbers[b][c]));
      }
      constexpr int ROWS = UnitPart<BITS>::ROWS;
      const int at = (part * blocks + block) * (side.rows / ROWS) + first / ROWS;
      unit.store(record + side.codes + at * UnitPart<BITS>::BYTES, i, oct % 2, active);
    }
  }
}

// Values, and latents: groups are channels of one token. Grid (pairs of a head / pairs of a block * segments, heads):
// a pair is 16 tokens, a segment is up to `most_blocks` blocks of 32 channels, and no group spans two segments. An item
// is 32 channels of eight tokens, one a thread; items 2 e and 2 e + 1 are the halves of a pair.
template <int BITS>
__global__ void __launch_bounds__(THREADS, 6)
    encode_by_token(const void* x, u8* records, u32* saturated, const Places places, const SideSpec side,
                    const int segments, const int most_blocks, const int pairs) {
  // Of each (pair, token, group): least and largest number, in their order; then scale and zero.
  __shared__ u32 lows[GROUPS], highs[GROUPS];
  const int segment = blockIdx.x % segments;
  const int first_pair = blockIdx.x / segments * pairs, all_pairs = places.pages * (side.tokens / 16);
  const int first_channel = segment * most_blocks * LANES, first_group = first_channel / side.group;
  const int stop = min(first_channel + most_blocks * LANES, side.width);
  const int lane_blocks = (stop - first_channel + LANES - 1) / LANES;
  const int groups = (stop - first_channel + side.group - 1) / side.group;
  const int entries = pairs * 16 * groups, items = 2 * pairs * lane_blocks;
  const float levels = (1 << BITS) - 1;
  const int thread_item = threadIdx.x / 8, i = threadIdx.x % 8;
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    for (int e = threadIdx.x; e < entries; e += THREADS) lows[e] = 0xffffffffu, highs[e] = 0;
    __syncthreads();
    float numbers[4][OCT];
    for (int item = thread_item; item < items; item += ITEMS) {
      const int pair = item / 2 / lane_blocks, channel = first_channel + item / 2 % lane_blocks * LANES;
      if (first_pair + pair >= all_pairs) break;
      const int token = item % 2 * 8 + i;
      const i64 start = numbers_at(places, head, (first_pair + pair) * 16 + token);
      load_lanes(x, start + channel, places, stop - channel, numbers);
      int group = channel / side.group;
      Range range = Range::none();
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int c = channel + OCT * b;
        if (c >= stop) break;
        if (c >= (group + 1) * side.group) ++group, range = Range::none();
#pragma unroll
        for (int j = 0; j < OCT; ++j) range.add(numbers[b][j]);
        if (b == 3 || c + OCT >= min((group + 1) * side.group, stop)) {
          const int entry = (pair * groups + group - first_group) * 16 + token;
          atomicMin(lows + entry, ordered(range.low));
          atomicMax(highs + entry, ordered(range.high));
        }
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < entries; e += THREADS) {
      const int pair = first_pair + e / 16 / groups;
      if (pair >= all_pairs) break;
      const StoredGroup group = store_group(Range{unordered(lows[e]), unordered(highs[e])}, levels);
      count_saturated(saturated, group.saturated);
      const int page = pair * 16 / side.tokens;
      const int token = pair * 16 % side.tokens + e % 16;
      u8* record = records + record_at(places, head, page);
      const int at = 2 * ((first_group + e / 16 % groups) * side.tokens + token);
      *reinterpret_cast<u16*>(record + side.scale + at) = group.scale;
      *reinterpret_cast<u16*>(record + side.zero + at) = group.zero;
      lows[e] = __float_as_uint(half_number(group.scale)), highs[e] = __float_as_uint(half_number(group.zero));
    }
    __syncthreads();
    // All threads of a warp take the same number of turns, since `store` needs them all.
    for (int turn = 0; turn < (items + ITEMS - 1) / ITEMS; ++turn) {
      const int item = turn * ITEMS + thread_item;
      const int pair = item / 2 / lane_blocks, channel = first_channel + item / 2 % lane_blocks * LANES;
      const bool active = item < items && first_pair + pair < all_pairs;
      const int token = item % 2 * 8 + i;
      const int at = (first_pair + pair) * 16 + token, page = at / side.tokens;
      UnitPart<BITS> unit;
      if (active) {
        if (items > ITEMS) load_lanes(x, numbers_at(places, head, at) + channel, places, stop - channel, numbers);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int c = channel + OCT * b, count = channels_of(c, stop);
          if (!count) break;
          const int entry = (pair * groups + c / side.group - first_group) * 16 + token;
          const Coder coder(__uint_as_float(lows[entry]), __uint_as_float(highs[entry]), levels);
#pragma unroll
          for (int j = 0; j < OCT; ++j) unit.put(j, b, coder(numbers[b][j]));
          if (count < OCT) unit.keep(count, b);
        }
      }
      unit.transpose();
      constexpr int ROWS = UnitPart<BITS>::ROWS;
      const int place = channel / LANES * (side.tokens / ROWS) + at % side.tokens / ROWS;
      u8* codes = records + record_at(places, head, page) + side.codes;
      unit.store(codes + place * UnitPart<BITS>::BYTES, i, item % 2, active);
    }
    __syncthreads();
  }
}
