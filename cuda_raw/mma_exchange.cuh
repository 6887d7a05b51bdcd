// Sums of tensor cores on their way from the lanes that have them to those that go on with them, in shared memory.
#include "mma_coefficients.cuh"

// Of one operand of query rows and 32 tokens, a warp's own.
struct __align__(16) Exchange {
  static constexpr int PITCH = CHUNK + 4;  // neither way do two lanes meet in a bank
  float sum[COLUMNS][PITCH], offset[COLUMNS];

  // Sums of lane 4 * g + t: of tokens 8 * b + g, b = 0..3, in columns 2 * t and 2 * t + 1; and what all tokens
  // share, `even` and `odd`.
  __device__ __forceinline__ void put(const float (*sums)[4], float even, float odd, int lane) {
    const int g = lane / QUAD, t = lane % QUAD;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[2 * t + r % 2][8 * (2 * j + r / 2) + g] = sums[j][r];
    if (g == 0) {
      offset[2 * t] = even;
      offset[2 * t + 1] = odd;
    }
  }

  // Sums of lane 4 * g + t: of tokens 4 * g + 2 * j and 4 * g + 2 * j + 1.
  __device__ __forceinline__ void put_quads(const float (*sums)[4], int lane) {
    const int g = lane / QUAD, t = lane % QUAD;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
      *reinterpret_cast<float4*>(sum[2 * t + odd] + 4 * g) =
          make_float4(sums[0][odd], sums[0][2 + odd], sums[1][odd], sums[1][2 + odd]);
  }

  // Those of tokens 8 * t .. 8 * t + 7 in a column.
  __device__ __forceinline__ void get(float* out, int column, int t) const {
    const float4* from = reinterpret_cast<const float4*>(sum[column] + 8 * t);
    const float4 low = from[0], high = from[1];
    out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
    out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
  }
};
