// Mixes of 32 tokens' values on tensor cores, values being integers with a scale and a zero for each group of a token's
// channels.
#include "attention.cuh"
#include "mma_coefficients.cuh"
#include "mma_team.cuh"

// Values of BLOCKS blocks of 32 channels, the last maybe not full, on pages of 32 * TILES tokens. Groups are of whole
// blocks (WHOLE), or only of whole planes, which takes twice the steps and four times the coefficients.
template <int BITS, int BLOCKS, bool WHOLE, int TILES>
struct IntValues {
  // What has a scale of its own in shared memory, a part: a block or a plane.
  static constexpr int PARTS = WHOLE ? BLOCKS : PLANES * BLOCKS, PART_CHANNELS = WHOLE ? CHUNK : 8;
  static constexpr int CODE_BYTES = BLOCKS * Chunk<BITS>::BYTES, PART_BYTES = 2 * CHUNK;
  // In shared memory: codes, then scales (part, token), then zeros.
  static constexpr int TILE_BYTES = CODE_BYTES + 2 * PARTS * PART_BYTES;
  static constexpr int ZERO_OPERANDS = (PARTS + 7) / 8;
  static constexpr int MIX_FLOATS = CHUNK * BLOCKS + 8 * ZERO_OPERANDS;  // of a query row: see store()

  // 2^16 / parts of a group, rounded up, so that the group of a part is found without a division.
  static __device__ __forceinline__ u32 group_reciprocal(const SideSpec& values) {
    const u32 parts = (values.group + PART_CHANNELS - 1) / PART_CHANNELS;
    return (65536 + parts - 1) / parts;
  }

  template <class Team>
  static __device__ __forceinline__ void copy_tile(u8* to, const u8* side, int tile, u32 reciprocal,
                                                   const SideSpec& values) {
    constexpr int A_BLOCK = Chunk<BITS>::GRANULES, A_PART = PART_BYTES / GRANULE;
    const u8* codes = side + tile * Chunk<BITS>::BYTES;  // codes come first
    Team::template each<BLOCKS * A_BLOCK>(BLOCKS * A_BLOCK, [&](int x, int first) {
      const int block = (x + first) / A_BLOCK * (TILES - 1) * A_BLOCK;  // granules of other tiles in blocks before
      copy_async_16(to + GRANULE * Chunk<BITS>::swizzle(x, first), codes + GRANULE * (block + x + first));
    });
    const u8* scale = side + values.scale + tile * PART_BYTES;
    Team::template each<2 * PARTS * A_PART>(2 * PARTS * A_PART, [&](int x, int first) {
      const u32 part = (x + first) / A_PART, zeros = part >= PARTS;
      const u32 group = min((part - zeros * PARTS) * reciprocal >> 16, values.groups - 1u) + zeros * values.groups;
      copy_async_16(to + CODE_BYTES + GRANULE * (x + first),
                    scale + group * TILES * PART_BYTES + GRANULE * (x % A_PART));
    });
  }

  // The largest headroom, at most that given, that leaves weights times a tile's scales below 2^16.
  static __device__ __forceinline__ int headroom(int before, const u8* tile, int lane) {
    constexpr int WORDS = PARTS * PART_BYTES / 4;
    if (!any_above<WORDS>(tile + CODE_BYTES, slack_below(TOP_EXPONENT - before), lane)) return before;
    return TOP_EXPONENT - exponent_above_1(largest_half(tile + CODE_BYTES, WORDS, lane));
  }

  // What a warp has mixed, in the columns of an operand of query rows.
  struct Mix {
    float sums[BLOCKS][2][4];          // of code * coefficient: planes and exponents as the codes have them
    float zeros[ZERO_OPERANDS][2][4];  // of zero * weight: see Coefficients::multiply_all()
  };

  // Columns 2 * t and 2 * t + 1 times `even` and `odd`.
  static __device__ __forceinline__ void rescale(Mix& mix, float even, float odd) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) mix.sums[block][j][r] *= r % 2 ? odd : even;
#pragma unroll
        for (int i = 0; i < ZERO_OPERANDS; ++i) mix.zeros[i][j][r] *= r % 2 ? odd : even;
      }
  }

  // Adds the tile's values by their weights.
  template <Rest REST>
  static __device__ __forceinline__ void add(Mix& mix, const Coefficients<REST>& weights, const u8* tile, int lane) {
    const int g = lane / QUAD;
    const u8* scale = tile + CODE_BYTES + GRANULE * (lane % QUAD);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      u32 words[Chunk<BITS>::VECTORS][2], a[2][2][4];
      Chunk<BITS>::load(words, tile + block * Chunk<BITS>::BYTES, lane);
      Chunk<BITS>::operands(a, words, lane);
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        if (WHOLE && plane > 0) break;
        const Operands<REST> b = weights.times(load_16(scale + (WHOLE ? block : PLANES * block + plane) * PART_BYTES));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (WHOLE) {
            b.multiply(mix.sums[block][0], a[half][0], half);
            b.multiply(mix.sums[block][1], a[half][1], half);
          } else {
            // The rows of the other plane are zeros.
            const u32* both = a[half][plane / 2];
            const u32 one[4] = {plane % 2 ? 0 : both[0], plane % 2 ? both[1] : 0, plane % 2 ? 0 : both[2],
                                plane % 2 ? both[3] : 0};
            b.multiply(mix.sums[block][plane / 2], one, half);
          }
        }
      }
    }
    const u8* zero = scale + (PARTS + g) * PART_BYTES;
#pragma unroll
    for (int i = 0; i < ZERO_OPERANDS; ++i)
      weights.multiply_all(mix.zeros[i][0], mix.zeros[i][1],
                           8 * i + g < PARTS ? load_16(zero + 8 * i * PART_BYTES) : make_uint4(0, 0, 0, 0));
  }

  // The mix in float32: `out` (rows, pitch), channels, then the sums of zeros of parts.
  template <Rest REST>
  static __device__ __forceinline__ void store(float* out, int pitch, const Mix& mix, int lane) {
    const int g = lane / QUAD, t = lane % QUAD;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = 2 * t + odd;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
          store_sum<REST>(out, pitch, column, CHUNK * block + 8 * plane + g,
                          mix.sums[block][plane / 2][2 * (plane % 2) + odd] *
                              power_of_2(CODE_EXPONENT - Chunk<BITS>::plane_shift(plane)));
#pragma unroll
      for (int i = 0; i < ZERO_OPERANDS; ++i)
        store_sum<REST>(out, pitch, column, CHUNK * BLOCKS + 8 * i + g,
                        mix.zeros[i][0][odd] + mix.zeros[i][1][2 + odd]);
    }
  }

  // A channel of what store() wrote of a query row.
  static __device__ __forceinline__ float mixed(const float* row, int channel) {
    return row[channel] + row[CHUNK * BLOCKS + channel / PART_CHANNELS];
  }

 private:
  // The two columns of a query row are added, where there are two.
  template <Rest REST>
  static __device__ __forceinline__ void store_sum(float* out, int pitch, int column, int at, float sum) {
    if (REST == BY_COLUMN) sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    if (column < Coefficients<REST>::ROWS) out[column * pitch + at] = sum;
  }
};
