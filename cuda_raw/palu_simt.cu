// Attention over latents without tensor cores, for every shape and architecture, in float32. A block takes a head's
// queries over a run of tokens, 32 at a time: keys are rebuilt 32 channels at a time and never all there.
#include "palu.cuh"

constexpr int WARPS = 4, THREADS = LANES * WARPS, MOST_QUERIES = 32, PITCH = LANES + 1;

// 32 tokens from token `first` of a run on, `channels` (a multiple of 32) of them from `from` on: channel c of token t
// goes to room[c * across + t * along].
struct LoadLatents {
  float* room;
  int across, along;
  SideRun run;
  int first, from, channels;
  const SideSpec& spec;

  template <class Reader>
  __device__ __forceinline__ void with() const {
    const int warp = threadIdx.x / LANES, i = threadIdx.x % LANES / QUAD, t = threadIdx.x % QUAD;
    for (int item = warp; item < channels / LANES * 2; item += WARPS) {
      float v[PLANES][QUAD];
      const int block = item / 2, token = QUAD * (QUAD * (item % 2) + t);
      run.read<Reader>(v, first + token, from / LANES + block, spec);
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
#pragma unroll
        for (int r = 0; r < QUAD; ++r) room[(LANES * block + 8 * p + i) * across + (token + r) * along] = v[p][r];
    }
  }
};

__device__ __noinline__ void load_latents(float* room, int across, int along, const SideRun& run, int first, int from,
                                          int channels, const SideSpec& spec) {
  with_reader(spec, run.exact, LoadLatents{room, across, along, run, first, from, channels, spec});
}

// Four numbers of a row of `width` from number k on, 0 beyond it.
__device__ __forceinline__ float4 load_four(const float* row, int k, int width) {
  if (width % 4 == 0) return *reinterpret_cast<const float4*>(row + k);
  return {row[k], k + 1 < width ? row[k + 1] : 0.f, k + 2 < width ? row[k + 2] : 0.f, k + 3 < width ? row[k + 3] : 0.f};
}

// What a block knows of its queries: `rows` of them from row `column` of Q on.
struct Queries {
  const float* q;  // the first one
  int row, column, rows;
};

// The eight channels of a block that a warp rebuilds, of one token a lane: tiles by columns 2 * warp and 2 * warp + 1.
struct KeyPart {
  float k[4][2];
  int channel[4][2];

  // Keys of latents in shared memory or, where they do not all fit, of what is loaded a part at a time.
  __device__ __forceinline__ void multiply(const float* up_k, float* room, int room_channels, const SideRun& run,
                                           int first, int head, int block, const Shapes& shapes,
                                           const Rebuild& rebuild) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, rank = shapes.keys.width;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        channel[tile][e] = channel_of(block, tile, 2 * warp + e, rebuild);
        k[tile][e] = 0.f;
      }
    up_k += (i64)head * rebuild.d * rank;
    for (int from = 0; from < rank; from += room_channels) {
      const int channels = min(room_channels, rank - from);
      if (block == 0 || rank > room_channels) {
        __syncthreads();
        load_latents(room, PITCH, 1, run, first, from, round_up(channels, LANES), shapes.keys);
        __syncthreads();
      }
      for (int c = 0; c < channels; c += 4) {
        float z[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) z[j] = room[(c + j) * PITCH + lane];
#pragma unroll
        for (int tile = 0; tile < 4; ++tile)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float4 w = load_four(up_k + (i64)max(channel[tile][e], 0) * rank, from + c, rank);
            k[tile][e] = fmaf(w.w, z[3], fmaf(w.z, z[2], fmaf(w.y, z[1], fmaf(w.x, z[0], k[tile][e]))));
          }
      }
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (channel[tile][e] == NO_CHANNEL) k[tile][e] = 0.f;
  }

  __device__ __forceinline__ void add_bias(const float* bias) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e) k[tile][e] += channel_number(bias, channel[tile][e]);
  }

  __device__ __forceinline__ float squares() const {
    float sum = 0.f;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum = fmaf(k[tile][e], k[tile][e], sum);
    return sum;
  }

  __device__ __forceinline__ void weigh(const float* weights) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e) k[tile][e] *= channel_number(weights, channel[tile][e]);
  }

  // Turns the channels by a token's row of the tables.
  __device__ __forceinline__ void turn(const float* cos, const float* sin) {
#pragma unroll
    for (int tile = 0; tile < 4; tile += 2)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int a = channel[tile][e], b = channel[tile + 1][e];
        const float x = k[tile][e], y = k[tile + 1][e];
        k[tile][e] = x * channel_number(cos, a) - y * channel_number(sin, a);
        k[tile + 1][e] = y * channel_number(cos, b) + x * channel_number(sin, b);
      }
  }

  __device__ __forceinline__ float times(const float* q) const {
    float sum = 0.f;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum = fmaf(k[tile][e], channel_number(q, channel[tile][e]), sum);
    return sum;
  }
};

// Each warp's part of the products of queries with 32 latents as they are, in scores (warp, query, token).
__device__ __forceinline__ void score_latents(float* scores, float* room, int room_channels, const SideRun& run,
                                              int first, const Queries& queries, const Shapes& shapes) {
  constexpr int AT_ONCE = 4;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, rank = shapes.keys.width;
  for (int from = 0; from < rank; from += room_channels) {
    const int channels = min(room_channels, rank - from);
    __syncthreads();
    load_latents(room, PITCH, 1, run, first, from, round_up(channels, LANES), shapes.keys);
    __syncthreads();
    for (int query = 0; query < queries.rows; query += AT_ONCE) {
      float sums[AT_ONCE] = {};
      for (int c = warp; c < channels; c += WARPS) {
        const float z = room[c * PITCH + lane];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
          sums[j] = fmaf(queries.q[(i64)min(query + j, queries.rows - 1) * rank + from + c], z, sums[j]);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (query + j < queries.rows) {
          float* at = scores + (warp * MOST_QUERIES + query + j) * LANES + lane;
          *at = from ? *at + sums[j] : sums[j];
        }
    }
  }
}

// What a block keeps of its queries from tile to tile.
struct Softmax {
  float largest[MOST_QUERIES], total[MOST_QUERIES], decay[MOST_QUERIES];
};

// The softmax of a query goes on by 32 scores, which become weights. By one warp.
__device__ __forceinline__ float weigh_score(Softmax& softmax, int query, float score) {
  const float before = softmax.largest[query], now = fmaxf(before, warp_max(score)), shift = softmax_shift(now);
  const float weight = exp2f(score - shift), total = warp_sum(weight);
  __syncwarp();
  if (threadIdx.x % LANES == 0) {
    softmax.decay[query] = exp2f(before - shift);
    softmax.total[query] = fmaf(softmax.total[query], softmax.decay[query], total);
    softmax.largest[query] = now;
  }
  return weight;
}

// Adds 32 value latents times weights (query, token) to the mixes of queries, `pitch` numbers apart, or begins them.
__device__ __forceinline__ void mix_latents(float* mix, i64 pitch, bool begin, const float* weights,
                                            const Softmax& softmax, float* room, int room_channels,
                                            const SideRun& run, int first, int rows, const Shapes& shapes) {
  const int width = shapes.values.width;
  for (int from = 0; from < width; from += room_channels) {
    const int channels = min(room_channels, width - from), along = room_channels + 1;
    __syncthreads();
    load_latents(room, 1, along, run, first, from, round_up(channels, LANES), shapes.values);
    __syncthreads();
    for (int channel = threadIdx.x; channel < channels; channel += THREADS) {
      float v[LANES];
#pragma unroll
      for (int t = 0; t < LANES; ++t) v[t] = room[t * along + channel];
      for (int query = 0; query < rows; ++query) {
        float sum = 0.f;
#pragma unroll
        for (int t = 0; t < LANES; t += 4) {
          const float4 w = *reinterpret_cast<const float4*>(weights + query * LANES + t);
          sum = fmaf(w.w, v[t + 3], fmaf(w.z, v[t + 2], fmaf(w.y, v[t + 1], fmaf(w.x, v[t], sum))));
        }
        float* at = mix + query * pitch + from + channel;
        *at = begin ? sum : fmaf(*at, softmax.decay[query], sum);
      }
    }
  }
}

// Grid (splits * tiles of 32 queries, heads, rows). `room_channels` (a multiple of 32) of 32 tokens have room in shared
// memory. Arrays that are not there are one number each; `skip` (b) are the counts of true first tokens. The arguments
// are those of attend_latents_mma, where a matrix has scales.
template <bool REBUILD>
__global__ void __launch_bounds__(THREADS, 2)
    attend_latents_simt(const float* __restrict__ q, const u8* __restrict__ keys, const u8* __restrict__ values,
                        const u8* __restrict__ window_keys, const u8* __restrict__ window_values,
                        const i64* __restrict__ counts, const i64* __restrict__ skip, const i64* __restrict__ limits,
                        const float* __restrict__ bias, const float* __restrict__ up_k, const float* __restrict__,
                        const float* __restrict__ key_bias, const float* __restrict__ norm,
                        const float* __restrict__ cos, const float* __restrict__ sin,
                        const i64* __restrict__ positions, float* partial, int room_channels,
                        const __grid_constant__ Shapes shapes, const __grid_constant__ Rebuild rebuild) {
  extern __shared__ __align__(16) float dynamic[];
  __shared__ Softmax softmax;
  __shared__ float squares[WARPS][LANES];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, head = blockIdx.y, row = blockIdx.z;
  const int each = shapes.queries / rebuild.heads, tiles = (each + MOST_QUERIES - 1) / MOST_QUERIES;
  const int part = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int split = part + (rebuild.exact ? shapes.page_splits : 0);
  const int column = head * each + tile * MOST_QUERIES, rows = min(MOST_QUERIES, each - tile * MOST_QUERIES);
  const int width = REBUILD ? rebuild.d : shapes.keys.width;
  const Queries queries = {q + ((i64)row * shapes.queries + column) * width, row, column, rows};
  const RowCounts held = row_counts(counts, row, shapes);
  const LatentRun run = latent_run(keys, values, window_keys, window_values, row, part, held, shapes, rebuild);
  float *scores = dynamic, *room = scores + WARPS * MOST_QUERIES * LANES;
  float* out = partial + partial_at(row, 0, split, column, shapes);
  const i64 pitch = shapes.values.width + 2, skipped = rebuild.skips ? skip[row] : 0;

  for (int query = threadIdx.x; query < MOST_QUERIES; query += THREADS) {
    softmax.largest[query] = NEGATIVE_INFINITY;
    softmax.total[query] = 0.f;
  }
  for (int first = 0; first < run.tokens; first += LANES) {
    const i64 position = run.position + first + lane;
    const bool there = first + lane < run.tokens;
    if (REBUILD) {
      float sum = 0.f;
      for (int block = 0; block < rebuild.blocks; ++block) {
        KeyPart key;
        key.multiply(up_k, room, room_channels, run.keys, first, head, block, shapes, rebuild);
        if (rebuild.has_bias) key.add_bias(key_bias + head * rebuild.d);
        if (rebuild.has_norm) {
          sum += key.squares();
          key.weigh(norm);
        }
        if (block < rebuild.turned && there) {
          const i64 at = table_row(positions, row, position, rebuild) * rebuild.rotary;
          key.turn(cos + at, sin + at);
        }
        for (int query = 0; query < rows; ++query) {
          float* at = scores + (warp * MOST_QUERIES + query) * LANES + lane;
          const float product = key.times(queries.q + (i64)query * rebuild.d);
          *at = block ? *at + product : product;
        }
      }
      squares[warp][lane] = sum;
    } else {
      score_latents(scores, room, room_channels, run.keys, first, queries, shapes);
    }
    __syncthreads();
    float size = 1.f;
    if (REBUILD && rebuild.has_norm) {
      float sum = 0.f;
      for (int of = 0; of < WARPS; ++of) sum += squares[of][lane];
      size = 1.f / sqrtf(sum / (float)rebuild.d + rebuild.eps);
    }
    for (int query = warp; query < rows; query += WARPS) {
      float product = 0.f;
      for (int of = 0; of < WARPS; ++of) product += scores[(of * MOST_QUERIES + query) * LANES + lane];
      const i64 seen = there ? tokens_seen(limits, held, row, column + query, shapes) : 0;
      const float score = finish_latent_score(product * size, position, skipped, seen,
                                              bias_of(bias, row, 0, column + query, shapes), shapes.cap);
      scores[query * LANES + lane] = weigh_score(softmax, query, score);
    }
    mix_latents(out, pitch, first == 0, scores, softmax, room, room_channels, run.values, first, rows, shapes);
  }
  __syncthreads();
  for (int query = threadIdx.x; query < rows; query += THREADS) {
    out[query * pitch + pitch - 2] = softmax.largest[query];
    out[query * pitch + pitch - 1] = softmax.total[query];
  }
}
