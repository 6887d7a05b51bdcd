// Walsh-Hadamard transform of blocks of a power of two numbers, butterflies in the order of the reference.
#include "numbers.cuh"
#include "ptx.cuh"

constexpr int MOST_THREADS = 1024;

// Sum and difference of places apart: this thread's number becomes the one that its place has.
__device__ __forceinline__ float butterfly(float own, float other, bool second) {
  return second ? add_exact(other, -own) : add_exact(own, other);
}

// Blocks of up to eight times the block's threads: a thread has eight neighbours. Distances below 8 are in registers,
// below 256 in the warp, and larger ones go through shared memory, `threads` floats for each of the eight.
__global__ void __launch_bounds__(MOST_THREADS)
    transform_blocks(const void* x, const int dtype, void* y, const int out_dtype, const i64 size, const int block,
                     const float scale, const int aligned) {
  extern __shared__ float shared[];
  const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * OCT;
  const int count = (int)min(max(size - at, (i64)0), (i64)OCT);
  float numbers[OCT] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
  if (count) load_oct(x, at, dtype, count, aligned, numbers);
#pragma unroll
  for (int apart = 1; apart < OCT; apart *= 2) {
    if (block <= apart) break;
#pragma unroll
    for (int j = 0; j < OCT; ++j)
      if (!(j & apart)) {
        const float first = numbers[j], second = numbers[j + apart];
        numbers[j] = butterfly(first, second, false), numbers[j + apart] = butterfly(second, first, true);
      }
  }
  for (int apart = 1; apart < 32 && block > OCT * apart; apart *= 2)
#pragma unroll
    for (float& number : numbers)
      number = butterfly(number, __shfl_xor_sync(ALL_LANES, number, apart), threadIdx.x & apart);
  for (int apart = 32; block > OCT * apart; apart *= 2) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OCT; ++j) shared[j * blockDim.x + threadIdx.x] = numbers[j];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OCT; ++j)
      numbers[j] = butterfly(numbers[j], shared[j * blockDim.x + (threadIdx.x ^ apart)], threadIdx.x & apart);
  }
#pragma unroll
  for (float& number : numbers) number = mul_exact(number, scale);
  if (count) store_oct(y, at, out_dtype, count, aligned, numbers);
}

// One round of larger blocks: numbers `apart` apart.
__global__ void __launch_bounds__(MOST_THREADS)
    transform_round(const float* x, void* y, const int dtype, const i64 size, const i64 apart, const float scale) {
  const i64 pair = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (pair >= size / 2) return;
  const i64 first = pair / apart * 2 * apart + pair % apart, second = first + apart;
  const float a = x[first], b = x[second];
  store_number(y, first, dtype, mul_exact(butterfly(a, b, false), scale));
  store_number(y, second, dtype, mul_exact(butterfly(b, a, true), scale));
}
