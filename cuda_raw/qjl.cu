// Signs of projected vectors and their norms. Blocks have a thread for each row of a tile (sketch.cuh); the grid is
// (row tiles * tiles of a head, heads).
#include "sketch.cuh"

// float16 bits of the norm of a vector, at most 65504; counts those that were above.
__device__ __forceinline__ u16 round_norm(float square, u32* saturated) {
  const float norm = __fsqrt_rn(square);
  if (norm != norm) return HALF_NAN;
  if (norm > LARGEST_HALF) atomicAdd(saturated, 1u);
  return half_bits(fminf(norm, LARGEST_HALF));
}

__global__ void round_norms(const float* squares, u16* norms, u32* saturated, const i64 count) {
  const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) norms[at] = round_norm(squares[at], saturated);
}

// To pages: the signs as units of 1-bit codes.
__global__ void __launch_bounds__(TILE_ROWS, 2)
    sketch_pages(const void* x, const float* columns, const i64* channels, u8* records, u32* saturated,
                 const Places places, const Sketch sketch) {
  const int i = threadIdx.x % 8;
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const Tile tile = multiply_tile(x, columns, channels, places, sketch, head);
    UnitPart<1> unit;
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int j = 0; j < OCT; ++j)
        unit.put(j, t, ROUNDER_BITS + (tile.row + j < sketch.m && is_positive(tile.sums[t][j])));
    u8* record = records + record_at(places, head, tile.page);
    const int place = tile.block * sketch.units + tile.row / UnitPart<1>::ROWS;
    unit.store(record + sketch.codes + (i64)place * UnitPart<1>::BYTES, i, tile.row / OCT % 2,
               tile.row < sketch.units * UnitPart<1>::ROWS);
    if (tile.has_norm())
      reinterpret_cast<u16*>(record + sketch.norms)[tile.block * TILE_TOKENS + threadIdx.x] =
          round_norm(tile.square(), saturated);
  }
}

// To arrays: signs (heads, tokens, ceil(m/8)), norms (heads, tokens).
__global__ void __launch_bounds__(TILE_ROWS, 2)
    sketch_vectors(const void* x, const float* columns, const i64* channels, u8* signs, u16* norms, u32* saturated,
                   const Places places, const Sketch sketch) {
  const int bytes = (sketch.m + 7) / 8;
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const Tile tile = multiply_tile(x, columns, channels, places, sketch, head);
    const i64 first = head * sketch.tokens + tile.start;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int token = 8 * t + threadIdx.x % 8;
      if (token >= tile.count || tile.row >= sketch.m) continue;
      u32 byte = 0;
#pragma unroll
      for (int j = 0; j < OCT; ++j) byte |= (u32)(tile.row + j < sketch.m && is_positive(tile.sums[t][j])) << j;
      signs[(first + token) * bytes + tile.row / 8] = byte;
    }
    if (tile.has_norm()) norms[first + threadIdx.x] = round_norm(tile.square(), saturated);
  }
}

// The products themselves: (heads, tokens, m).
__global__ void __launch_bounds__(TILE_ROWS, 2)
    project_vectors(const void* x, const float* columns, const i64* channels, float* products, const Places places,
                    const Sketch sketch) {
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const Tile tile = multiply_tile(x, columns, channels, places, sketch, head);
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int token = 8 * t + threadIdx.x % 8;
      if (token >= tile.count) continue;
      float* to = products + (head * sketch.tokens + tile.start + token) * sketch.m + tile.row;
#pragma unroll
      for (int j = 0; j < OCT; ++j)
        if (tile.row + j < sketch.m) to[j] = tile.sums[t][j];
    }
  }
}
