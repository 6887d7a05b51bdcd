// Products of queries with 32 tokens on tensor cores, keys being sketches with outlier channels, which may differ from
// page to page, sketched apart.
//
// S q of a page is that of the whole query less what the outlier channels add to it, so that no page needs an S q of
// its own: with s the signs, n norms and f = c / m of the two sketches,
//
//   product = f n <s, S q> + sum over outlier channels o of q_o w_o,   w_o = f' n' <s', S'_o> - f n <s, S_o>
//
// The columns S_o, rounded to 16 bits, are the same for all queries and are kept in shared memory; a page that has
// other outlier channels than the one before it brings in the columns that are missing.
#include "mma_sketch_keys.cuh"

// Which columns are kept, after their bytes; how large a unit of each is, and its sum in units.
struct __align__(16) OutlierColumns {
  u32 channels[COLUMNS];  // and one, 0 where there is none yet
  float unit[2][COLUMNS], sum[2][COLUMNS];  // of the columns of S, and of S'
};

// Sketches of at most 64 * CHUNKS rows, and of 64 * OUTER_CHUNKS for at most eight outlier channels.
template <int CHUNKS, int OUTER_CHUNKS>
struct OutlierSketchKeys {
  using Main = SketchKeys<CHUNKS>;
  using Inner = Signs<CHUNKS>;
  using Outer = Signs<OUTER_CHUNKS>;
  static constexpr int CHANNELS_AT = Inner::BYTES + Outer::BYTES, TILE_BYTES = CHANNELS_AT + GRANULE, PAGE_BYTES = 0;
  static constexpr int INNER_BYTES = 2 * Inner::STREAM_BYTES, OUTER_BYTES = 2 * Outer::STREAM_BYTES;
  static constexpr int TEAM_BYTES = INNER_BYTES + OUTER_BYTES + sizeof(OutlierColumns);
  static constexpr int EXCHANGES = 2;  // the second takes w
  template <Rest REST>
  static constexpr int QUERY_BYTES = Main::template QUERY_BYTES<REST>;

  // What is kept starts with no column.
  static __device__ __forceinline__ bool fills_room(const SideSpec&) { return false; }

  template <class Team>
  static __device__ __forceinline__ void copy_tile(u8* to, const u8* side, int tile, const SideSpec& keys) {
    Main::template copy_tile<Team>(to, side, tile, keys);
    Outer::template copy<Team>(to + Inner::BYTES, side + keys.outlier_codes, side + keys.outlier_norms,
                               round_up(keys.outlier_m, Outer::UNIT_ROWS));
    if (Team::index() == 0) copy_async_16(to + CHANNELS_AT, side + keys.channels);
  }

  template <class Team>
  static __device__ __forceinline__ void copy_page(u8*, const u8*, const SideSpec&) {}

  // Sees to it that the columns of the page's outlier channels are there.
  template <class Team>
  static __device__ __forceinline__ float prepare_page(u8*, const u8* tile, u8* kept, const Scoring& with) {
    const int outliers = with.shapes.keys.outliers, lane = with.lane;
    OutlierColumns* columns = reinterpret_cast<OutlierColumns*>(kept + INNER_BYTES + OUTER_BYTES);
    const u8* channels = tile + CHANNELS_AT;
    // Lanes 4 * g + t look for channel g in columns t and t + 4.
    const u32 own = channels[min(with.g, outliers - 1)] + 1;
    u32 found = __ballot_sync(ALL_LANES, columns->channels[with.t] == own || columns->channels[with.t + 4] == own);
    found |= found >> 1;
    if (((found | found >> 2) & 0x11111111u) == 0x11111111u) return 1.f;
    u32 has = lane < COLUMNS ? columns->channels[lane] : 0, needed = 0;
    for (int outlier = 0; outlier < outliers; ++outlier)
      needed |= __ballot_sync(ALL_LANES, has == channels[outlier] + 1u);
    Team::sync();
    const int warp = Team::index() / 32, warps = Team::size() / 32;
    for (int outlier = 0, turn = 0; outlier < outliers; ++outlier) {
      const u32 channel = channels[outlier];
      if (__any_sync(ALL_LANES, has == channel + 1)) continue;
      const int column = __ffs(~needed) - 1;  // of a channel that this page does not need
      needed |= 1u << column;
      if (lane == column) has = channel + 1;
      if (turn++ % warps != warp) continue;
      fill<CHUNKS>(kept, *columns, 0, with.table + (i64)channel * with.shapes.sketch_width, column,
                   with.shapes.sketch_width, lane);
      fill<OUTER_CHUNKS>(kept + INNER_BYTES, *columns, 1,
                         with.outlier_table + (i64)channel * with.shapes.outlier_width, column,
                         with.shapes.outlier_width, lane);
      if (lane == 0) columns->channels[column] = channel + 1;
    }
    Team::sync();
    return 1.f;
  }

  template <Rest REST>
  static __device__ __forceinline__ void load_queries(u8* to, QueryRow* row_of, const Queries& from, int warps,
                                                      const Shapes& shapes) {
    Main::template load_queries<REST>(to, row_of, from, warps, shapes);
  }

  template <Rest REST>
  static __device__ __forceinline__ void multiply(Exchange* exchange, const u8* tile, const u8*, const u8* kept,
                                                  const u8* queries, const Scoring& with) {
    constexpr int STREAMS = Main::template STREAMS<REST>;
    int sums[STREAMS + 2][2][4] = {}, outer[2][2][4] = {};
    Inner::template multiply<STREAMS + 2, STREAMS>(sums, tile, queries, kept, with.lane);
    Main::template put<REST>(exchange, sums, with.lane);
    Outer::template multiply<2, 2>(outer, tile + Inner::BYTES, kept + INNER_BYTES, nullptr, with.lane);
    const OutlierColumns& columns = columns_of(kept);
    float weights[2][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int column = 2 * with.t + r % 2;
      const float inner_unit = with.shapes.factor * columns.unit[0][column], inner_sum = columns.sum[0][column];
      const float outer_unit = with.shapes.outlier_factor * columns.unit[1][column], outer_sum = columns.sum[1][column];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int plane = 2 * j + r / 2, token = 8 * plane + with.g;
        const float twice = power_of_2(1 - plane);
        const float in = fmaf((float)(256 * sums[STREAMS][j][r] + sums[STREAMS + 1][j][r]), twice, -inner_sum);
        const float out = fmaf((float)(256 * outer[0][j][r] + outer[1][j][r]), twice, -outer_sum);
        weights[j][r] = Outer::norm(tile + Inner::BYTES, token) * (outer_unit * out) -
                        Inner::norm(tile, token) * (inner_unit * in);
      }
    }
    exchange[1].put(weights, 0.f, 0.f, with.lane);
  }

  template <Rest REST>
  static __device__ __forceinline__ void finish(float* products, const Exchange* exchange, const u8* tile,
                                                const u8* kept, const QueryRow& query, float growth,
                                                const Scoring& with) {
    Main::template finish<REST>(products, exchange, tile, kept, query, growth, with);
    const u32* channels = columns_of(kept).channels;
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      if (column == with.shapes.keys.outliers) break;
      const float q = with.q[channels[column] - 1];
      float weights[8];
      exchange[1].get(weights, column, with.t);
#pragma unroll
      for (int i = 0; i < 8; ++i) products[i] = fmaf(q, weights[i], products[i]);
    }
  }

 private:
  static __device__ __forceinline__ const OutlierColumns& columns_of(const u8* kept) {
    return *reinterpret_cast<const OutlierColumns*>(kept + INNER_BYTES + OUTER_BYTES);
  }

  // A column of S (`part` 0) or of S' as integers, from `numbers` (width). By a warp.
  template <int OF_CHUNKS>
  static __device__ __forceinline__ void fill(u8* to, OutlierColumns& columns, int part, const float* numbers,
                                              int column, int width, int lane) {
    const float4* fours = reinterpret_cast<const float4*>(numbers);
    float largest = 0.f;
    for (int four = lane; 4 * four < width; four += 32) {
      const float4 x = fours[four];
      largest = fmaxf(fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
    }
    largest = warp_max(largest);
    const float up = largest > 0.f ? LEVELS / largest : 0.f;
    int sum = 0;
    for (int four = lane; four < OF_CHUNKS * Inner::CHUNK_ROWS / 4; four += 32) {
      const float4 x = 4 * four < width ? fours[four] : make_float4(0.f, 0.f, 0.f, 0.f);
      const int whole[4] = {__float2int_rn(x.x * up), __float2int_rn(x.y * up), __float2int_rn(x.z * up),
                            __float2int_rn(x.w * up)};
      TwoBytes bytes;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bytes.set(i, whole[i]);
        sum += whole[i];
      }
      // Of a chunk's 64 rows lane 4 * column + t has rows 16 * t .. 16 * t + 15.
      u8* at = to + (four / 16 * 32 + QUAD * column) * GRANULE + four % 16 * 4;
      *reinterpret_cast<u32*>(at) = bytes.high[0];
      *reinterpret_cast<u32*>(at + OF_CHUNKS * 32 * GRANULE) = bytes.low[0];
    }
    sum = __reduce_add_sync(ALL_LANES, sum);
    if (lane == 0) {
      columns.unit[part][column] = largest / LEVELS;
      columns.sum[part][column] = (float)sum;
    }
  }
};
