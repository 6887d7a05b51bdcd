// Products of queries with 32 tokens on tensor cores, keys being sketches with outlier channels, which differ from page
// to page, sketched apart.
//
// S q of a page is that of the whole query less what the outlier channels add to it, so that no page needs an S q of its
// own: with s the signs, n norms and f = c / m of the two sketches,
//
//   product = f n <s, S q> + sum over outlier channels o of q_o w_o,   w_o = f' n' <s', S'_o> - f n <s, S_o>
//
// where the columns S_o of S are the same for all queries: w (token, o) takes one operand of columns, rounded to float16.
#pragma once
#include "mma_sketch_keys.cuh"

// Sketches of at most 64 * CHUNKS rows, and of 64 * OUTLIER_CHUNKS for at most eight outlier channels.
template <int CHUNKS, int OUTLIER_CHUNKS>
struct OutlierSketchKeys {
  using Inner = SketchKeys<CHUNKS>;
  using Outer = SketchKeys<OUTLIER_CHUNKS>;
  static constexpr int CHANNEL_BYTES = GRANULE, PAGE_BYTES = 0;
  static constexpr int TILE_BYTES = Inner::TILE_BYTES + Outer::TILE_BYTES + CHANNEL_BYTES;
  static constexpr int EXCHANGES = 2;  // the second takes w
  template <Rest REST>
  static constexpr int QUERY_BYTES = Inner::template QUERY_BYTES<REST>;

  static __device__ __forceinline__ bool fills_room(const SideSpec& keys) {
    return Inner::fills_room(keys) && round_up(keys.outlier_m, Outer::UNIT_ROWS) == Outer::CHUNK_ROWS * OUTLIER_CHUNKS;
  }

  template <class Team>
  static __device__ __forceinline__ void copy_tile(u8* to, const u8* side, int tile, const SideSpec& keys) {
    Inner::template copy_tile<Team>(to, side, tile, keys);
    Outer::template copy_sketch<Team>(to + Inner::TILE_BYTES, side + keys.outlier_codes, side + keys.outlier_norms,
                                      round_up(keys.outlier_m, Outer::UNIT_ROWS));
    if (Team::index() == 0) copy_async_16(to + Inner::TILE_BYTES + Outer::TILE_BYTES, side + keys.channels);
  }

  template <class Team>
  static __device__ __forceinline__ void copy_page(u8*, const u8*, const SideSpec&) {}
  template <class Team>
  static __device__ __forceinline__ float normalize_page(u8*) { return 1.f; }

  template <Rest REST>
  static __device__ __forceinline__ void load_queries(u8* to, QueryRow* row_of, const Queries& from, int warps,
                                                      const Shapes& shapes) {
    Inner::template load_queries<REST>(to, row_of, from, warps, shapes);
  }

  template <Rest REST>
  static __device__ __forceinline__ void multiply(Exchange* exchange, const u8* tile, const u8* page,
                                                  const u8* queries, const Scoring& with) {
    Inner::template multiply<REST>(exchange, tile, page, queries, with);
    const Shapes& shapes = with.shapes;
    const u8* outer = tile + Inner::TILE_BYTES;
    const int channel = outer[Outer::TILE_BYTES + min(with.g, shapes.keys.outliers - 1)];
    float weights[2][4];
    multiply_columns<CHUNKS>(weights, tile, with.table, channel, shapes.sketch_width, -shapes.factor, with);
    exchange[1].put(weights, 0.f, 0.f, with.lane);
    multiply_columns<OUTLIER_CHUNKS>(weights, outer, with.outlier_table, channel, shapes.outlier_width,
                                     shapes.outlier_factor, with);
    exchange[1].add(weights, with.lane);
  }

  template <Rest REST>
  static __device__ __forceinline__ void finish(float* products, const Exchange* exchange, const u8* tile,
                                                const QueryRow& query, float growth, const Scoring& with) {
    Inner::template finish<REST>(products, exchange, tile, query, growth, with);
    const u8* channels = tile + Inner::TILE_BYTES + Outer::TILE_BYTES;
    const SideSpec& keys = with.shapes.keys;
#pragma unroll
    for (int outlier = 0; outlier < COLUMNS; ++outlier) {
      if (outlier == keys.outliers) break;
      const float q = with.queries.number(with.queries.q, with.own, channels[outlier], keys.width);
      float weights[8];
      exchange[1].get(weights, outlier, with.t);
#pragma unroll
      for (int i = 0; i < 8; ++i) products[i] = fmaf(q, weights[i], products[i]);
    }
  }

 private:
  // weights = factor * norm * <signs, column `channel` of S> of each of the 32 tokens; the lane's channel is that of
  // column g. S^T is `table` (d, width).
  template <int OF_CHUNKS>
  static __device__ __forceinline__ void multiply_columns(float (*weights)[4], const u8* sketch,
                                                          const float* table, int channel, int width, float factor,
                                                          const Scoring& with) {
    using Sketch = SketchKeys<OF_CHUNKS>;
    const int g = with.g, t = with.t;
    const float* own = table + (i64)channel * width + 16 * t;
    // Sums over rows 0..7 of units with set bits, over rows 8..15, where bits are 16 times as large, and over all rows.
    float early[2][4] = {}, late[2][4] = {}, all[4] = {};
    const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll 1
    for (int chunk = 0; chunk < OF_CHUNKS; ++chunk) {
      const uint2 words = Sketch::load(sketch, chunk, g, t);
      const u32 pairs[2][2] = {{__byte_perm(words.x, 0, 0x4140), __byte_perm(words.x, 0, 0x4342)},
                               {__byte_perm(words.y, 0, 0x4140), __byte_perm(words.y, 0, 0x4342)}};
      const bool there = chunk + 1 < OF_CHUNKS || Sketch::CHUNK_ROWS * chunk + 16 * t < width;
#pragma unroll
      for (int four = 0; four < 4; ++four) {  // rows 4 * four .. 4 * four + 3 of the lane's unit
        const float4 column = there ? reinterpret_cast<const float4*>(own + Sketch::CHUNK_ROWS * chunk)[four]
                                    : make_float4(0.f, 0.f, 0.f, 0.f);
        const u32 b[2] = {as_word(__floats2half2_rn(column.x, column.y)), as_word(__floats2half2_rn(column.z, column.w))};
        const u32* pair = pairs[four % 2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const u32 even = 0x00010001u << (2 * j + four / 2 * 4), odd = even << 1;
          const u32 a[4] = {pair[0] & even, pair[0] & odd, pair[1] & even, pair[1] & odd};
          mma_f16(four < 2 ? early[j] : late[j], a, b);
        }
        mma_f16(all, ones, b);
      }
    }
    const u16* norms = reinterpret_cast<const u16*>(sketch + OF_CHUNKS * Sketch::CHUNK_BYTES);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int plane = 2 * j + r / 2;
        const float set = fmaf(late[j][r], 1.f / 16.f, early[j][r]) * power_of_2(CODE_EXPONENT + 1 - plane);
        weights[j][r] = factor * __half2float(__ushort_as_half(norms[8 * plane + g])) * (set - all[r % 2]);
      }
  }
};
