// Attention of a tile of queries over a run of tokens by one block, its scores and values in float32: what pages and
// exact tokens have in common.
//
// A tile of tokens is one block of 32 for each warp. A warp scores its tokens; then each query's softmax is taken by a
// warp; then each warp adds 32 channels of the values of all the tile's tokens, or of a part of these where there are
// more warps than channels to go round. Scores are kept twice, so that a warp may go on to score the next tile.
#include "keys_simt.cuh"
#include "values_simt.cuh"

// A run of tokens of one row and head: strides are the bytes from a page of 32 << page_shift tokens to the next.
struct Run {
  const u8 *keys, *values;
  i64 key_stride, value_stride;
  int page_shift;
  int tokens;
  i64 position;  // of the first token in its row
};

// The queries of a block: `rows` of them from row `first` of Q on, of a tile of fewer or as many.
struct QueryTile {
  int row, head, first, rows;
};

template <int QUERIES>
__device__ __forceinline__ QueryTile query_tile(const Shapes& shapes) {
  const int tiles = (shapes.queries + QUERIES - 1) / QUERIES, first = blockIdx.x % tiles * QUERIES;
  return {(int)blockIdx.z, (int)blockIdx.y, first, min(QUERIES, shapes.queries - first)};
}

template <int QUERIES>
__device__ __forceinline__ int split_of_block(const Shapes& shapes) {
  return blockIdx.x / ((shapes.queries + QUERIES - 1) / QUERIES);
}

// What a block keeps of each of its queries.
template <int QUERIES>
struct Softmax {
  float largest[QUERIES], total[QUERIES], decay[QUERIES];
  i64 seen[QUERIES];
};

// The softmax of a query goes on by `count` scores, which become weights. By one warp.
template <int QUERIES>
__device__ __forceinline__ void weigh_scores(Softmax<QUERIES>& softmax, int query, float* scores, int count) {
  const int lane = threadIdx.x % LANES;
  float largest = NEGATIVE_INFINITY, total = 0.f;
  for (int at = lane; at < count; at += LANES) largest = fmaxf(largest, scores[at]);
  const float before = softmax.largest[query], now = fmaxf(before, warp_max(largest)), shift = softmax_shift(now);
  for (int at = lane; at < count; at += LANES) {
    const float weight = exp2f(scores[at] - shift);
    scores[at] = weight;
    total += weight;
  }
  total = warp_sum(total);
  __syncwarp();
  if (lane == 0) {
    const float decay = exp2f(before - shift);
    softmax.decay[query] = decay;
    softmax.total[query] = fmaf(softmax.total[query], decay, total);
    softmax.largest[query] = now;
  }
}

// The rows of the tile that scores are made from, in shared memory with zeros beyond them.
template <int QUERIES>
__device__ __forceinline__ void load_weights(float* weights, int pitch, const float* from, int width, int rows) {
  for (int at = threadIdx.x; at < QUERIES * pitch; at += blockDim.x) {
    const int query = at / pitch, channel = at % pitch;
    weights[at] = query < rows && channel < width ? from[(i64)query * width + channel] : 0.f;
  }
}

template <class Key, class Value, int QUERIES, int WARPS>
__device__ __forceinline__ void attend_run(const Run& run, const QueryTile& tile, int split, const float* q,
                                           const float* sketched, const float* table, const float* outlier_table,
                                           const i64* counts, const i64* limits, const float* bias, float* partial,
                                           const Shapes& shapes) {
  extern __shared__ __align__(16) float room[];
  __shared__ Softmax<QUERIES> softmax;
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int i = lane / QUAD, t = lane % QUAD;
  const int pitch = Key::pitch(shapes.keys), room_pitch = max(shapes.sketch_width, shapes.outlier_width);
  constexpr int score_pitch = LANES * WARPS;
  float *weights = room, *scores = weights + QUERIES * pitch, *own = scores + 2 * QUERIES * score_pitch;

  const i64 query_row = ((i64)tile.row * shapes.h + tile.head) * shapes.queries + tile.first;
  q += query_row * shapes.keys.width;
  if (Key::SKETCHED)
    load_weights<QUERIES>(weights, pitch, sketched + query_row * shapes.sketch_width, shapes.sketch_width, tile.rows);
  else
    load_weights<QUERIES>(weights, pitch, q, shapes.keys.width, tile.rows);
  for (int query = threadIdx.x; query < QUERIES; query += blockDim.x) {
    softmax.largest[query] = NEGATIVE_INFINITY;
    softmax.total[query] = 0.f;
    softmax.seen[query] = query < tile.rows ? tokens_seen(limits, row_counts(counts, tile.row, shapes), tile.row,
                                                          tile.first + query, shapes)
                                            : 0;
  }
  __syncthreads();

  // Warp `warp` mixes channels of block `channels` of the tokens of every `parts`-th block, from block `part` on.
  const int channel_blocks = round_up(shapes.values.width, LANES) / LANES, parts = WARPS / channel_blocks;
  const int channels = warp % channel_blocks, part = warp / channel_blocks;
  const Value value(shapes.values, channels);
  float mix[QUERIES][PLANES] = {};
  const int blocks = round_up(run.tokens, LANES) / LANES;
  for (int first = 0, turn = 0; first < blocks; first += WARPS, turn ^= 1) {
    float* now = scores + turn * QUERIES * score_pitch;
    const int here = min(WARPS, blocks - first), block = first + warp;
    if (warp < here) {
      float products[QUERIES];
      const KeyBlock from = {run.keys + (block >> run.page_shift) * run.key_stride,
                             block & ((1 << run.page_shift) - 1),
                             min(LANES, run.tokens - LANES * block),
                             weights,
                             pitch,
                             q,
                             tile.rows,
                             table,
                             outlier_table,
                             own + warp * QUERIES * room_pitch,
                             room_pitch};
      const int token = Key::template score<QUERIES>(products, from, shapes);
      float* mine = now + LANES * warp + token;
#pragma unroll
      for (int query = 0; query < QUERIES; ++query) mine[query * score_pitch] = products[query];
      const i64 position = run.position + LANES * block + token;
      // Not unrolled: what it takes for each query would cost registers.
#pragma unroll 1
      for (int query = 0; query < QUERIES; ++query, mine += score_pitch) {
        const float* added = query < tile.rows
                                 ? bias_of(bias, tile.row, tile.head, tile.first + query, shapes)
                                 : nullptr;
        *mine = finish_score(*mine, position, token < from.tokens ? softmax.seen[query] : 0, added, shapes.cap);
      }
    }
    __syncthreads();
    for (int query = warp; query < QUERIES; query += WARPS)
      weigh_scores(softmax, query, now + query * score_pitch, LANES * here);
    __syncthreads();
    if (part < parts) {
#pragma unroll
      for (int query = 0; query < QUERIES; ++query)
#pragma unroll
        for (int p = 0; p < PLANES; ++p) mix[query][p] *= softmax.decay[query];
#pragma unroll 1
      for (int other = part; other < here; other += parts) {
        const int token_block = first + other;
        const int page = token_block >> run.page_shift, in_page = token_block - (page << run.page_shift);
        const u8* side = run.values + page * run.value_stride;
        const int left = run.tokens - LANES * (token_block - in_page);
#pragma unroll 1
        for (int half = 0; half < LANES / QUAD; half += QUAD) {
          float v[PLANES][QUAD];
          value.read(v, side, shapes.values, left, LANES / QUAD * in_page + half + t);
          add_products<QUERIES>(mix, v, now + LANES * other, score_pitch, half + t);
        }
      }
    }
  }

  __syncthreads();
  if (part < parts) {
#pragma unroll
    for (int query = 0; query < QUERIES; ++query)
      scores[(part * QUERIES + query) * LANES * channel_blocks + LANES * channels + 8 * t + i] =
          sum_quads(mix[query], t);
  }
  __syncthreads();
  const int dv = shapes.values.width;
  for (int query = 0; query < tile.rows; ++query) {
    float* out = partial + partial_at(tile.row, tile.head, split, tile.first + query, shapes);
    for (int channel = threadIdx.x; channel < dv; channel += blockDim.x) {
      float sum = 0.f;
      for (int of = 0; of < parts; ++of) sum += scores[(of * QUERIES + query) * LANES * channel_blocks + channel];
      out[channel] = sum;
    }
    if (threadIdx.x == 0) {
      out[dv] = softmax.largest[query];
      out[dv + 1] = softmax.total[query];
    }
  }
}
