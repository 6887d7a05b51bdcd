// Products of queries with 32 tokens on tensor cores, keys being signs of a sketch and their norms.
//
// S q is rounded to integers: 32512 for the largest of a query, or 127 where nothing is kept of what rounding leaves.
#include "mma_exchange.cuh"
#include "mma_queries.cuh"
#include "mma_signs.cuh"

// Sketches of at most 64 * CHUNKS rows.
template <int CHUNKS>
struct SketchKeys {
  using Sketch = Signs<CHUNKS>;
  static constexpr int TILE_BYTES = Sketch::BYTES, PAGE_BYTES = 0, TEAM_BYTES = 0, EXCHANGES = 1;
  template <Rest REST>
  static constexpr int STREAMS = REST == BY_PRODUCT ? 2 : 1;
  template <Rest REST>
  static constexpr int QUERY_BYTES = STREAMS<REST> * Sketch::STREAM_BYTES;

  static __device__ __forceinline__ bool fills_room(const SideSpec& keys) {
    return keys.rows == Sketch::CHUNK_ROWS * CHUNKS;
  }

  template <class Team>
  static __device__ __forceinline__ void copy_tile(u8* to, const u8* side, int, const SideSpec& keys) {
    Sketch::template copy<Team>(to, side, side + keys.norms, keys.rows);
  }

  template <class Team>
  static __device__ __forceinline__ void copy_page(u8*, const u8*, const SideSpec&) {}
  template <class Team>
  static __device__ __forceinline__ float prepare_page(u8*, const u8*, u8*, const Scoring&) { return 1.f; }

  // See IntKeys.
  template <Rest REST>
  static __device__ __forceinline__ void load_queries(u8* to, QueryRow* row_of, const Queries& from, int warps,
                                                      const Shapes& shapes) {
    constexpr int ROWS = Coefficients<REST>::ROWS;
    const int m = shapes.sketch_width, lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < warps * ROWS; row += blockDim.x / 32) {
      const float unscale = from.largest(from.sketched, row, m) / (REST == NONE ? 127.f : LEVELS);
      int sum = 0;
      for (int at = lane; at < m; at += 32) sum += rounded(from, row, at, m, unscale);
      sum = __reduce_add_sync(ALL_LANES, sum);
      if (lane == 0) row_of[row] = {unscale, (float)sum};
    }
    __syncthreads();
    for (int at = threadIdx.x; at < warps * CHUNKS * 32; at += blockDim.x) {
      const int operand = at / (CHUNKS * 32), chunk = at / 32 % CHUNKS, g = lane / QUAD;
      const int row = operand * ROWS + g % ROWS;
      const float unscale = row_of[row].unscale;
      TwoBytes bytes;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int x = rounded(from, row, Sketch::CHUNK_ROWS * chunk + 16 * (lane % QUAD) + i, m, unscale);
        bytes.set(i, REST == NONE ? 256 * x : x);
      }
      uint4* out = lane_bytes(to + operand * QUERY_BYTES<REST>, at % (CHUNKS * 32));
      out[0] = g < ROWS ? pack(bytes.high) : pack(bytes.low);
      if (REST == BY_PRODUCT) out[CHUNKS * 32] = pack(bytes.low);
    }
  }

  template <Rest REST>
  static __device__ __forceinline__ void multiply(Exchange* exchange, const u8* tile, const u8*, const u8*,
                                                  const u8* queries, const Scoring& with) {
    int sums[STREAMS<REST>][2][4] = {};
    Sketch::template multiply<STREAMS<REST>, STREAMS<REST>>(sums, tile, queries, nullptr, with.lane);
    put<REST>(exchange, sums, with.lane);
  }

  template <Rest REST>
  static __device__ __forceinline__ void put(Exchange* exchange, const int (*sums)[2][4], int lane) {
    float numbers[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        numbers[j][r] = REST == BY_PRODUCT ? 256 * sums[0][j][r] + sums[STREAMS<REST> - 1][j][r] : sums[0][j][r];
    exchange->put(numbers, 0.f, 0.f, lane);
  }

  // A product is c / m * norm * (the sum of S q where bits are set less that where they are not).
  template <Rest REST>
  static __device__ __forceinline__ void finish(float* products, const Exchange* exchange, const u8* tile, const u8*,
                                                const QueryRow& query, float, const Scoring& with) {
    const int row = with.g % Coefficients<REST>::ROWS, t = with.t;
    const float twice = power_of_2(1 - t);
    exchange->get(products, row, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) products[i] = fmaf(products[i], REST == BY_COLUMN ? 256.f * twice : twice, -query.sum);
    if (REST == BY_COLUMN) {
      float left[8];
      exchange->get(left, row + 4, t);
#pragma unroll
      for (int i = 0; i < 8; ++i) products[i] = fmaf(left[i], twice, products[i]);
    }
    u32 norms[4];
    unpack(norms, load_16(tile + CHUNKS * Sketch::CHUNK_BYTES + GRANULE * t));
    const float factor = query.unscale * with.shapes.factor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 norm = __half22float2(as_halves(norms[i]));
      products[2 * i] *= factor * norm.x;
      products[2 * i + 1] *= factor * norm.y;
    }
  }

 private:
  // S q of a row as an integer.
  static __device__ __forceinline__ int rounded(const Queries& from, int row, int at, int m, float unscale) {
    return unscale > 0.f ? __float2int_rn(from.number(from.sketched, row, at, m) / unscale) : 0;
  }
};
