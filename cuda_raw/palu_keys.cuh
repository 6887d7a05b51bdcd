// Keys that are rebuilt by tensor cores and stay in registers: 32 tokens by 32 columns of a head, by one warp.
#include "palu_words.cuh"
#include "ptx.cuh"

// What a sum of products of planes stands for: set i of sums is of products that count 256^i.
template <int SETS>
__device__ __forceinline__ float joined(const int* sums, int apart) {
  float x = (float)sums[(SETS - 1) * apart];
#pragma unroll
  for (int set = SETS - 2; set >= 0; --set) x = fmaf(256.f, x, (float)sums[set * apart]);
  return x;
}

// 32 tokens by 32 columns of keys: of 16 tokens m and tile n of columns, number j of lane 4 * g + t is that of token
// 16 * m + g + j / 2 * 8 and column 8 * n + 2 * t + j % 2.
struct Keys {
  float k[2][4][4];

  // Latents (32 tokens in words, `steps` words of 32 bytes) times rows of the matrix.
  template <int KEY_PLANES, int PLANES_OF_BYTES>
  __device__ __forceinline__ void multiply(const u32* words, const uint4* matrix, const float2* columns,
                                           const TokenScales& tokens, int steps) {
    constexpr int SETS = KEY_PLANES + PLANES_OF_BYTES - 1;
    const int lane = threadIdx.x % LANES, g = lane / QUAD, t = lane % QUAD;
    int sums[SETS][2][4][4] = {};
    const uint4* z = reinterpret_cast<const uint4*>(words) + lane;
    matrix += lane;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      uint4 a[2][KEY_PLANES], b[PLANES_OF_BYTES][2];
#pragma unroll
      for (int plane = 0; plane < PLANES_OF_BYTES; ++plane)
#pragma unroll
        for (int n = 0; n < 2; ++n) b[plane][n] = matrix[((step * PLANES_OF_BYTES + plane) * 2 + n) * LANES];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int plane = 0; plane < KEY_PLANES; ++plane)
          a[m][plane] = z[((m * steps + step) * KEY_PLANES + plane) * LANES];
#pragma unroll
      for (int i = 0; i < KEY_PLANES; ++i)
#pragma unroll
        for (int j = 0; j < PLANES_OF_BYTES; ++j)
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < 4; ++n)
              mma_s8(sums[i + j][m][n], &a[m][i].x, &b[j][n / 2].x + n % 2 * 2);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 even = columns[8 * n + 2 * t], odd = columns[8 * n + 2 * t + 1];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int token = 16 * m + g + j / 2 * 8;
          const float2 column = j % 2 ? odd : even;
          k[m][n][j] = fmaf(joined<SETS>(&sums[0][m][n][j], 32) * column.x, tokens.scale[token],
                            column.y * tokens.zero[token]);
        }
    }
  }

  // Adds to each key the number of its channel, or multiplies it by that.
  __device__ __forceinline__ void add(const float* numbers, int block, const Rebuild& rebuild) {
    with_columns<false>(numbers, block, rebuild);
  }
  __device__ __forceinline__ void scale(const float* numbers, int block, const Rebuild& rebuild) {
    with_columns<true>(numbers, block, rebuild);
  }

  // Adds the squares of each token's numbers to squares (32 tokens), or begins them.
  __device__ __forceinline__ void add_squares(float* squares, bool begin) const {
    const int g = threadIdx.x % LANES / QUAD, t = threadIdx.x % QUAD;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < 4; ++n)
          sum = fmaf(k[m][n][2 * h], k[m][n][2 * h], fmaf(k[m][n][2 * h + 1], k[m][n][2 * h + 1], sum));
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        float* at = squares + 16 * m + g + 8 * h;
        if (t == 0) *at = begin ? sum : *at + sum;
      }
  }

  // Turns the numbers of tiles 2 n and 2 n + 1 of a block against each other, by the tokens' rows of the tables.
  __device__ __forceinline__ void turn(const float* cos, const float* sin, const int* rows, int block,
                                       const Rebuild& rebuild) {
    const int g = threadIdx.x % LANES / QUAD, pair = 16 * block + QUAD * (threadIdx.x % QUAD);
    const int apart = rebuild.interleaved ? 4 : rebuild.rotary / 2, first = rebuild.interleaved ? 2 * pair : pair;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i64 at = (i64)rows[16 * m + g + 8 * h] * rebuild.rotary + first;
        float c[8], s[8];
        load_table(c, cos + at, apart, pair, rebuild);
        load_table(s, sin + at, apart, pair, rebuild);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int a = rebuild.interleaved ? 2 * i : i, b = rebuild.interleaved ? 2 * i + 1 : i + 4;
          float &x = k[m][i / 2 * 2][2 * h + i % 2], &y = k[m][i / 2 * 2 + 1][2 * h + i % 2];
          const float turned = x * c[a] - y * s[a];
          y = y * c[b] + x * s[b];
          x = turned;
        }
      }
  }

  // Adds the products with a head's queries to scores (columns, pitch), or begins them; q as split_queries makes them.
  __device__ __forceinline__ void score(float* scores, int pitch, bool begin, const uint4* q, i64 tile_step,
                                        int each) const {
    const int lane = threadIdx.x % LANES, g = lane / QUAD, t = lane % QUAD;
    u32 high[2][2][4], low[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          split_pair(high[m][n / 2][n % 2 * 2 + h], low[m][n / 2][n % 2 * 2 + h], k[m][n][2 * h], k[m][n][2 * h + 1]);
    for (int first = 0; first < each; first += 8, q += tile_step) {
      float sums[2][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 b = q[half * LANES + lane];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_bf16(sums[m], low[m][half], &b.x);
          mma_bf16(sums[m], high[m][half], &b.z);
          mma_bf16(sums[m], high[m][half], &b.x);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int query = first + 2 * t + j % 2;
          float* at = scores + query * pitch + 16 * m + g + j / 2 * 8;
          if (query < each) *at = begin ? sums[m][j] : *at + sums[m][j];
        }
    }
  }

  // Keys of a block as scores: its columns are queries.
  __device__ __forceinline__ void store(float* scores, int pitch, int block, int columns) const {
    const int g = threadIdx.x % LANES / QUAD, t = threadIdx.x % QUAD;
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = LANES * block + 8 * n + 2 * t + j % 2;
          if (column < columns) scores[column * pitch + 16 * m + g + j / 2 * 8] = k[m][n][j];
        }
  }

 private:
  template <bool TIMES>
  __device__ __forceinline__ void with_columns(const float* numbers, int block, const Rebuild& rebuild) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = channel_number(numbers, channel_of(block, n, threadIdx.x % QUAD * 2 + e, rebuild));
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int j = e; j < 4; j += 2) k[m][n][j] = TIMES ? k[m][n][j] * x : k[m][n][j] + x;
      }
  }

  // The numbers of four pairs, from `at` on and `apart` further, 0 for pairs that are not there.
  static __device__ __forceinline__ void load_table(float* out, const float* at, int apart, int pair,
                                                    const Rebuild& rebuild) {
    if (rebuild.rotary % 8 == 0) {
      const bool there = 2 * pair < rebuild.rotary;
#pragma unroll
      for (int part = 0; part < 2; ++part)
        reinterpret_cast<float4*>(out)[part] =
            there ? *reinterpret_cast<const float4*>(at + part * apart) : make_float4(0.f, 0.f, 0.f, 0.f);
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int of = pair + (rebuild.interleaved ? i / 2 : i % 4);
      out[i] = 2 * of < rebuild.rotary ? at[i / 4 * apart + i % 4] : 0.f;
    }
  }
};
