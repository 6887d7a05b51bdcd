// Tensor cores, matrix loads and asynchronous copies, for the host twins of inline PTX.
#pragma once

namespace cuda_host {

// ------------------------------------------------------------------ mma.sync.m16n8, eight 32-bit words of k
// Lane 4 g + t holds words t and t + 4 of rows g and g + 8 of A and of column g of B, and the sums of rows g and g + 8
// in columns 2 t and 2 t + 1. A word is 256 / 8 bits, 4 bytes or 2 half numbers of the contraction.
template <class Sum>
struct MmaData {
  const unsigned *a, *b;
  Sum* d;
};
template <class Dot, class Sum>
CUDA_HOST_UNCHECKED void mma_m16n8(Sum* d, const unsigned* a, const unsigned* b, CUDA_HOST_PLACE) {
  MmaData<Sum> mine{a, b, d};
  cuda_host_collective(
      [](unsigned mask, void** data) __attribute__((no_sanitize_thread)) {
        if (mask != ~0u) cuda_host_fail("mma.sync needs all 32 lanes (mask 0x%08x)", mask);
        unsigned rows[16][8], columns[8][8];
        for (int lane = 0; lane < 32; lane++) {
          auto* of = (MmaData<Sum>*)data[lane];
          int g = lane >> 2, t = lane & 3;
          rows[g][t] = of->a[0], rows[g + 8][t] = of->a[1], rows[g][t + 4] = of->a[2], rows[g + 8][t + 4] = of->a[3];
          columns[g][t] = of->b[0], columns[g][t + 4] = of->b[1];
        }
        for (int lane = 0; lane < 32; lane++) {
          Sum* sums = ((MmaData<Sum>*)data[lane])->d;
          int g = lane >> 2, t = lane & 3;
          for (int j = 0; j < 4; j++)
            for (int word = 0; word < 8; word++)
              sums[j] += Dot::of(rows[g + 8 * (j >> 1)][word], columns[2 * t + (j & 1)][word]);
        }
      },
      ~0u, &mine, 0, "mma.sync", file, line);
}

struct DotBitsXor {
  static int of(unsigned a, unsigned b) { return __popc(a ^ b); }
};
struct DotBitsAnd {
  static int of(unsigned a, unsigned b) { return __popc(a & b); }
};
template <class A, class B>
struct DotBytes {
  static int of(unsigned a, unsigned b) { return (int)dot_bytes<A, B>(a, b, 0); }
};
template <class Pair>
struct DotPair {
  static float of(unsigned a, unsigned b) {
    Pair x, y;
    __builtin_memcpy(&x, &a, sizeof x);
    __builtin_memcpy(&y, &b, sizeof y);
    return widened(x.x) * widened(y.x) + widened(x.y) * widened(y.y);
  }
};

#define CUDA_HOST_MMA(name, Sum, ...)                                                       \
  inline void name(Sum* d, const unsigned* a, const unsigned* b, CUDA_HOST_PLACE) {         \
    mma_m16n8<__VA_ARGS__, Sum>(d, a, b, file, line);                                       \
  }
CUDA_HOST_MMA(mma_f16, float, DotPair<half2>)
CUDA_HOST_MMA(mma_bf16, float, DotPair<__nv_bfloat162>)
CUDA_HOST_MMA(mma_s8, int, DotBytes<signed char, signed char>)
CUDA_HOST_MMA(mma_u8, int, DotBytes<unsigned char, unsigned char>)
CUDA_HOST_MMA(mma_u8_s8, int, DotBytes<unsigned char, signed char>)
CUDA_HOST_MMA(mma_s8_u8, int, DotBytes<signed char, unsigned char>)
CUDA_HOST_MMA(mma_b1_and, int, DotBitsAnd)
CUDA_HOST_MMA(mma_b1_xor, int, DotBitsXor)

// ------------------------------------------------------------------ ldmatrix of N 8 x 8 matrices of 16-bit numbers
// Lane 8 m + r names row r of matrix m; lane 4 g + t receives numbers 2 t, 2 t + 1 of row g, or of column g (trans).
struct LdmatrixData {
  const void* row;
  unsigned* result;
};
template <int N, bool TRANSPOSED>
CUDA_HOST_UNCHECKED void ldmatrix(unsigned* result, const void* row, const char* file, int line) {
  if ((int)cuda_host_current->lane < 8 * N) {
    if ((uintptr_t)row & 15) cuda_host_fail("MISALIGNED ldmatrix row at %s:%d: it needs 16 bytes", file, line);
    cuda_host_read(row, 16, __builtin_return_address(0));
  }
  LdmatrixData mine{row, result};
  cuda_host_collective(
      [](unsigned mask, void** data) __attribute__((no_sanitize_thread)) {
        if (mask != ~0u) cuda_host_fail("ldmatrix needs all 32 lanes (mask 0x%08x)", mask);
        auto number = [&](int matrix, int row, int column) __attribute__((no_sanitize_thread)) {
          return (unsigned)((const unsigned short*)((LdmatrixData*)data[8 * matrix + row])->row)[column];
        };
        for (int lane = 0; lane < 32; lane++)
          for (int m = 0; m < N; m++) {
            int g = lane >> 2, t = 2 * (lane & 3);
            unsigned low = TRANSPOSED ? number(m, t, g) : number(m, g, t);
            unsigned high = TRANSPOSED ? number(m, t + 1, g) : number(m, g, t + 1);
            ((LdmatrixData*)data[lane])->result[m] = low | high << 16;
          }
      },
      ~0u, &mine, 0, "ldmatrix", file, line);
}
// Part of the caller, whose place a failed access names.
#define CUDA_HOST_LDMATRIX(name, N, TRANSPOSED)                                   \
  __forceinline__ void name(unsigned* result, const void* row, CUDA_HOST_PLACE) { \
    ldmatrix<N, TRANSPOSED>(result, row, file, line);                             \
  }
CUDA_HOST_LDMATRIX(ldmatrix_x1, 1, false)
CUDA_HOST_LDMATRIX(ldmatrix_x2, 2, false)
CUDA_HOST_LDMATRIX(ldmatrix_x4, 4, false)
CUDA_HOST_LDMATRIX(ldmatrix_x1_trans, 1, true)
CUDA_HOST_LDMATRIX(ldmatrix_x2_trans, 2, true)
CUDA_HOST_LDMATRIX(ldmatrix_x4_trans, 4, true)

// ------------------------------------------------------------------ cp.async: the bytes arrive at the wait
// `from_bytes` fewer than `bytes` are followed by zeros.
__forceinline__ void cp_async(void* to, const void* from, unsigned bytes, unsigned from_bytes) {
  cuda_host_copy_async(to, from, bytes, from_bytes);
}
__forceinline__ void cp_async(void* to, const void* from, unsigned bytes) { cp_async(to, from, bytes, bytes); }
__forceinline__ void cp_async_commit() { cuda_host_copy_commit(); }
__forceinline__ void cp_async_wait(unsigned keep) { cuda_host_copy_wait(keep); }

}  // namespace cuda_host
