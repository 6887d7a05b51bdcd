// Scores estimated from sketched keys that are arrays: kvsketch.qjl.sketch_scores.
#include "numbers.cuh"

// A block has 32 tokens of one page, a lane each, and eight queries, two a warp.
constexpr int THREADS = 128, TOKENS = 32, QUERIES = 8, QUERIES_PER_WARP = 2;
// Rows of the sketch whose projected queries are in shared memory at a time.
constexpr int ROWS = 256;

// The fields of SCORES in qjl.py, in their order.
struct Scores {
  i64 tokens;            // of a head
  int heads, queries;    // all key heads, and queries of each
  int page, pages, tiles, outliers;
  int width, m, pitch, outlier_m, outlier_pitch, dtype;
  float factor, outlier_factor;  // c / m
};

// One part of the sketch: signs (heads, tokens, ceil(m/8)), norms (heads, tokens), columns (width, pitch).
struct Part {
  const u8* signs;
  const u16* norms;
  const float* columns;
  int m, pitch;
  float factor, sign;  // what the listed channels' products count: they are taken off the whole, or are all there is
};

// Grid (tiles of a head * ceil(queries / QUERIES), heads). q (heads, queries, width), base (heads, queries, m): q's
// products with the first projection.
__global__ void __launch_bounds__(THREADS)
    sketch_scores(const void* q, const float* base, const u8* signs, const u16* norms, const float* columns,
                  const u8* outlier_signs, const u16* outlier_norms, const float* outlier_columns,
                  const i64* channels, void* scores, const Scores shape) {
  __shared__ float projected[QUERIES][ROWS];
  const u32 query_tiles = (shape.queries + QUERIES - 1) / QUERIES, tile = blockIdx.x / query_tiles;
  const i64 page = tile / shape.tiles;
  const i64 first = page * shape.page + tile % shape.tiles * TOKENS;
  const i64 end = min((page + 1) * shape.page, shape.tokens);
  const i64 token = first + threadIdx.x % 32;
  const int first_query = blockIdx.x % query_tiles * QUERIES, own = threadIdx.x / 32 * QUERIES_PER_WARP;
  for (int head = blockIdx.y; head < shape.heads; head += gridDim.y) {
    const i64 all = (i64)head * shape.queries + first_query, key = head * shape.tokens + token;
    const i64* listed = channels + (head * (i64)shape.pages + page) * shape.outliers;
    float totals[QUERIES_PER_WARP] = {0.f, 0.f};
    for (int index = 0; index < (shape.outliers ? 2 : 1); ++index) {
      const Part part = index == 0
                            ? Part{signs, norms, columns, shape.m, shape.pitch, shape.factor, -1.f}
                            : Part{outlier_signs, outlier_norms, outlier_columns, shape.outlier_m, shape.outlier_pitch,
                                   shape.outlier_factor, 1.f};
      const int bytes = (part.m + 7) / 8;
      float sums[QUERIES_PER_WARP] = {0.f, 0.f};
      for (int start = 0; start < part.m; start += ROWS) {
        __syncthreads();
        for (int e = threadIdx.x; e < QUERIES * ROWS; e += THREADS) {
          const int query = e / ROWS, row = start + e % ROWS;
          float product = 0.f;
          if (row < part.m && first_query + query < shape.queries) {
            if (index == 0) product = base[(all + query) * part.m + row];
            for (int o = 0; o < shape.outliers; ++o) {
              const float number = load_number(q, (all + query) * shape.width + listed[o], shape.dtype);
              product += part.sign * number * part.columns[listed[o] * part.pitch + row];
            }
          }
          projected[query][e % ROWS] = product;
        }
        __syncthreads();
        if (token >= end) continue;
        const int stop = min(ROWS, part.m - start + 7) / 8;
        for (int b = 0; b < stop; ++b) {
          const u32 byte = part.signs[key * bytes + start / 8 + b];
#pragma unroll
          for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int r = 0; r < QUERIES_PER_WARP; ++r) {
              const float product = projected[own + r][8 * b + j];
              sums[r] += byte >> j & 1 ? product : -product;
            }
        }
      }
      if (token < end)
#pragma unroll
        for (int r = 0; r < QUERIES_PER_WARP; ++r)
          totals[r] += sums[r] * (half_number(part.norms[key]) * part.factor);
    }
    if (token >= end) continue;
#pragma unroll
    for (int r = 0; r < QUERIES_PER_WARP; ++r)
      if (first_query + own + r < shape.queries)
        store_number(scores, (all + own + r) * shape.tokens + token, shape.dtype, totals[r]);
  }
}
