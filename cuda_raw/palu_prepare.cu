// What attention over latents on tensor cores is prepared with: matrices as words of bytes, queries as pairs of
// bfloat16 numbers.
#include "palu_words.cuh"

// Rows of `matrix` (batch, heads * d, rank), in the order of channel_of, as the fragments that an mma takes as B, and
// what makes numbers of their codes: words (batch, heads, blocks, steps of 32 numbers, planes, 2, lanes, 4), and for
// each row its scale and that times the sum of its codes, scales (batch, heads, blocks, 32). A warp takes a row. Grid
// (heads * blocks * 32 / warps, batch).
template <int PLANES_OF_BYTES>
__global__ void __launch_bounds__(MMA_THREADS)
    pack_matrix(const float* __restrict__ matrix, u32* __restrict__ words, float2* __restrict__ scales, int rank,
                const __grid_constant__ Rebuild rebuild) {
  const int lane = threadIdx.x % LANES, place = blockIdx.x * MMA_WARPS + threadIdx.x / LANES;
  const int head = place / LANES / rebuild.blocks, block = place / LANES % rebuild.blocks, tile = place % LANES / 8;
  const int channel = channel_of(block, tile, place % 8, rebuild), steps = round_up(rank, LANES) / LANES;
  const i64 rows = (i64)rebuild.heads * rebuild.blocks * LANES, batch = blockIdx.y;
  const float* row = matrix + ((batch * rebuild.heads + head) * rebuild.d + max(channel, 0)) * rank;
  float largest = 0.f;
  if (channel != NO_CHANNEL)
    for (int k = lane; k < rank; k += LANES) largest = fmaxf(largest, fabsf(row[k]));
  largest = warp_max(largest);
  const float share = inverse(largest / LARGEST_CODE<PLANES_OF_BYTES>);
  u32* out = words + (batch * rows + place / LANES * LANES) * steps * (8 * PLANES_OF_BYTES);
  int sum = 0;
  for (int word = lane; word < 8 * steps; word += LANES) {
    int codes[4];
    u32 planes[PLANES_OF_BYTES];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int k = 4 * word + j;
      codes[j] = channel != NO_CHANNEL && k < rank ? __float2int_rn(row[k] * share) : 0;
      sum += codes[j];
    }
    bytes_of<PLANES_OF_BYTES>(planes, codes);
#pragma unroll
    for (int plane = 0; plane < PLANES_OF_BYTES; ++plane)
      out[((word / 8 * PLANES_OF_BYTES + plane) * 2 + tile / 2) * 128 + (place % 8 * 4 + word % 4) * 4 + tile % 2 * 2 +
          word % 8 / 4] = planes[plane];
  }
#pragma unroll
  for (int apart = 16; apart; apart >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, apart);
  if (lane == 0) {
    const float scale = largest / LARGEST_CODE<PLANES_OF_BYTES>;
    scales[batch * rows + place] = make_float2(scale, scale * (float)sum);
  }
}

// Queries q (b, heads, each, d) as the fragments that an mma takes as B, in the order of channel_of: fragments
// (b, heads, tiles of 8 queries, blocks, 2, lanes) of four words, two of the numbers as bfloat16 and two of what that
// leaves. Grid (heads * tiles * blocks * 2 / warps, b), `count` the numerator.
__global__ void __launch_bounds__(MMA_THREADS)
    split_queries(const float* __restrict__ q, uint4* __restrict__ fragments, int each, int count,
                  const __grid_constant__ Rebuild rebuild) {
  const int lane = threadIdx.x % LANES, g = lane / QUAD, t = lane % QUAD;
  const int place = blockIdx.x * MMA_WARPS + threadIdx.x / LANES, half = place % 2, block = place / 2 % rebuild.blocks;
  if (place >= count) return;
  const int tiles = (each + 7) / 8, query = place / 2 / rebuild.blocks % tiles * 8 + g;
  const i64 head = (i64)blockIdx.y * rebuild.heads + place / 2 / rebuild.blocks / tiles;
  float x[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int channel = channel_of(block, 2 * half + j / 2, 2 * t + j % 2, rebuild);
    x[j] = query < each && channel != NO_CHANNEL ? q[(head * each + query) * rebuild.d + channel] : 0.f;
  }
  uint4 out;
  split_pair(out.x, out.z, x[0], x[1]);
  split_pair(out.y, out.w, x[2], x[3]);
  fragments[((i64)blockIdx.y * count + place) * LANES + lane] = out;
}
