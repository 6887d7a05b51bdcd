// Products of queries with 32 tokens on tensor cores, keys being integers with a scale and a zero for each group of a
// token's channels.
//
// Units hold such codes for sums over tokens (docs/layout.md), so that a 32-bit word is four tokens of a channel of
// each plane. Lane 4 * g + t takes tokens 4 * g .. 4 * g + 3 of channels t and t + 4 of each plane: the tokens become
// rows of four operands, and two planes of a token are a pair of the contraction. Coefficients are divided by what the
// second of them is too large by.
#include "attention.cuh"
#include "mma_coefficients.cuh"
#include "mma_exchange.cuh"
#include "mma_queries.cuh"
#include "mma_team.cuh"

// Keys of at most 32 * CHUNKS channels, in groups of whole chunks, or in one.
template <int BITS, int CHUNKS>
struct LatentKeys {
  using Codes = Chunk<BITS>;
  static constexpr int GROUP_BYTES = 2 * CHUNK, CODE_BYTES = CHUNKS * Codes::BYTES;
  // In shared memory as in the page: codes, scales, zeros.
  static constexpr int TILE_BYTES = CODE_BYTES + 2 * CHUNKS * GROUP_BYTES, PAGE_BYTES = 0;
  // Coefficients, then the sum of the query over each group of channels, in columns.
  static constexpr int SUM_BYTES = 4 * COLUMNS * CHUNKS;
  static constexpr int TEAM_BYTES = 0, EXCHANGES = 1;
  template <Rest REST>
  static constexpr int QUERY_BYTES = CHUNKS * Coefficients<REST>::BYTES + SUM_BYTES;

  static __device__ __forceinline__ bool fills_room(const SideSpec&) { return true; }

  template <class Team>
  static __device__ __forceinline__ void copy_tile(u8* to, const u8* side, int, const SideSpec& keys) {
    const int granules = (CODE_BYTES + 2 * keys.groups * GROUP_BYTES) / GRANULE;
    Team::template each<TILE_BYTES / GRANULE>(granules, [&](int x, int first) {
      copy_async_16(to + GRANULE * (x + first), side + GRANULE * (x + first));
    });
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
    const int d = shapes.keys.width, group = shapes.keys.group, lane = threadIdx.x % 32, g = lane / QUAD;
    for (int row = threadIdx.x / 32; row < warps * ROWS; row += blockDim.x / 32) {
      const float largest = from.largest(from.q, row, d);
      if (lane == 0) row_of[row] = {power_of_2(exponent_above(largest) - TOP_EXPONENT), 0.f};
    }
    __syncthreads();
    for (int at = threadIdx.x; at < warps * CHUNKS * 32; at += blockDim.x) {
      const int operand = at / (CHUNKS * 32), chunk = at / 32 % CHUNKS, row = operand * ROWS + g % ROWS;
      const float scale = 1.f / row_of[row].unscale;
      float numbers[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int plane = i % PLANES, channel = CHUNK * chunk + 8 * plane + lane % QUAD + 4 * (i / PLANES);
        numbers[i] = from.number(from.q, row, channel, d) * scale * power_of_2(-plane_shift(plane));
      }
      Coefficients<REST> coefficients;
      coefficients.set(numbers, g);
      coefficients.store(to + operand * QUERY_BYTES<REST> + chunk * Coefficients<REST>::BYTES, lane);
    }
    for (int at = threadIdx.x; at < warps * CHUNKS * COLUMNS; at += blockDim.x) {
      const int operand = at / (CHUNKS * COLUMNS), column = at % COLUMNS, row = operand * ROWS + column;
      const int first = at / COLUMNS % CHUNKS * group;
      float sum = 0.f;
      for (int channel = first; column < ROWS && channel < min(first + group, d); ++channel)
        sum += from.number(from.q, row, channel, d);
      float* sums = reinterpret_cast<float*>(to + (operand + 1) * QUERY_BYTES<REST> - SUM_BYTES);
      sums[at % (CHUNKS * COLUMNS)] = column < ROWS ? sum / row_of[row].unscale : 0.f;
    }
  }

  template <Rest REST>
  static __device__ __forceinline__ void multiply(Exchange* exchange, const u8* tile, const u8*, const u8*,
                                                  const u8* queries, const Scoring& with) {
    const SideSpec& keys = with.shapes.keys;
    const int g = with.g, t = with.t, chunks = max(keys.group / CHUNK, 1);
    const float* query_sums = reinterpret_cast<const float*>(queries + QUERY_BYTES<REST> - SUM_BYTES) + 2 * t;
    const u8* scale = tile + CODE_BYTES + 8 * g;
    float products[2][4] = {}, sums[2][4] = {};
    int group = 0, left = keys.groups == 1 ? CHUNKS : chunks;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      u32 a[2][2][4];
      operands(a, tile + chunk * Codes::BYTES, g, t);
      Coefficients<REST> query;
      query.load(queries + chunk * Coefficients<REST>::BYTES, with.lane);
      const Operands<REST> b = query.operands();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b.multiply(sums[0], a[half][0], half);
        b.multiply(sums[1], a[half][1], half);
      }
      if (--left == 0 || chunk + 1 == CHUNKS) {
        // The group ends: its sums times its scales, and its zeros times the query's sum.
        const float2 query_sum = *reinterpret_cast<const float2*>(query_sums + group * COLUMNS);
        const u8* own = scale + group * GROUP_BYTES;
        float scales[4], zeros[4];
        read(scales, own);
        read(zeros, own + keys.groups * GROUP_BYTES);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const float zero = zeros[2 * j + r / 2] * (r % 2 ? query_sum.y : query_sum.x);
            products[j][r] += fmaf(power_of_2(CODE_EXPONENT) * sums[j][r], scales[2 * j + r / 2], zero);
            sums[j][r] = 0.f;
          }
        ++group;
        left = chunks;
      }
    }
    exchange->put_quads(products, with.lane);
  }

  template <Rest REST>
  static __device__ __forceinline__ void finish(float* products, const Exchange* exchange, const u8*, const u8*,
                                                const QueryRow& query, float, const Scoring& with) {
    const int row = with.g % Coefficients<REST>::ROWS, t = with.t;
    exchange->get(products, row, t);
    float left[8] = {};
    if (REST == BY_COLUMN) exchange->get(left, row + 4, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) products[i] = (products[i] + left[i]) * query.unscale;
  }

 private:
  // Where the codes of a plane lie in their byte.
  static __device__ __forceinline__ int plane_shift(int b) {
    return BITS == 1 ? b : BITS == 2 ? 2 * b : BITS == 3 ? 4 * (b / 2) : BITS == 4 ? 4 * (b % 2) : 0;
  }

  static __device__ __forceinline__ void read(float* out, const u8* four_halves) {
    const uint2 words = *reinterpret_cast<const uint2*>(four_halves);
    const float2 low = __half22float2(as_halves(words.x)), high = __half22float2(as_halves(words.y));
    out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
  }

  static __device__ __forceinline__ u32 word(const u8* at) { return *reinterpret_cast<const u32*>(at); }

  // a[half][j]: the operand of channels t + 4 * half of the planes, rows g being tokens 4 * g + 2 * j and rows g + 8
  // those after them.
  static __device__ __forceinline__ void operands(u32 (*a)[2][4], const u8* chunk, int g, int t) {
    const int eight = g / 2, late = 4 * (eight % 2);  // the eight tokens that the lane's four are of
    const u8* own = chunk + Codes::UNIT_BYTES * (Codes::UNIT_ROWS == 16 ? eight / 2 : eight) + 4 * (g % 2) + 8 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u8* at = own + 32 * half;
      u32 vectors[4];
      if constexpr (BITS == 1) {
        vectors[0] = word(at) >> late;
      } else if constexpr (BITS == 3) {
        const u32 low = word(at + 64 * (eight % 2)), high = word(at + 128) >> late;
        vectors[0] = Codes::with_high_bits(low, high);
        vectors[1] = Codes::with_high_bits(low >> 2, high >> 1);
      } else {
#pragma unroll
        for (int v = 0; v < Codes::VECTORS; ++v) vectors[v] = word(at + 64 * v);
      }
#pragma unroll
      for (int token = 0; token < 4; ++token)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) a[half][token / 2][2 * pair + token % 2] = planes_of(vectors, token, pair);
    }
  }

  // Codes of planes 2 * pair and 2 * pair + 1 in a byte, as two float16.
  static __device__ __forceinline__ u32 planes_of(const u32* vectors, int byte, int pair) {
    const u32 twice = 0x0101u * byte, both = 0x0400u + 0x0101u * byte;  // selects a byte of one word, or of two
    if constexpr (BITS == 1) return __byte_perm(vectors[0], 0, 0x4040 + twice * 1) & 0x00020001u << 2 * pair;
    if constexpr (BITS == 2) return __byte_perm(vectors[0], 0, 0x4040 + twice * 1) & 0x000c0003u << 4 * pair;
    if constexpr (BITS == 3) return __byte_perm(vectors[0], vectors[1], both) & 0x00070007u << 4 * pair;
    if constexpr (BITS == 4) return __byte_perm(vectors[pair], 0, 0x4040 + twice * 1) & 0x00f0000fu;
    return __byte_perm(vectors[2 * pair], vectors[2 * pair + 1], both) & 0x00ff00ffu;
  }
};
