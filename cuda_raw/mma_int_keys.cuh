// Products of queries with 32 tokens on tensor cores, keys being integers with a scale and a zero for each channel.
#include "attention.cuh"
#include "mma_coefficients.cuh"
#include "mma_queries.cuh"
#include "mma_exchange.cuh"
#include "mma_team.cuh"

// Keys of at most 32 * CHUNKS channels.
template <int BITS, int CHUNKS>
struct IntKeys {
  // In shared memory: the codes of 32 tokens, and of a page the channels' scales, then their zeros.
  static constexpr int SCALE_BYTES = 2 * CHUNK * CHUNKS, TILE_BYTES = CHUNKS * Chunk<BITS>::BYTES,
                       PAGE_BYTES = 2 * SCALE_BYTES;
  static constexpr int TEAM_BYTES = 0, EXCHANGES = 1;  // kept for all pages of a team; of a warp
  template <Rest REST>
  static constexpr int QUERY_BYTES = CHUNKS * Coefficients<REST>::BYTES;  // of an operand's query rows

  // Whether copies leave nothing of the room unwritten.
  static __device__ __forceinline__ bool fills_room(const SideSpec& keys) { return keys.rows == CHUNK * CHUNKS; }

  template <class Team>
  static __device__ __forceinline__ void copy_tile(u8* to, const u8* side, int tile, const SideSpec& keys) {
    const u32 granules = (u32)keys.rows / Chunk<BITS>::UNIT_ROWS * (Chunk<BITS>::UNIT_BYTES / GRANULE);
    const u8* from = side + tile * granules * GRANULE;  // codes come first
    Team::template each<TILE_BYTES / GRANULE>(granules, [&](int x, int first) {
      copy_async_16(to + GRANULE * Chunk<BITS>::swizzle(x, first), from + GRANULE * (x + first));
    });
  }

  template <class Team>
  static __device__ __forceinline__ void copy_page(u8* to, const u8* side, const SideSpec& keys) {
    const u32 granules = (u32)keys.rows / (GRANULE / 2);
    const u8* from = side + keys.scale;
    Team::template each<PAGE_BYTES / GRANULE>(2 * granules, [&](int x, int first) {
      const int gap = (u32)(x + first) < granules ? 0 : SCALE_BYTES - GRANULE * granules;
      copy_async_16(to + gap + GRANULE * (x + first), from + GRANULE * (x + first));
    });
  }

  // Brings a page's scales to at most 1; the power of 2 by which products are too small then.
  template <class Team>
  static __device__ __forceinline__ float prepare_page(u8* page, const u8*, u8*, const Scoring& with) {
    if (!any_above<SCALE_BYTES / 4>(page, slack_below(0), with.lane)) return 1.f;
    const int exponent = exponent_above_1(largest_half(page, SCALE_BYTES / 4, with.lane));
    Team::sync();
    const __half2 shrink = __float2half2_rn(power_of_2(-exponent));
    for (int at = Team::index(); at < SCALE_BYTES / 4; at += Team::size()) {
      __half2* pair = reinterpret_cast<__half2*>(page) + at;
      *pair = __hmul2_rn(*pair, shrink);
    }
    Team::sync();
    return power_of_2(exponent);
  }

  // Writes the query rows of `warps` operands as coefficients, and what products with each are too large by. By the
  // whole block.
  template <Rest REST>
  static __device__ __forceinline__ void load_queries(u8* to, QueryRow* row_of, const Queries& from, int warps,
                                                      const Shapes& shapes) {
    constexpr int ROWS = Coefficients<REST>::ROWS;
    const int d = shapes.keys.width, lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < warps * ROWS; row += blockDim.x / 32) {
      const float largest = from.largest(from.q, row, d);
      if (lane == 0) row_of[row] = {power_of_2(exponent_above(largest) - TOP_EXPONENT), 0.f};
    }
    __syncthreads();
    for (int at = threadIdx.x; at < warps * CHUNKS * 32; at += blockDim.x) {
      const int chunk = at / 32 % CHUNKS, row = at / (CHUNKS * 32) * ROWS + lane / QUAD % ROWS;
      const float scale = 1.f / row_of[row].unscale;
      float numbers[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int channel = CHUNK * chunk + 8 * (lane % QUAD) + i;
        numbers[i] = scale * from.number(from.q, row, channel, d);
      }
      Coefficients<REST> coefficients;
      coefficients.set(numbers, lane / QUAD);
      coefficients.store(to + at / 32 * Coefficients<REST>::BYTES, lane);
    }
  }

  // Products of an operand's query rows with the 32 tokens, as far as tensor cores make them.
  template <Rest REST>
  static __device__ __forceinline__ void multiply(Exchange* exchange, const u8* tile, const u8* page, const u8*,
                                                  const u8* queries, const Scoring& with) {
    float sums[2][4] = {}, even[4] = {}, odd[4] = {};
    const u8* scale = page + GRANULE * with.t;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      u32 words[Chunk<BITS>::VECTORS][2], a[2][2][4];
      Chunk<BITS>::load(words, tile + chunk * Chunk<BITS>::BYTES, with.lane);
      Chunk<BITS>::operands(a, words, with.lane);
      Coefficients<REST> query;
      query.load(queries + chunk * Coefficients<REST>::BYTES, with.lane);
      const Operands<REST> b = query.times(load_16(scale + 2 * CHUNK * chunk));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b.multiply(sums[0], a[half][0], half);
        b.multiply(sums[1], a[half][1], half);
      }
      query.multiply_all(even, odd, load_16(scale + 2 * CHUNK * chunk + SCALE_BYTES));
    }
    exchange->put(sums, even[0] + odd[2], even[1] + odd[3], with.lane);
  }

  // Products of query row g % ROWS with tokens 8 * t .. 8 * t + 7, plane t; `growth` is of prepare_page().
  template <Rest REST>
  static __device__ __forceinline__ void finish(float* products, const Exchange* exchange, const u8*, const u8*,
                                                const QueryRow& query, float growth, const Scoring& with) {
    constexpr int ROWS = Coefficients<REST>::ROWS;
    const int row = with.g % ROWS, t = with.t;
    const float factor = query.unscale * growth * power_of_2(CODE_EXPONENT - Chunk<BITS>::plane_shift(t));
    const float left_offset = REST == BY_COLUMN ? exchange->offset[row + 4] : 0.f;
    const float offset = query.unscale * (exchange->offset[row] + left_offset);
    exchange->get(products, row, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) products[i] = fmaf(products[i], factor, offset);
    if (REST == BY_COLUMN) {
      float left[8];
      exchange->get(left, row + 4, t);
#pragma unroll
      for (int i = 0; i < 8; ++i) products[i] = fmaf(left[i], factor, products[i]);
    }
  }
};
