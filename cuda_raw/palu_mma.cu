// Attention over latents on tensor cores. A block takes a run of tokens in tiles of 32 * groups, for all heads: latents
// become bytes in shared memory, each warp multiplies 32 of their tokens by 32 rows of the matrix of a head, in
// integers, and keys go from there to scores without leaving its registers: scaled, with bias, norm and RoPE, split in
// two bfloat16 numbers each and multiplied by the queries likewise. Weights of a tile become bytes too, and mix the
// value latents.
//
// The matrix comes as pack_matrix makes it, one or two bytes a number, and every tile reads it from the second-level
// cache. Errors: two bytes leave 2^-16 of the largest number of a row of the matrix, of a token's latents where these
// are not codes of one group, and of a tile's largest weight; a single byte 2^-8. Sums and all else are float32.
#include "palu_keys.cuh"

constexpr int SCORE_PAD = 4;  // keeps four scores of a column together, and apart from those of other columns
constexpr float NO_WEIGHT = 1e-30f;  // a tile whose largest weight is less than that adds nothing

// Shared memory of a block, as places in an array of float32; shared_bytes in palu_plan.py has its size.
struct Room {
  int tokens, pitch, columns, tiles;  // of a tile; floats from column to column of scores; all columns, and by eights
  int squares_at, scores_at, weights_at, words_at;

  __device__ __forceinline__ Room(int planes, const Shapes& shapes, const Rebuild& rebuild)
      : tokens(LANES * rebuild.groups), pitch(tokens + SCORE_PAD), columns(shapes.queries), tiles((columns + 7) / 8) {
    squares_at = 5 * tokens + 5 * 8 * tiles;
    scores_at = squares_at + (rebuild.has_norm ? rebuild.heads * tokens : 0);
    weights_at = scores_at + columns * pitch;
    words_at = weights_at + 2 * planes * tiles * tokens;
  }

  // Of the tile's tokens; the last one is their rows of RoPE's tables.
  __device__ __forceinline__ TokenScales keys() const { return {at(0), at(tokens)}; }
  __device__ __forceinline__ TokenScales values() const { return {at(2 * tokens), at(3 * tokens)}; }
  __device__ __forceinline__ int* table_rows() const { return reinterpret_cast<int*>(at(4 * tokens)); }
  // Of each column: the largest score, the sum of weights, and what the last tile did: by how much older weights
  // shrank, the step of the new ones' codes, and what their tokens' zeros add.
  __device__ __forceinline__ float& largest(int column) const { return *at(5 * tokens + column); }
  __device__ __forceinline__ float& total(int column) const { return *at(5 * tokens + 8 * tiles + column); }
  __device__ __forceinline__ float& decay(int column) const { return *at(5 * tokens + 16 * tiles + column); }
  __device__ __forceinline__ float& step(int column) const { return *at(5 * tokens + 24 * tiles + column); }
  __device__ __forceinline__ float& zero(int column) const { return *at(5 * tokens + 32 * tiles + column); }
  // (heads, tokens), where there is a norm; (columns, pitch); (planes, tiles, steps, lanes, 2); latents.
  __device__ __forceinline__ float* squares() const { return at(squares_at); }
  __device__ __forceinline__ float* scores() const { return at(scores_at); }
  __device__ __forceinline__ u32* weights() const { return reinterpret_cast<u32*>(at(weights_at)); }
  __device__ __forceinline__ u32* words() const { return reinterpret_cast<u32*>(at(words_at)); }

 private:
  static __device__ __forceinline__ float* at(int place) {
    extern __shared__ __align__(16) float dynamic[];
    return dynamic + place;
  }
};

// Scores of a warp's 32 tokens with all queries, for the heads that the warp has, every so many from `head` on.
template <int KEY_PLANES, int PLANES_OF_BYTES>
__device__ __forceinline__ void score_tokens(const Room& room, int group, int head, const uint4* q, const uint4* matrix,
                                             const float2* columns, const float* key_bias, const float* norm,
                                             const float* cos, const float* sin, const Shapes& shapes,
                                             const Rebuild& rebuild) {
  const int steps = round_up(shapes.keys.width, LANES) / LANES, first = LANES * group;
  const int warps = MMA_WARPS / rebuild.groups;  // that share the tokens: by heads or, of queries, by blocks
  const int each = shapes.queries / rebuild.heads, tiles = (each + 7) / 8;
  const TokenScales tokens = {room.keys().scale + first, room.keys().zero + first};
  const u32* words = room.words() + 2 * group * steps * KEY_PLANES * 128;
  for (int block = rebuild.whole ? head : 0; block < rebuild.blocks; block += rebuild.whole ? warps : 1)
    for (int of = rebuild.whole ? 0 : head; of < rebuild.heads; of += warps) {
      const int place = of * rebuild.blocks + block;
      float* scores = room.scores() + of * each * room.pitch + first;
      Keys keys;
      keys.multiply<KEY_PLANES, PLANES_OF_BYTES>(words, matrix + (i64)place * steps * (2 * PLANES_OF_BYTES * LANES),
                                                 columns + place * LANES, tokens, steps);
      if (rebuild.whole) {
        keys.store(scores, room.pitch, block, shapes.queries);
        continue;
      }
      if (rebuild.has_bias) keys.add(key_bias + of * rebuild.d, block, rebuild);
      if (rebuild.has_norm) {
        keys.add_squares(room.squares() + of * room.tokens + first, block == 0);
        keys.scale(norm, block, rebuild);
      }
      if (block < rebuild.turned) keys.turn(cos, sin, room.table_rows() + first, block, rebuild);
      keys.score(scores, room.pitch, block == 0, q + ((i64)of * tiles * rebuild.blocks + block) * (2 * LANES),
                 (i64)rebuild.blocks * (2 * LANES), each);
    }
}

// What a query needs to finish its scores.
struct Mask {
  i64 position, skipped, seen;  // of the tile's first token; how many first tokens are left out, how many are seen
  const float* bias;
};

// The softmax of a column goes on by the scores of `count` tokens (a multiple of 32), which become weights in bytes. By
// one warp. `there` is how many of these tokens there are.
template <int PLANES_OF_BYTES>
__device__ __noinline__ void weigh_column(Room room, int column, int count, int there, Mask mask, const Shapes& shapes,
                                          const Rebuild& rebuild) {
  const int lane = threadIdx.x % LANES, steps = rebuild.groups;
  float* scores = room.scores() + column * room.pitch;
  const float* squares = room.squares() + column / (shapes.queries / rebuild.heads) * room.tokens;
  float largest = NEGATIVE_INFINITY;
  for (int t = lane; t < count; t += LANES) {
    float product = scores[t];
    if (rebuild.has_norm) product /= sqrtf(squares[t] / (float)rebuild.d + rebuild.eps);
    const float score = t < there ? finish_latent_score(product, mask.position + t, mask.skipped, mask.seen, mask.bias,
                                                        shapes.cap)
                                  : NEGATIVE_INFINITY;
    scores[t] = score;
    largest = fmaxf(largest, score);
  }
  const float before = room.largest(column), now = fmaxf(before, warp_max(largest)), shift = softmax_shift(now);
  float total = 0.f, zero = 0.f, peak = 0.f;
  for (int t = lane; t < count; t += LANES) {
    const float weight = exp2f(scores[t] - shift), scale = room.values().scale[t];
    const float scaled = weight == 0.f ? 0.f : weight * scale;
    scores[t] = scaled;
    total += weight;
    // What has a scale follows below, with weights as they are rounded: errors then come with numbers, which vary
    // around 0, and not with their codes, which do not.
    if (weight != 0.f && !(scale > 0.f)) zero = fmaf(weight, room.values().zero[t], zero);
    peak = fmaxf(peak, fabsf(scaled));
  }
  total = warp_sum(total);
  peak = warp_max(peak);
  __syncwarp();
  const float share = peak > NO_WEIGHT ? LARGEST_CODE<PLANES_OF_BYTES> / peak : 0.f;
  const float step = peak > NO_WEIGHT ? peak / LARGEST_CODE<PLANES_OF_BYTES> : 0.f;
  for (int quad = lane; quad < count / QUAD; quad += LANES) {
    const float4 x = *reinterpret_cast<const float4*>(scores + QUAD * quad);
    const int codes[QUAD] = {__float2int_rn(x.x * share), __float2int_rn(x.y * share), __float2int_rn(x.z * share),
                             __float2int_rn(x.w * share)};
    u32 planes[PLANES_OF_BYTES];
    bytes_of<PLANES_OF_BYTES>(planes, codes);
#pragma unroll
    for (int plane = 0; plane < PLANES_OF_BYTES; ++plane)
      room.weights()[((plane * room.tiles + column / 8) * steps + quad / 8) * 64 + (column % 8 * 4 + quad % 4) * 2 +
                     quad % 8 / 4] = planes[plane];
#pragma unroll
    for (int r = 0; r < QUAD; ++r) {
      const float scale = room.values().scale[QUAD * quad + r];
      if (scale > 0.f) zero = fmaf((float)codes[r] * step / scale, room.values().zero[QUAD * quad + r], zero);
    }
  }
  zero = warp_sum(zero);
  if (lane == 0) {
    const float decay = exp2f(before - shift);
    room.decay(column) = decay;
    room.total(column) = fmaf(room.total(column), decay, total);
    room.largest(column) = now;
    room.step(column) = step;
    room.zero(column) = total <= LARGEST_FLOAT ? zero : NOT_A_NUMBER;  // codes have no NaN
  }
}

// Adds a tile's value latents, `count` tokens (a multiple of 32), to the mixes of all columns, or begins them.
template <int VALUE_PLANES, int PLANES_OF_BYTES>
__device__ __forceinline__ void mix_tokens(const Room& room, float* mix, bool begin, int count, const Shapes& shapes,
                                           const Rebuild& rebuild) {
  constexpr int SETS = VALUE_PLANES + PLANES_OF_BYTES - 1;
  const int lane = threadIdx.x % LANES, g = lane / QUAD, t = lane % QUAD, width = shapes.values.width;
  const int parts = (width + 15) / 16, steps = rebuild.groups;
  const uint4* v = reinterpret_cast<const uint4*>(room.words()) + lane;
  const uint2* w = reinterpret_cast<const uint2*>(room.weights()) + lane;
  for (int item = threadIdx.x / LANES; item < parts * room.tiles; item += MMA_WARPS) {
    const int part = item % parts, tile = item / parts;
    int sums[SETS][4] = {};
    for (int step = 0; step < count / LANES; ++step) {
      uint4 a[VALUE_PLANES];
      uint2 b[PLANES_OF_BYTES];
#pragma unroll
      for (int plane = 0; plane < VALUE_PLANES; ++plane)
        a[plane] = v[((part * steps + step) * VALUE_PLANES + plane) * LANES];
#pragma unroll
      for (int plane = 0; plane < PLANES_OF_BYTES; ++plane)
        b[plane] = w[((plane * room.tiles + tile) * steps + step) * LANES];
#pragma unroll
      for (int i = 0; i < VALUE_PLANES; ++i)
#pragma unroll
        for (int j = 0; j < PLANES_OF_BYTES; ++j) mma_s8(sums[i + j], &a[i].x, &b[j].x);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int channel = 16 * part + g + j / 2 * 8, column = 8 * tile + 2 * t + j % 2;
      if (channel < width && column < room.columns) {
        float* at = mix + (i64)column * (width + 2) + channel;
        const float added = fmaf(joined<SETS>(&sums[0][j], 4), room.step(column), room.zero(column));
        *at = begin ? added : fmaf(*at, room.decay(column), added);
      }
    }
  }
}

// Grid (splits, 1, rows). `q` (b, fragments) as split_queries makes them and `matrix` with `columns` as pack_matrix
// does, one for all rows or, where latents are scored as they are, one for each: of its queries. `skip` (b) are the
// counts of true first tokens. Arrays that are not there are one number each. The last number is palu_simt.cu's.
template <int KEY_PLANES, int VALUE_PLANES, int PLANES_OF_BYTES>
__global__ void __launch_bounds__(MMA_THREADS, KEY_PLANES + VALUE_PLANES == 2 ? 2 : 1)
    attend_latents_mma(const uint4* __restrict__ q, const u8* __restrict__ keys, const u8* __restrict__ values,
                       const u8* __restrict__ window_keys, const u8* __restrict__ window_values,
                       const i64* __restrict__ counts, const i64* __restrict__ skip, const i64* __restrict__ limits,
                       const float* __restrict__ bias, const uint4* __restrict__ matrix,
                       const float2* __restrict__ columns, const float* __restrict__ key_bias,
                       const float* __restrict__ norm, const float* __restrict__ cos, const float* __restrict__ sin,
                       const i64* __restrict__ positions, float* partial, int,
                       const __grid_constant__ Shapes shapes, const __grid_constant__ Rebuild rebuild) {
  const int warp = threadIdx.x / LANES, row = blockIdx.z;
  const int split = blockIdx.x + (rebuild.exact ? shapes.page_splits : 0);
  const Room room(PLANES_OF_BYTES, shapes, rebuild);
  const int key_steps = round_up(shapes.keys.width, LANES) / LANES;
  const RowCounts held = row_counts(counts, row, shapes);
  const LatentRun run = latent_run(keys, values, window_keys, window_values, row, blockIdx.x, held, shapes, rebuild);
  const i64 rows = (i64)rebuild.heads * rebuild.blocks * LANES;
  if (rebuild.whole) {
    matrix += row * rows * (2 * key_steps * PLANES_OF_BYTES);
    columns += row * rows;
  } else {
    q += row * (i64)rebuild.heads * ((shapes.queries / rebuild.heads + 7) / 8) * rebuild.blocks * (2 * LANES);
  }
  float* mix = partial + partial_at(row, 0, split, 0, shapes);

  for (int column = threadIdx.x; column < room.columns; column += MMA_THREADS) {
    room.largest(column) = NEGATIVE_INFINITY;
    room.total(column) = 0.f;
  }
  for (int at = threadIdx.x; at < 2 * PLANES_OF_BYTES * room.tiles * room.tokens; at += MMA_THREADS)
    room.weights()[at] = 0;
  for (int first = 0; first < run.tokens; first += room.tokens) {
    const int there = min(room.tokens, run.tokens - first), count = round_up(there, LANES);
    __syncthreads();
    load_scales<KEY_PLANES>(room.keys(), run.keys, first, count, shapes.keys);
    load_scales<VALUE_PLANES>(room.values(), run.values, first, count, shapes.values);
    if (rebuild.turned)
      for (int t = threadIdx.x; t < count; t += MMA_THREADS)
        room.table_rows()[t] = t < there ? (int)table_row(positions, row, run.position + first + t, rebuild) : 0;
    if (KEY_PLANES == 2) __syncthreads();
    if constexpr (KEY_PLANES == 1)
      load_key_codes({room.words(), run.keys, first, count, shapes.keys});
    else
      load_numbers({room.words(), run.keys, first, count, key_steps, shapes.keys, room.keys(), false});
    __syncthreads();
    const int group = warp % rebuild.groups;
    if (LANES * group < count)
      score_tokens<KEY_PLANES, PLANES_OF_BYTES>(room, group, warp / rebuild.groups, q, matrix, columns, key_bias, norm,
                                                cos, sin, shapes, rebuild);
    __syncthreads();
    if constexpr (VALUE_PLANES == 1)
      load_value_codes({room.words(), run.values, first, count, rebuild.groups, shapes.values});
    else
      load_numbers({room.words(), run.values, first, count, rebuild.groups, shapes.values, room.values(), true});
    for (int column = warp; column < room.columns; column += MMA_WARPS) {
      const Mask mask = {run.position + first, rebuild.skips ? skip[row] : 0,
                         tokens_seen(limits, held, row, column, shapes), bias_of(bias, row, 0, column, shapes)};
      weigh_column<PLANES_OF_BYTES>(room, column, count, there, mask, shapes, rebuild);
    }
    __syncthreads();
    mix_tokens<VALUE_PLANES, PLANES_OF_BYTES>(room, mix, first == 0, count, shapes, rebuild);
  }
  __syncthreads();
  for (int column = threadIdx.x; column < room.columns; column += MMA_THREADS) {
    float* at = mix + (i64)column * (shapes.values.width + 2) + shapes.values.width;
    at[0] = room.largest(column);
    at[1] = room.total(column);
  }
}
