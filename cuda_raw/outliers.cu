// Outlier channels: those of largest norm over the tokens of a page, and keys split into them and the rest.
#include "pages.cuh"

constexpr int THREADS = 128;
// Tokens whose numbers a thread asks for before it adds the first one.
constexpr int AHEAD = 16;

// Sums of squares (heads, pages, width) over the tokens of each page, in their order. Grid (pages * blocks of channels,
// heads): a thread has one channel.
__global__ void __launch_bounds__(THREADS)
    sum_squares(const void* x, float* squares, const Places places, const i64 tokens, const int page, const int pages,
                const int width) {
  const int blocks = (width + THREADS - 1) / THREADS;
  const i64 index = blockIdx.x / blocks;
  const int channel = blockIdx.x % blocks * THREADS + threadIdx.x;
  if (channel >= width) return;
  const i64 first = index * page, end = min(first + page, tokens);
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    float sum = 0.f;
    for (i64 token = first; token < end; token += AHEAD) {
      float numbers[AHEAD];
#pragma unroll
      for (int t = 0; t < AHEAD; ++t) {
        const i64 at = numbers_at(places, head, min(token + t, end - 1)) + channel;
        numbers[t] = load_number(x, at, places.dtype);
      }
#pragma unroll
      for (int t = 0; t < AHEAD; ++t)
        if (token + t < end) sum = add_exact(sum, mul_exact(numbers[t], numbers[t]));
    }
    squares[(head * (i64)pages + index) * width + channel] = sum;
  }
}

// Sums of squares in their order; NaN counts as infinite.
__device__ __forceinline__ u32 size_of(float square) {
  return ordered(square != square ? -NEGATIVE_INFINITY : square);
}

// Increasing indices (rows, outliers) of the largest of `squares` (rows, width), ties to the lowest. A block has a row:
// a channel is chosen when fewer than `outliers` go before it, and comes after the chosen ones below it.
__global__ void __launch_bounds__(THREADS)
    largest_channels(const float* squares, i64* chosen, const int width, const int outliers) {
  __shared__ u32 sizes[THREADS];
  __shared__ int chosen_of_warp[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* row = squares + (i64)blockIdx.x * width;
  i64* out = chosen + (i64)blockIdx.x * outliers;
  int before = 0;  // chosen channels of earlier turns
  for (int first = 0; first < width; first += THREADS) {
    const int channel = first + threadIdx.x;
    const u32 own = channel < width ? size_of(row[channel]) : 0;
    int rank = 0;
    for (int start = 0; start < width; start += THREADS) {
      __syncthreads();
      if (start + threadIdx.x < width) sizes[threadIdx.x] = size_of(row[start + threadIdx.x]);
      __syncthreads();
      const int count = min(THREADS, width - start);
      for (int j = 0; j < count; ++j) rank += sizes[j] > own || (sizes[j] == own && start + j < channel);
    }
    const bool is_chosen = channel < width && rank < outliers;
    const u32 votes = __ballot_sync(ALL_LANES, is_chosen);
    if (lane == 0) chosen_of_warp[warp] = __popc(votes);
    __syncthreads();
    int place = before + __popc(votes & ((1u << lane) - 1));
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
      if (w < warp) place += chosen_of_warp[w];
      before += chosen_of_warp[w];
    }
    if (is_chosen) out[place] = channel;
  }
}

// Number `from` of x, as a bit pattern, is number `to` of one of two arrays, and zero in the other.
template <class Word>
__device__ __forceinline__ void split_number(const void* x, i64 from, void* inner, void* outer, i64 to,
                                             bool is_outlier) {
  const Word number = static_cast<const Word*>(x)[from];
  static_cast<Word*>(inner)[to] = is_outlier ? 0 : number;
  static_cast<Word*>(outer)[to] = is_outlier ? number : 0;
}

// The keys without their listed channels, and these alone: inner and outer (heads, tokens, width), of x's dtype.
// `channels` are (heads, pages, outliers). Grid (blocks of a head's numbers, heads).
__global__ void __launch_bounds__(THREADS)
    split_outliers(const void* x, const i64* channels, void* inner, void* outer, const Places places, const i64 tokens,
                   const int page, const int pages, const int width, const int outliers) {
  const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x, token = at / width;
  const int channel = at % width;
  if (token >= tokens) return;
  for (int head = blockIdx.y; head < places.rows * places.heads; head += gridDim.y) {
    const i64* listed = channels + (head * (i64)pages + token / page) * outliers;
    bool is_outlier = false;
    for (int o = 0; o < outliers; ++o) is_outlier |= listed[o] == channel;
    const i64 from = numbers_at(places, head, token) + channel, to = head * tokens * width + at;
    if (places.dtype == FLOAT32)
      split_number<u32>(x, from, inner, outer, to, is_outlier);
    else
      split_number<u16>(x, from, inner, outer, to, is_outlier);
  }
}
