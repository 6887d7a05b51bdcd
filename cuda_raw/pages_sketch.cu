// Keys float32 whose products with a query are its estimates from a page of signs: c/m |k| S^T sign(S k).
#include "pages.cuh"

constexpr int THREADS = 128, TOKENS = 32;
// Rows of a sketch whose signs are in shared memory at a time.
constexpr int ROWS = 512;

// What the threads know of one of the two sketches of a page.
struct Part {
  const float* matrix;  // (m, width)
  int m, codes, norms;
  float factor;
  bool outliers;
};

__device__ __forceinline__ bool is_listed(const u8* channels, int count, int bytes, int channel) {
  bool found = false;
  for (int o = 0; o < count; ++o)
    found |= channel == (bytes == 1 ? channels[o] : reinterpret_cast<const u16*>(channels)[o]);
  return found;
}

// Grid (blocks of 32 tokens * blocks of channels, heads): a thread has one channel of 32 tokens.
__global__ void __launch_bounds__(THREADS, 3)
    decode_sketch(const u8* records, const float* matrix, const float* outlier_matrix, float* x, const Places places,
                  const SideSpec side, const float factor, const float outlier_factor) {
  __shared__ u32 signs[ROWS];  // bit t: the sign of token t
  const int channel_blocks = (side.width + THREADS - 1) / THREADS, blocks = side.tokens / TOKENS;
  const int channel = blockIdx.x % channel_blocks * THREADS + threadIdx.x;
  const u32 index = blockIdx.x / channel_blocks;
  const int block = index % blocks;
  const i64 page = index / blocks;
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const u8* record = records + record_at(places, head, page);
    const bool is_outlier =
        channel < side.width && is_listed(record + side.channels, side.outliers, side.channel_bytes, channel);
    float sums[TOKENS];
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    for (int p = 0; p < (side.outliers ? 2 : 1); ++p) {
      const Part part = p == 0 ? Part{matrix, side.m, side.codes, side.norms, factor, false}
                               : Part{outlier_matrix, side.outlier_m, side.outlier_codes, side.outlier_norms,
                                      outlier_factor, true};
      const bool own = channel < side.width && part.outliers == is_outlier;
      const int units = (part.m + UnitPart<1>::ROWS - 1) / UnitPart<1>::ROWS;
      const u8* codes = record + part.codes + (i64)block * units * UnitPart<1>::BYTES;
      for (int start = 0; start < part.m; start += ROWS) {
        __syncthreads();
        for (int row = threadIdx.x; row < min(ROWS, part.m - start); row += THREADS) {
          const u8* unit = codes + (start + row) / UnitPart<1>::ROWS * UnitPart<1>::BYTES + row % 8;
          u32 word = 0;
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const u32 nibble = unit[8 * i] >> (row / 8 % 2 * 4);
#pragma unroll
            for (int b = 0; b < 4; ++b) word |= (nibble >> b & 1) << (8 * b + i);
          }
          signs[row] = word;
        }
        __syncthreads();
        if (!own) continue;
        for (int row = 0; row < min(ROWS, part.m - start); ++row) {
          const float number = part.matrix[(i64)(start + row) * side.width + channel];
          const u32 word = signs[row];
#pragma unroll
          for (int t = 0; t < TOKENS; ++t) sums[t] += word >> t & 1 ? number : -number;
        }
      }
      if (!own) continue;
      const u16* norms = reinterpret_cast<const u16*>(record + part.norms) + block * TOKENS;
      float* out = x + numbers_at(places, head, page * side.tokens + block * TOKENS) + channel;
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) out[t * places.x_token] = half_number(norms[t]) * part.factor * sums[t];
    }
  }
}
