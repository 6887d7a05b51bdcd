// The threads that share pages in shared memory: a warp, which has pages of its own, or all of a block, whose warps
// have other query rows of the same pages.
#include "mma_codes.cuh"

template <bool BLOCK>
struct Team {
  static __device__ __forceinline__ int index() { return BLOCK ? threadIdx.x : threadIdx.x % 32; }
  static __device__ __forceinline__ int size() { return BLOCK ? blockDim.x : 32; }
  static __device__ __forceinline__ void sync() {
    if (BLOCK)
      __syncthreads();
    else
      __syncwarp();
  }

  // f(x, first) for all x + first below `count`, at most MOST, in steps of the team: a warp has x < 32 and knows
  // `first` when it is compiled, so that what depends on x alone is the same for all steps.
  template <int MOST, class F>
  static __device__ __forceinline__ void each(int count, const F& f) {
    if constexpr (BLOCK) {
      for (int x = index(); x < count; x += size()) f(x, 0);
    } else {
#pragma unroll
      for (int first = 0; first < MOST; first += 32)
        if (index() + first < count) f(index(), first);
    }
  }
};
