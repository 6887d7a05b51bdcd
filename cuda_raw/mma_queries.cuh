// The query rows of a block as they come.
#include "attention.cuh"

struct Queries {
  const float *q, *sketched;  // of the block's first row
  int rows;

  // A number of a row of `of`, 0 beyond what there is.
  __device__ __forceinline__ float number(const float* of, int row, int at, int width) const {
    return row < rows && at < width ? of[(i64)row * width + at] : 0.f;
  }

  // The largest size of a row's numbers. By a warp.
  __device__ __forceinline__ float largest(const float* of, int row, int width) const {
    float largest = 0.f;
    for (int at = threadIdx.x % 32; at < width; at += 32) largest = fmaxf(largest, fabsf(number(of, row, at, width)));
    return warp_max(largest);
  }
};

// What a warp's lane scores with.
struct Scoring {
  const float* q;                      // the lane's query row
  const float *table, *outlier_table;  // S^T of the two parts of sketched keys with outlier channels
  const Shapes& shapes;
  int lane, g, t;  // lane = 4 * g + t
};

// What turns products with a query row's coefficients into those with the query.
struct QueryRow {
  float unscale;
  float sum;  // of the coefficients, where keys are signs
};
