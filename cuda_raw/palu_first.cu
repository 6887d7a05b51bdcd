// True first tokens of each row join what attention over the latents of the others gave.
#include "palu.cuh"

// The fields of FIRST in palu_plan.py, in their order.
struct FirstTokens {
  int room, d, dv;  // keys (b, heads, room, d), values (b, heads, room, dv)
  int heads;
  int key_dtype, value_dtype, out_dtype;
};

constexpr int FIRST_THREADS = 128, FIRST_WARPS = FIRST_THREADS / LANES;

// `mixed` (b, hq, s, dv) is normalized by the sums of `partial`, which all splits have; q (b, hq, s, d) is in units of
// log2. Grid (Q, rows), shared memory for `room` numbers.
__global__ void __launch_bounds__(FIRST_THREADS, 8)
    join_first(const float* __restrict__ mixed, const float* __restrict__ partial, const float* __restrict__ q,
               const u8* __restrict__ first_k, const u8* __restrict__ first_v, const i64* __restrict__ counts,
               const i64* __restrict__ skip, const i64* __restrict__ limits, const float* __restrict__ bias,
               void* __restrict__ out, const Shapes shapes, const FirstTokens first) {
  extern __shared__ float weights[];
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, column = blockIdx.x, row = blockIdx.y;
  const RowCounts held = row_counts(counts, row, shapes);
  const int count = (int)min(skip[row], row_tokens(held, shapes));
  const int head = column / (shapes.queries / first.heads);
  const i64 token = ((i64)row * first.heads + head) * first.room, query = (i64)row * shapes.queries + column;
  for (int t = warp; t < count; t += FIRST_WARPS) {
    float sum = 0.f;
    for (int c = lane; c < first.d; c += LANES)
      sum = fmaf(q[query * first.d + c], load_number(first_k, (token + t) * first.d + c, first.key_dtype), sum);
    sum = warp_sum(sum);
    if (lane == 0)
      weights[t] = finish_score(sum, t, tokens_seen(limits, held, row, column, shapes),
                                bias_of(bias, row, 0, column, shapes), shapes.cap);
  }
  __syncthreads();

  // Every thread for itself: there are few splits and fewer first tokens.
  const float* split = partial + partial_at(row, 0, 0, column, shapes) + shapes.values.width;
  const i64 step = (i64)shapes.queries * (shapes.values.width + 2);
  float largest = NEGATIVE_INFINITY, own = 0.f, total = 0.f;
  for (int i = 0; i < shapes.splits; ++i) largest = fmaxf(largest, split[i * step]);
  for (int t = 0; t < count; ++t) largest = fmaxf(largest, weights[t]);
  const float shift = softmax_shift(largest);
  for (int i = 0; i < shapes.splits; ++i) own = fmaf(exp2f(split[i * step] - shift), split[i * step + 1], own);
  for (int t = 0; t < count; ++t) total += exp2f(weights[t] - shift);
  total += own;
  const float share = total > 0.f ? 1.f / total : 1.f;
  for (int c = threadIdx.x; c < first.dv; c += FIRST_THREADS) {
    float sum = own * mixed[query * first.dv + c];
    for (int t = 0; t < count; ++t)
      sum = fmaf(exp2f(weights[t] - shift), load_number(first_v, (token + t) * first.dv + c, first.value_dtype), sum);
    store_number(out, query * first.dv + c, first.out_dtype, sum * share);
  }
}
