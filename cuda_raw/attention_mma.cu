// Decode attention over pages on tensor cores: a warp takes 32 tokens at a time, with 4 or 8 query rows as the columns
// of an operand. Pages come to shared memory while those before are worked on. What it costs: attention_mma.py.
#include "mma_int_keys.cuh"
#include "mma_int_values.cuh"
#include "mma_latent_keys.cuh"
#include "mma_outlier_keys.cuh"

// A block's threads at most, so that they have the registers they need: 128 where a warp's mix is of few numbers, 168
// where keys have outlier channels besides, else 255.
constexpr int SMALL_MIX = 48;
template <class Keys, class Values>
constexpr int MOST_THREADS =
    sizeof(typename Values::Mix) > 4 * SMALL_MIX ? 256 : Keys::EXCHANGES > 1 ? 384 : 512;

// A query row's softmax so far. Weights are relative to `largest` and times 2^headroom, which leaves them room for the
// scales of values: see mma_coefficients.cuh.
struct Softmax {
  float largest, total;
  int headroom;
};

// What a warp ends with, in shared memory.
template <int ROWS, int PITCH>
struct Part {
  float mix[ROWS][PITCH], largest[ROWS], total[ROWS];
};

// Where a warp is on its way through the pages of a split.
struct Place {
  int page, tile;

  template <int TILES>
  __device__ __forceinline__ Place next(int step) const {
    return tile + 1 < TILES ? Place{page, tile + 1} : Place{page + step, 0};
  }
};

// Warps of a block take turns with pages, or (BLOCK) have all the same pages and other query rows.
template <class Keys, class Values, int TILES, Rest REST, bool BLOCK>
__global__ void __launch_bounds__(MOST_THREADS<Keys, Values>, 1)
    attend_pages_mma(const float* __restrict__ q, const float* __restrict__ sketched, const float* __restrict__ table,
                     const float* __restrict__ outlier_table, const u8* __restrict__ pages,
                     const i64* __restrict__ counts, const i64* __restrict__ limits, const float* __restrict__ bias,
                     float* __restrict__ partial, const Shapes shapes) {
  using Members = Team<BLOCK>;
  extern __shared__ __align__(128) u8 room[];
  constexpr int ROWS = Coefficients<REST>::ROWS, QUERY_BYTES = Keys::template QUERY_BYTES<REST>;
  // Two stages, two places for what keys have once a page, and what they keep for all pages.
  constexpr int STAGE_BYTES = Keys::TILE_BYTES + Values::TILE_BYTES;
  constexpr int BUFFER_BYTES = 2 * (STAGE_BYTES + Keys::PAGE_BYTES) + Keys::TEAM_BYTES;
  constexpr int p = CHUNK * TILES;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / QUAD, t = lane % QUAD;

  // Query row `own` of the block's is this lane's, which are ROWS of each warp's or of all together.
  const int operands = BLOCK ? warps : 1, operand = BLOCK ? warp : 0, own = operand * ROWS + g % ROWS;
  const int query_tiles = (shapes.queries + operands * ROWS - 1) / (operands * ROWS);
  const int split = blockIdx.x / query_tiles, first_query = blockIdx.x % query_tiles * operands * ROWS;
  const int row = blockIdx.z, head = blockIdx.y, rows = min(operands * ROWS, shapes.queries - first_query);
  const RowCounts held = row_counts(counts, row, shapes);
  const Cut cut = page_cut(held, split, shapes);
  if (cut.first >= held.pages) return;

  u8* queries = room;
  QueryRow* query_rows = reinterpret_cast<QueryRow*>(queries + operands * QUERY_BYTES);
  Exchange* exchange = reinterpret_cast<Exchange*>(query_rows + operands * ROWS);
  u8* shared = reinterpret_cast<u8*>(exchange + warps * Keys::EXCHANGES);
  u8* buffers = shared + (BLOCK ? 0 : warp * BUFFER_BYTES);
  u8 *page_buffers = buffers + 2 * STAGE_BYTES, *kept = page_buffers + 2 * Keys::PAGE_BYTES;
  exchange += warp * Keys::EXCHANGES;

  const int tokens = cut.count * p;
  const i64 position = held.sinks + (i64)cut.first * p;
  // How many of the split's tokens a query row of the block sees.
  const auto seen_here = [&](int query) {
    const i64 seen = tokens_seen(limits, held, row, first_query + query, shapes) - position;
    return (int)max(min(seen, (i64)tokens), (i64)0);
  };
  int all_see = tokens, any_sees = 0;
  for (int query = lane; query < rows; query += 32) {
    all_see = min(all_see, seen_here(query));
    any_sees = max(any_sees, seen_here(query));
  }
  all_see = __reduce_min_sync(ALL_LANES, all_see);
  any_sees = __reduce_max_sync(ALL_LANES, any_sees);
  const int visited = (any_sees + p - 1) / p, step = BLOCK ? 1 : warps;
  const bool plain = shapes.cap == 0.f && shapes.bias_heads == 0;

  if (!Keys::fills_room(shapes.keys)) {
    for (int at = threadIdx.x; at < (BLOCK ? 1 : warps) * BUFFER_BYTES / GRANULE; at += blockDim.x)
      reinterpret_cast<uint4*>(shared)[at] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
  const u8* records =
      kept_pointer(pages + (((i64)row * shapes.h + head) * shapes.capacity + cut.first) * shapes.record_bytes);
  const u32 reciprocal = Values::group_reciprocal(shapes.values);
  const auto fetch = [&](const Place& at, int stage, int slot) {
    const u8* record = records + (u64)at.page * (u32)shapes.record_bytes;
    u8* to = buffers + stage * STAGE_BYTES;
    Keys::template copy_tile<Members>(to, record, at.tile, shapes.keys);
    if (at.tile == 0) Keys::template copy_page<Members>(page_buffers + slot * Keys::PAGE_BYTES, record, shapes.keys);
    Values::template copy_tile<Members>(to + Keys::TILE_BYTES, record + shapes.keys.nbytes, at.tile, reciprocal,
                                        shapes.values);
    copy_commit();
  };
  Place at = {BLOCK ? 0 : warp, 0};
  if (at.page < visited) fetch(at, 0, 0);
  const i64 query_row = ((i64)row * shapes.h + head) * shapes.queries + first_query;
  const Queries from = {q + query_row * shapes.keys.width, sketched + query_row * shapes.sketch_width, rows};
  Keys::template load_queries<REST>(queries, query_rows, from, operands, shapes);
  __syncthreads();
  queries += operand * QUERY_BYTES;

  const QueryRow own_row = query_rows[own];
  const float* own_q = from.q + (i64)min(own, rows - 1) * shapes.keys.width;
  const Scoring scoring = {own_q, table, outlier_table, shapes, lane, g, t};
  const int seen = own < rows ? seen_here(own) : tokens;
  Softmax softmax = {NEGATIVE_INFINITY, 0.f, TOP_EXPONENT};
  typename Values::Mix mix = {};
  float growth = 1.f;
  for (int stage = 0, slot = 0; at.page < visited; stage ^= 1) {
    const Place next = at.next<TILES>(step);
    const int next_slot = next.tile == 0 ? slot ^ 1 : slot;
    copy_wait<0>();
    Members::sync();  // what all members copied is there, and none still reads the other buffers
    if (next.page < visited) fetch(next, stage ^ 1, next_slot);

    const u8 *tile = buffers + stage * STAGE_BYTES, *values = tile + Keys::TILE_BYTES;
    u8* page = page_buffers + slot * Keys::PAGE_BYTES;
    if (at.tile == 0) growth = Keys::template prepare_page<Members>(page, tile, kept, scoring);
    Keys::template multiply<REST>(exchange, tile, page, kept, queries, scoring);
    const int headroom = Values::headroom(softmax.headroom, values, lane);
    __syncwarp();

    float scores[8];
    Keys::template finish<REST>(scores, exchange, tile, kept, own_row, growth, scoring);
    const int first_token = at.page * p + CHUNK * at.tile;
    if (!plain || first_token + CHUNK > all_see) {
      const float* added = own < rows ? bias_of(bias, row, head, first_query + own, shapes) : nullptr;
      if (added != nullptr) added += position;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        scores[i] = finish_score(scores[i], first_token + 8 * t + i, seen, added, shapes.cap);
    }
    float top = scores[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) top = fmaxf(top, scores[i]);
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
    const float before = softmax.largest, now = fmaxf(before, top), shift = softmax_shift(now) - headroom;
    if (__any_sync(ALL_LANES, now > before || headroom < softmax.headroom)) {
      const float decay = exp2_fast(before - softmax.headroom - shift);
      softmax.total *= decay;
      Values::rescale(mix, __shfl_sync(ALL_LANES, decay, 8 * t), __shfl_sync(ALL_LANES, decay, 8 * t + 4));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      scores[i] = exp2_fast(scores[i] - shift);
      softmax.total += scores[i];
    }
    softmax.largest = now;
    softmax.headroom = headroom;
    Coefficients<REST> weights;
    weights.set(scores, g);
    Values::template add<REST>(mix, weights, values, lane);
    at = next;
    slot = next_slot;
  }

  // Parts of the same query rows are joined: those of all warps, or, where each has rows of its own, each alone.
  using OwnPart = Part<ROWS, Values::MIX_FLOATS + 4>;
  __syncthreads();
  OwnPart* parts = reinterpret_cast<OwnPart*>(shared);
  Values::template store<REST>(parts[warp].mix[0], Values::MIX_FLOATS + 4, mix, lane);
  softmax.total += __shfl_xor_sync(ALL_LANES, softmax.total, 1);
  softmax.total += __shfl_xor_sync(ALL_LANES, softmax.total, 2);
  if (t == 0 && g < ROWS) {
    parts[warp].largest[g] = softmax.largest - softmax.headroom;
    parts[warp].total[g] = softmax.total;
  }
  __syncthreads();
  parts += operand;
  const int joined = BLOCK ? 1 : warps, index = BLOCK ? lane : threadIdx.x, size = BLOCK ? 32 : blockDim.x;
  const int dv = shapes.values.width;
  for (int r = 0; r < ROWS && operand * ROWS + r < rows; ++r) {
    float largest = NEGATIVE_INFINITY;
    for (int w = 0; w < joined; ++w) largest = fmaxf(largest, parts[w].largest[r]);
    const float shift = softmax_shift(largest);
    float* out = partial + partial_at(row, head, split, first_query + operand * ROWS + r, shapes);
    for (int channel = index; channel < dv + 1; channel += size) {
      float sum = 0.f;
      for (int w = 0; w < joined; ++w) {
        const float number = channel < dv ? Values::mixed(parts[w].mix[r], channel) : parts[w].total[r];
        sum = fmaf(exp2_fast(parts[w].largest[r] - shift), number, sum);
      }
      out[channel < dv ? channel : dv + 1] = sum;
    }
    if (index == 0) out[dv] = largest;
  }
}
