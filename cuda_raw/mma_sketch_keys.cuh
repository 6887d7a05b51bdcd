// Products of queries with 32 tokens on tensor cores, keys being signs of a sketch and their norms.
//
// S q is rounded to integers, 32512 for the largest of a query, or 127 where nothing is kept of roundings; as bytes they
// are operands of m16n8k32, whose other operand is the stored bits where they lie in bytes: bit b of plane b is 2^b. A
// lane needs two operations for eight bits. Products of bit planes of S q with the bits themselves (m16n8k256.b1) would
// take the bits in the order of lanes first, which takes as long, then an operation for each plane, token and query.
#pragma once
#include "attention.cuh"
#include "mma_exchange.cuh"
#include "mma_queries.cuh"
#include "mma_team.cuh"

// Sketches of at most 64 * CHUNKS rows: a chunk is four units, one for each lane of a quad.
template <int CHUNKS>
struct SketchKeys {
  using Bits = Chunk<2>;  // whose units are of the same size
  static constexpr int CHUNK_ROWS = 64, CHUNK_BYTES = 256, UNIT_BYTES = 64, UNIT_ROWS = 16;
  static constexpr int NORM_BYTES = 2 * CHUNK, TILE_BYTES = CHUNKS * CHUNK_BYTES + NORM_BYTES, PAGE_BYTES = 0;
  static constexpr int LANE_BYTES = 32 * GRANULE, EXCHANGES = 1;
  template <Rest REST>
  static constexpr int QUERY_BYTES = CHUNKS * (REST == BY_PRODUCT ? 2 : 1) * LANE_BYTES;

  static __device__ __forceinline__ bool fills_room(const SideSpec& keys) { return keys.rows == CHUNK_ROWS * CHUNKS; }

  template <class Team>
  static __device__ __forceinline__ void copy_tile(u8* to, const u8* side, int, const SideSpec& keys) {
    copy_sketch<Team>(to, side, side + keys.norms, keys.rows);
  }

  template <class Team>
  static __device__ __forceinline__ void copy_sketch(u8* to, const u8* codes, const u8* norms, int rows) {
    constexpr int A_UNIT = UNIT_BYTES / GRANULE, OF_NORMS = NORM_BYTES / GRANULE;
    Team::template each<A_UNIT * CHUNK_ROWS / UNIT_ROWS * CHUNKS>(
        (u32)rows / UNIT_ROWS * A_UNIT, [&](int x, int first) {
          copy_async_16(to + GRANULE * Bits::swizzle(x, first), codes + GRANULE * (x + first));
        });
    Team::template each<OF_NORMS>(OF_NORMS, [&](int x, int first) {
      copy_async_16(to + CHUNKS * CHUNK_BYTES + GRANULE * (x + first), norms + GRANULE * (x + first));
    });
  }

  template <class Team>
  static __device__ __forceinline__ void copy_page(u8*, const u8*, const SideSpec&) {}
  template <class Team>
  static __device__ __forceinline__ float normalize_page(u8*) { return 1.f; }

  // See IntKeys.
  template <Rest REST>
  static __device__ __forceinline__ void load_queries(u8* to, QueryRow* row_of, const Queries& from, int warps,
                                                      const Shapes& shapes) {
    constexpr int ROWS = Coefficients<REST>::ROWS;
    constexpr float LEVELS = REST == NONE ? 127.f : 127.f * 256.f;
    const int m = shapes.sketch_width, lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < warps * ROWS; row += blockDim.x / 32) {
      const float unscale = from.largest(from.sketched, row, m) / LEVELS;
      int sum = 0;
      for (int at = lane; at < m; at += 32) sum += rounded(from, row, at, m, unscale);
      sum = __reduce_add_sync(ALL_LANES, sum);
      if (lane == 0) row_of[row] = {unscale, (float)sum};
    }
    __syncthreads();
    for (int at = threadIdx.x; at < warps * CHUNKS * 32; at += blockDim.x) {
      const int chunk = at / 32 % CHUNKS, g = lane / QUAD, row = at / (CHUNKS * 32) * ROWS + g % ROWS;
      const float unscale = row_of[row].unscale;
      u32 high[4] = {}, low[4] = {};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int x = rounded(from, row, CHUNK_ROWS * chunk + 16 * (lane % QUAD) + i, m, unscale);
        const int top = REST == NONE ? x : (x + 128) >> 8;
        high[i / 4] |= (top & 255) << 8 * (i % 4);
        low[i / 4] |= (x & 255) << 8 * (i % 4);  // x - 256 * top, as a signed byte
      }
      uint4* out = reinterpret_cast<uint4*>(to + at / 32 * (REST == BY_PRODUCT ? 2 : 1) * LANE_BYTES) + lane;
      const bool rest = g >= ROWS;
      out[0] = rest ? make_uint4(low[0], low[1], low[2], low[3]) : make_uint4(high[0], high[1], high[2], high[3]);
      if (REST == BY_PRODUCT) out[32] = make_uint4(low[0], low[1], low[2], low[3]);
    }
  }

  // Bits of tokens g, 8 + g, 16 + g, 24 + g in the rows of unit t of a chunk: rows 0..3 and 8..11, then the others.
  static __device__ __forceinline__ uint2 load(const u8* sketch, int chunk, int g, int t) {
    const u8* own = sketch + GRANULE * Bits::swizzle(UNIT_BYTES / GRANULE * t + g / 2) + 8 * (g % 2);
    return *reinterpret_cast<const uint2*>(own + chunk * CHUNK_BYTES);
  }

  template <Rest REST>
  static __device__ __forceinline__ void multiply(Exchange* exchange, const u8* tile, const u8*,
                                                  const u8* queries, const Scoring& with) {
    const int g = with.g, t = with.t;
    int sums[2][4] = {}, low_sums[2][4] = {};
    const uint4* query = reinterpret_cast<const uint4*>(queries) + with.lane;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const uint2 words = load(tile, chunk, g, t);
      u32 b[4], low_b[4];
      unpack(b, query[chunk * (REST == BY_PRODUCT ? 64 : 32)]);
      if (REST == BY_PRODUCT) unpack(low_b, query[chunk * 64 + 32]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows 0..7 of units, then 8..15
        const u32 x = words.x >> 4 * half, y = words.y >> 4 * half;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const u32 even = 0x01010101u << 2 * j, odd = even << 1, a[4] = {x & even, x & odd, y & even, y & odd};
          mma_u8_s8(sums[j], a, b + 2 * half);
          if (REST == BY_PRODUCT) mma_u8_s8(low_sums[j], a, low_b + 2 * half);
        }
      }
    }
    float floats[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) floats[j][r] = REST == BY_PRODUCT ? 256 * sums[j][r] + low_sums[j][r] : sums[j][r];
    exchange->put(floats, 0.f, 0.f, with.lane);
  }

  // A product is c / m * norm * (the sum of S q where bits are set less that where they are not).
  template <Rest REST>
  static __device__ __forceinline__ void finish(float* products, const Exchange* exchange, const u8* tile,
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
    unpack(norms, load_16(tile + CHUNKS * CHUNK_BYTES + GRANULE * t));
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
