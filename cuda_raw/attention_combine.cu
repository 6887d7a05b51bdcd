// What comes before and after the splits of decode attention: queries as the kernels take them, and one result of all
// splits.
#include "attention.cuh"
#include "numbers.cuh"

// n numbers of a dtype times `unit`, in float32.
__global__ void prepare_queries(const void* __restrict__ q, float* __restrict__ out, float unit, i64 n, int dtype) {
  for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < n; at += (i64)gridDim.x * blockDim.x)
    out[at] = load_number(q, at, dtype) * unit;
}

constexpr int SKETCH_QUERIES = 8, SKETCH_ROWS = 64, SKETCH_CHANNELS = 256;

// Products out (n, width) of queries q (n, d) with a transposed projection, table (d, width). A thread has a row of the
// projection, a block SKETCH_QUERIES queries: grid (n / SKETCH_QUERIES, width / SKETCH_ROWS), rounded up.
__global__ void __launch_bounds__(SKETCH_ROWS)
    sketch_queries(const float* __restrict__ q, const float* __restrict__ table, float* __restrict__ out, i64 n, int d,
                   int width) {
  __shared__ __align__(16) float channels[SKETCH_CHANNELS][SKETCH_QUERIES];
  const i64 first = (i64)blockIdx.x * SKETCH_QUERIES;
  const int row = blockIdx.y * SKETCH_ROWS + threadIdx.x;
  float sums[SKETCH_QUERIES] = {};
  for (int from = 0; from < d; from += SKETCH_CHANNELS) {
    const int here = min(SKETCH_CHANNELS, d - from);
    __syncthreads();
    for (int at = threadIdx.x; at < SKETCH_QUERIES * here; at += SKETCH_ROWS) {
      const int query = at / here, c = at % here;
      channels[c][query] = first + query < n ? q[(first + query) * d + from + c] : 0.f;
    }
    __syncthreads();
    if (row >= width) continue;
#pragma unroll 8
    for (int c = 0; c < here; ++c) {
      const float number = table[(i64)(from + c) * width + row];
      const float4 low = *reinterpret_cast<const float4*>(channels[c]);
      const float4 high = *reinterpret_cast<const float4*>(channels[c] + 4);
      const float of[SKETCH_QUERIES] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int query = 0; query < SKETCH_QUERIES; ++query) sums[query] = fmaf(of[query], number, sums[query]);
    }
  }
  if (row >= width) return;
#pragma unroll
  for (int query = 0; query < SKETCH_QUERIES; ++query)
    if (first + query < n) out[(first + query) * width + row] = sums[query];
}

constexpr int MOST_SPLITS = 1024, COMBINE_THREADS = 128, COMBINE_WARPS = COMBINE_THREADS / 32;

// The splits that a row has, one after another, though each kind has places for as many as there can be.
struct RowSplits {
  int pages, sinks, window;

  __device__ RowSplits(const RowCounts& row, const Shapes& shapes)
      : pages(count(row.pages, shapes.page_splits, shapes.page_step)),
        sinks(count(row.sinks, shapes.sink_splits, shapes.exact_step)),
        window(count(row.window, window_splits(shapes), shapes.exact_step)) {}

  __device__ int size() const { return pages + sinks + window; }

  __device__ int place(int split, const Shapes& shapes) const {
    if (split < pages) return split;
    if (split < pages + sinks) return split - pages + shapes.page_splits;
    return split - pages - sinks + shapes.page_splits + shapes.sink_splits;
  }

 private:
  static __device__ int count(i64 n, int splits, int step) {
    if (n <= 0) return 0;
    const u32 run = run_length((int)n, splits, step);
    return (int)(((u32)n + run - 1) / run);
  }
};

__device__ __forceinline__ float block_max(float x, float* room) {
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  x = room[0];
  for (int warp = 1; warp < COMBINE_WARPS; ++warp) x = fmaxf(x, room[warp]);
  return x;
}

__device__ __forceinline__ float block_sum(float x, float* room) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  x = room[0];
  for (int warp = 1; warp < COMBINE_WARPS; ++warp) x += room[warp];
  return x;
}

// out (b, h, Q, dv) of a dtype; `logits` (hq) are learned logits that join the sums, one number when has_logits is 0.
// Grid (Q, h, b).
__global__ void __launch_bounds__(COMBINE_THREADS)
    combine_splits(const float* __restrict__ partial, const i64* __restrict__ counts,
                   const float* __restrict__ logits, void* __restrict__ out, int dtype, int has_logits,
                   const Shapes shapes) {
  __shared__ float shares[MOST_SPLITS];
  __shared__ int places[MOST_SPLITS];
  __shared__ float largest_room[COMBINE_WARPS], total_room[COMBINE_WARPS];
  const int query = blockIdx.x, head = blockIdx.y, row = blockIdx.z, dv = shapes.values.width;
  const RowSplits splits(row_counts(counts, row, shapes), shapes);
  const int size = splits.size();
  const float logit =
      has_logits ? LOG2_E * logits[head * shapes.ratio + query / shapes.s] : NEGATIVE_INFINITY;

  float largest = logit;
  for (int split = threadIdx.x; split < size; split += blockDim.x) {
    const int place = splits.place(split, shapes);
    places[split] = place;
    largest = fmaxf(largest, partial[partial_at(row, head, place, query, shapes) + dv]);
  }
  const float shift = softmax_shift(block_max(largest, largest_room));
  float total = threadIdx.x == 0 ? exp2f(logit - shift) : 0.f;
  for (int split = threadIdx.x; split < size; split += blockDim.x) {
    const float* from = partial + partial_at(row, head, places[split], query, shapes) + dv;
    shares[split] = exp2f(from[0] - shift);
    total = fmaf(shares[split], from[1], total);
  }
  total = block_sum(total, total_room);
  const float share = total > 0.f ? 1.f / total : 1.f;
  const i64 at = (((i64)row * shapes.h + head) * shapes.queries + query) * dv;
  for (int channel = threadIdx.x; channel < dv; channel += blockDim.x) {
    float sum = 0.f;
    for (int split = 0; split < size; ++split)
      sum = fmaf(shares[split], partial[partial_at(row, head, places[split], query, shapes) + channel], sum);
    store_number(out, at + channel, dtype, sum * share);
  }
}
