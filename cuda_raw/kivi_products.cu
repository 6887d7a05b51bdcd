// Products of queries with grouped keys, and of weights with grouped values (kvsketch.kivi), from arrays of codes.
#include "numbers.cuh"
#include "streams.cuh"

constexpr int THREADS = 128, TOKENS = 32;

// The fields of PRODUCT in kivi.py, in their order.
struct Product {
  i64 tokens;           // of a head
  int heads, queries;   // all key heads, and queries of each
  int width, bits, group, parts, bytes, dtype, splits;
};

// Keys: a block has 32 tokens of one group, a lane each, and eight queries, two a warp.
constexpr int QUERIES = 8, QUERIES_PER_WARP = 2;
// Channels whose weights are in shared memory at a time.
constexpr int CHANNELS = 256;

// q (heads, queries, width), scale and zero (heads, parts, width) to scores (heads, queries, tokens). Grid (tiles of a
// head * ceil(queries / QUERIES), heads).
__global__ void __launch_bounds__(THREADS)
    key_scores(const void* q, const u8* codes, const u16* scale, const u16* zero, void* scores, const Product shape) {
  __shared__ float weights[QUERIES][CHANNELS];
  const u32 query_tiles = (shape.queries + QUERIES - 1) / QUERIES, tile = blockIdx.x / query_tiles;
  const int tiles = (shape.group + TOKENS - 1) / TOKENS, part = tile / tiles, lane = threadIdx.x % 32;
  const i64 first = (i64)part * shape.group, end = min(first + shape.group, shape.tokens);
  const i64 token = first + tile % tiles * TOKENS + lane;
  const int first_query = blockIdx.x % query_tiles * QUERIES, own = threadIdx.x / 32 * QUERIES_PER_WARP;
  for (int head = blockIdx.y; head < shape.heads; head += gridDim.y) {
    const i64 rows = (i64)head * shape.queries + first_query, row = head * shape.tokens + token;
    const i64 numbers = ((i64)head * shape.parts + part) * shape.width;
    float offsets[QUERIES_PER_WARP] = {0.f, 0.f}, sums[QUERIES_PER_WARP] = {0.f, 0.f};
#pragma unroll
    for (int r = 0; r < QUERIES_PER_WARP; ++r) {
      if (first_query + own + r >= shape.queries) continue;
      for (int c = lane; c < shape.width; c += 32)
        offsets[r] += load_number(q, (rows + own + r) * shape.width + c, shape.dtype) * half_number(zero[numbers + c]);
      offsets[r] = warp_sum(offsets[r]);
    }
    for (int start = 0; start < shape.width; start += CHANNELS) {
      __syncthreads();
      for (int e = threadIdx.x; e < QUERIES * CHANNELS; e += THREADS) {
        const int query = e / CHANNELS, channel = start + e % CHANNELS;
        float weight = 0.f;
        if (channel < shape.width && first_query + query < shape.queries)
          weight = load_number(q, (rows + query) * shape.width + channel, shape.dtype) *
                   half_number(scale[numbers + channel]);
        weights[query][e % CHANNELS] = weight;
      }
      __syncthreads();
      if (token >= end) continue;
      const int stop = min(CHANNELS, shape.width - start);
      for (int c = 0; c < stop; c += OCT) {
        const u8* from = codes + row * shape.bytes + (i64)(start + c) / OCT * shape.bits;
        const u64 stream = load_stream(from, stream_bytes(min(OCT, stop - c), shape.bits));
#pragma unroll
        for (int j = 0; j < OCT; ++j) {
          const float code = code_of(stream, j, shape.bits);
#pragma unroll
          for (int r = 0; r < QUERIES_PER_WARP; ++r) sums[r] += weights[own + r][c + j] * code;
        }
      }
    }
    if (token >= end) continue;
#pragma unroll
    for (int r = 0; r < QUERIES_PER_WARP; ++r)
      if (first_query + own + r < shape.queries)
        store_number(scores, (rows + own + r) * shape.tokens + token, shape.dtype, sums[r] + offsets[r]);
  }
}

// Values: a block has 16 octs of channels, four queries and one split of the tokens, of which each eighth is a slot's.
constexpr int OCTS = 16, SLOTS = THREADS / OCTS, WEIGHTS = 4;

// p (heads, queries, tokens), scale and zero (heads, tokens, parts) to sums (splits, heads, queries, width). Grid
// (splits * blocks of channels * ceil(queries / WEIGHTS), heads).
__global__ void __launch_bounds__(THREADS, 4)
    weighted_values(const void* p, const u8* codes, const u16* scale, const u16* zero, float* sums,
                    const Product shape) {
  __shared__ float slots[SLOTS][OCTS * OCT];
  const u32 query_tiles = (shape.queries + WEIGHTS - 1) / WEIGHTS, tile = blockIdx.x / query_tiles;
  const int blocks = (shape.width + OCTS * OCT - 1) / (OCTS * OCT), block = tile % blocks;
  const int split = tile / blocks, slot = threadIdx.x / OCTS;
  const int first_channel = (block * OCTS + threadIdx.x % OCTS) * OCT;
  const int count = min(max(shape.width - first_channel, 0), OCT), first_query = blockIdx.x % query_tiles * WEIGHTS;
  const i64 per_split = (shape.tokens + shape.splits - 1) / shape.splits;
  const i64 first = split * per_split, end = min(first + per_split, shape.tokens);
  u32 starts = 1;  // bit j: a group begins at channel j
#pragma unroll
  for (int j = 1; j < OCT; ++j) starts |= (u32)((first_channel + j) % shape.group == 0) << j;
  for (int head = blockIdx.y; head < shape.heads; head += gridDim.y) {
    const i64 rows = (i64)head * shape.queries + first_query;
    float mixed[WEIGHTS][OCT];
#pragma unroll
    for (float(&mix)[OCT] : mixed)
#pragma unroll
      for (float& number : mix) number = 0.f;
    for (i64 token = first + slot; token < end && count; token += SLOTS) {
      const i64 row = head * shape.tokens + token;
      const u64 stream = load_stream(codes + row * shape.bytes + first_channel / OCT * shape.bits,
                                     stream_bytes(count, shape.bits));
      float probabilities[WEIGHTS];
#pragma unroll
      for (int r = 0; r < WEIGHTS; ++r)
        probabilities[r] = first_query + r < shape.queries
                               ? load_number(p, (rows + r) * shape.tokens + token, shape.dtype)
                               : 0.f;
      float step = 0.f, least = 0.f;
#pragma unroll
      for (int j = 0; j < OCT; ++j) {
        if (j < count && starts >> j & 1) {
          const i64 at = row * shape.parts + (first_channel + j) / shape.group;
          step = half_number(scale[at]), least = half_number(zero[at]);
        }
        const float number = fmaf(code_of(stream, j, shape.bits), step, least);
#pragma unroll
        for (int r = 0; r < WEIGHTS; ++r) mixed[r][j] = fmaf(probabilities[r], number, mixed[r][j]);
      }
    }
#pragma unroll
    for (int r = 0; r < WEIGHTS; ++r) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < OCT; ++j) slots[slot][threadIdx.x % OCTS * OCT + j] = mixed[r][j];
      __syncthreads();
      const int channel = block * OCTS * OCT + threadIdx.x;
      if (channel >= shape.width || first_query + r >= shape.queries) continue;
      float sum = 0.f;
#pragma unroll
      for (int s = 0; s < SLOTS; ++s) sum += slots[s][threadIdx.x];
      const i64 all = (i64)shape.heads * shape.queries;
      sums[(split * all + rows + r) * shape.width + channel] = sum;
    }
  }
}

// Sums over the splits, (splits, size) to (size) of a dtype.
__global__ void __launch_bounds__(THREADS)
    join_splits(const float* sums, void* out, const int dtype, const i64 size, const int splits) {
  const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
  if (at >= size) return;
  float sum = 0.f;
  for (int split = 0; split < splits; ++split) sum += sums[split * size + at];
  store_number(out, at, dtype, sum);
}
