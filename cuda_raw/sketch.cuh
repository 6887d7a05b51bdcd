// Products of a tile of vectors with the rows of a projection, summed in the order of the channels as on all engines.
//
// A tile is 32 tokens of one page by 8 rows for each eight threads of a block. Thread (i, oct) has the tokens i, 8 + i,
// 16 + i and 24 + i and the rows 8 oct .. 8 oct + 7: its share of a unit of signs (units.cuh).
#include "pages.cuh"

constexpr int TILE_TOKENS = 32;
// Most rows of a tile, and channels that are in shared memory at a time.
constexpr int TILE_ROWS = 256, DEPTH = 16;
// Floats between channels of a tile of tokens: float4s of eight neighbours lie in different banks.
constexpr int TOKEN_PITCH = TILE_TOKENS + 4;

// Which channels of a vector are projected.
constexpr int ALL_CHANNELS = 0, ALL_BUT_LISTED = 1, LISTED = 2;

// The fields of SKETCH in qjl.py, in their order.
struct Sketch {
  i64 tokens;               // of a head
  int page, pages, tiles;   // tokens that share outlier channels, pages of a head, tiles of a page
  int row_tiles;            // tiles of rows
  int width, m, pitch;      // channels, rows, and rows with the padding of the matrix
  int outliers, part;       // listed channels of a page, and which channels to take
  int codes, norms, units;  // of pages: where signs and norms are, and units of a block of tokens
};

struct Tile {
  float sums[4][OCT];
  float squares[4];  // of the first warp alone
  i64 page, start;   // of which page the tile is, and its first token
  int block;         // the tile's place among those of its page
  int row;           // the first of this thread's eight
  int count;         // tokens of the tile

  // Whether this thread is to write a norm: that of token threadIdx.x of the tile.
  __device__ __forceinline__ bool has_norm() const { return row < TILE_TOKENS && threadIdx.x < count; }
  __device__ __forceinline__ float square() const {
    const int t = threadIdx.x / 8;
    return t == 0 ? squares[0] : t == 1 ? squares[1] : t == 2 ? squares[2] : squares[3];
  }
};

// `columns` is the transposed projection (width, pitch), 0 from row m on; `channels` (heads, pages, outliers) ascend.
__device__ __forceinline__ Tile multiply_tile(const void* x, const float* columns, const i64* channels,
                                              const Places& places, const Sketch& sketch, int head) {
  __shared__ __align__(16) float numbers[DEPTH][TOKEN_PITCH];
  __shared__ __align__(16) float rows[DEPTH][TILE_ROWS];
  const int i = threadIdx.x % 8, oct = threadIdx.x / 8;
  const u32 index = blockIdx.x / sketch.row_tiles;
  Tile tile;
  tile.page = index / sketch.tiles;
  tile.block = index % sketch.tiles;
  const int first_row = blockIdx.x % sketch.row_tiles * blockDim.x;
  tile.row = first_row + oct * OCT;
  const i64 start = tile.page * sketch.page + tile.block * TILE_TOKENS;
  const i64 page_end = (tile.page + 1) * sketch.page, end = min(page_end, sketch.tokens);
  tile.start = start;
  tile.count = (int)min((i64)TILE_TOKENS, end - start);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    tile.squares[t] = 0.f;
#pragma unroll
    for (int j = 0; j < OCT; ++j) tile.sums[t][j] = 0.f;
  }
  const i64* listed = channels + (head * (i64)sketch.pages + tile.page) * sketch.outliers;
  const int depth = sketch.part == LISTED ? sketch.outliers : sketch.width;
  int next = 0;  // of the listed channels, when they are left out
  for (int first = 0; first < depth; first += DEPTH) {
    u32 left_out = 0;
    if (sketch.part == ALL_BUT_LISTED)
      for (; next < sketch.outliers && listed[next] < first + DEPTH; ++next)
        left_out |= 1u << (int)(listed[next] - first);
    __syncthreads();
    for (int e = threadIdx.x; e < TILE_TOKENS * DEPTH / OCT; e += blockDim.x) {
      const int token = e / (DEPTH / OCT), place = e % (DEPTH / OCT) * OCT;
      float values[OCT];
#pragma unroll
      for (float& value : values) value = 0.f;
      if (start + token < end) {
        const i64 at = numbers_at(places, head, start + token);
        if (sketch.part == LISTED) {
          for (int j = 0; j < OCT && first + place + j < depth; ++j)
            values[j] = load_number(x, at + listed[first + place + j], places.dtype);
        } else {
          const int count = channels_of(first + place, depth);
          if (count) load_oct(x, at + first + place, places.dtype, count, places.aligned, values);
#pragma unroll
          for (int j = 0; j < OCT; ++j)
            if (j >= count || left_out >> (place + j) & 1) values[j] = 0.f;
        }
      }
#pragma unroll
      for (int j = 0; j < OCT; ++j) numbers[place + j][token % 8 * 4 + token / 8] = values[j];
    }
    // A thread fills a place of four rows for each fourth channel.
    const int quads = blockDim.x / 4, quad = threadIdx.x % quads;
    for (int k = threadIdx.x / quads; k < DEPTH; k += 4) {
      float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
      if (first + k < depth) {
        const i64 channel = sketch.part == LISTED ? listed[first + k] : first + k;
        four = *reinterpret_cast<const float4*>(columns + channel * sketch.pitch + first_row + 4 * quad);
      }
      *reinterpret_cast<float4*>(&rows[k][4 * quad]) = four;
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < DEPTH; ++k) {
      const float4 four = *reinterpret_cast<const float4*>(&numbers[k][4 * i]);
      const float4 low = *reinterpret_cast<const float4*>(&rows[k][OCT * oct]);
      const float4 high = *reinterpret_cast<const float4*>(&rows[k][OCT * oct + 4]);
      const float values[4] = {four.x, four.y, four.z, four.w};
      const float weights[OCT] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int j = 0; j < OCT; ++j)
          tile.sums[t][j] = add_exact(tile.sums[t][j], mul_exact(values[t], weights[j]));
      if (threadIdx.x < 32)
#pragma unroll
        for (int t = 0; t < 4; ++t) tile.squares[t] = add_exact(tile.squares[t], mul_exact(values[t], values[t]));
    }
  }
  return tile;
}
