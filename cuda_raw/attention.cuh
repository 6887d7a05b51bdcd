// What the kernels of decode attention share: the sizes that they are given, which tokens a query sees, and where the
// result of a split of the tokens goes.
//
// Queries of a (row, key/value head) are one matrix of Q = ratio * s rows: row r is query r % s of head
// `head * ratio + r / s`. They are float32 in units of log2 (of the soft cap where there is one). Tokens are split over
// blocks, grid (splits * query tiles, heads, rows): each page kernel writes its splits of
//
//   partial (b, h, splits, Q, dv + 2) float32: the mix, not normalized, then the largest score and the sum of weights
//
// splits 0 .. page_splits - 1 are of pages, then come `sink_splits` and the window's. These are how many there are at
// most: each row's tokens are cut by their own counts, which are read on the device, so that a launch stays right when
// they change. A split beyond a row's tokens is neither written nor read. The signature of a page kernel, whatever it
// computes with:
//
//   template <class Key, class Value, ...>
//   __global__ void attend_pages_...(
//       const float* q,              // (b, h, Q, d)
//       const float* sketched,       // (b, h, Q, sketch_width): S q of sketched keys; else one number
//       const float* table,          // (d, sketch_width): S^T of sketched keys with outliers; else one number
//       const float* outlier_table,  // (d, outlier_width): that of the outlier channels; else one number
//       const u8* pages,             // (b, h, capacity, record_bytes)
//       const i64* counts,           // (4, b): pages, sinks, where the window starts, tokens of the window
//       const i64* limits,           // (b, s), or one number when has_limits is 0: causal
//       const float* bias,           // (b, bias_heads, s, bias_tokens), or one number when bias_heads is 0: none
//       float* partial, const Shapes shapes)
#include "side.cuh"

// The fields of SHAPES in attention.py, in their order.
struct Shapes {
  i64 capacity, record_bytes, bias_tokens, sink_room, window_room;
  int b, h, s, ratio, queries;
  int splits, page_splits, page_step, sink_splits, exact_step;  // runs are multiples of so many pages, or tokens
  int has_limits, bias_heads, sketch_width, outlier_width;
  float cap;                     // the soft cap in units of log2; 0: none
  float factor, outlier_factor;  // c / m of the projections
  SideSpec keys, values;
};

__device__ __forceinline__ int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

struct RowCounts {
  i64 pages, sinks, window_start, window;
};

__device__ __forceinline__ RowCounts row_counts(const i64* counts, int row, const Shapes& shapes) {
  return {counts[row], counts[shapes.b + row], counts[2 * shapes.b + row], counts[3 * shapes.b + row]};
}

__device__ __forceinline__ i64 row_tokens(const RowCounts& row, const Shapes& shapes) {
  return row.sinks + row.pages * shapes.keys.tokens + row.window;
}

// How long runs are that n pages, or tokens, of a row are cut into: at most `splits` equal ones, multiples of `step`. A
// row has less than 2^31 of either.
__device__ __forceinline__ int run_length(int n, int splits, int step) {
  const u32 steps = ((u32)n + step - 1) / step;
  return (int)((steps + splits - 1) / splits) * step;
}

// A split's run, `count` pages or tokens from `first` on; none where that is 0.
struct Cut {
  int first, count;
};

__device__ __forceinline__ Cut cut_of(i64 held, int split, int splits, int step) {
  const int n = (int)held, run = run_length(n, splits, step), first = split * run;
  return {first, max(min(run, n - first), 0)};
}

__device__ __forceinline__ Cut page_cut(const RowCounts& row, int split, const Shapes& shapes) {
  return cut_of(row.pages, split, shapes.page_splits, shapes.page_step);
}

__device__ __forceinline__ int window_splits(const Shapes& shapes) {
  return shapes.splits - shapes.page_splits - shapes.sink_splits;
}

// The run of split `split` of the exact tokens, those of the sinks first.
__device__ __forceinline__ Cut exact_cut(const RowCounts& row, int split, const Shapes& shapes) {
  if (split < shapes.sink_splits) return cut_of(row.sinks, split, shapes.sink_splits, shapes.exact_step);
  return cut_of(row.window, split - shapes.sink_splits, window_splits(shapes), shapes.exact_step);
}

// How many of a row's tokens query r of Q sees.
__device__ __forceinline__ i64 tokens_seen(const i64* limits, const RowCounts& counts, int row, int query,
                                           const Shapes& shapes) {
  const int i = query % shapes.s;
  if (shapes.has_limits) return limits[(i64)row * shapes.s + i];
  return row_tokens(counts, shapes) + i + 1 - shapes.s;
}

// What is added to the scores of query r of Q, by position; null when there is no bias.
__device__ __forceinline__ const float* bias_of(const float* bias, int row, int head, int query, const Shapes& shapes) {
  if (!shapes.bias_heads) return nullptr;
  const int query_head = shapes.bias_heads == 1 ? 0 : head * shapes.ratio + query / shapes.s;
  return bias + (((i64)row * shapes.bias_heads + query_head) * shapes.s + query % shapes.s) * shapes.bias_tokens;
}

// Below this a mask's numbers are as good as -infinity; unlike that they do not hide, and times log2(e) they are finite.
constexpr float LOWEST_BIAS = -2.3e38f;

// A product of query and key as a score in units of log2, -infinity where the query does not see the token.
__device__ __forceinline__ float finish_score(float product, i64 position, i64 seen, const float* bias, float cap) {
  if (position >= seen) return NEGATIVE_INFINITY;
  const float score = cap > 0.f ? cap * tanhf(product) : product;
  if (bias == nullptr) return score;
  const float added = bias[position];
  return added > NEGATIVE_INFINITY ? fmaf(fmaxf(added, LOWEST_BIAS), LOG2_E, score) : NEGATIVE_INFINITY;
}

// What scores are taken relative to: their largest, or 0 where there is none to speak of.
__device__ __forceinline__ float softmax_shift(float largest) {
  return largest > NEGATIVE_INFINITY && largest <= LARGEST_FLOAT ? largest : 0.f;
}

// Where the dv + 2 numbers of a query of a split are.
__device__ __forceinline__ i64 partial_at(int row, int head, int split, int query, const Shapes& shapes) {
  const i64 place = ((i64)row * shapes.h + head) * shapes.splits + split;
  return (place * shapes.queries + query) * (shapes.values.width + 2);
}
