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
// The numbers of a word of an operand.
struct Bits {
  typedef unsigned Number;
  static constexpr int COUNT = 1;
  static unsigned number(unsigned word, int) { return word; }
};
template <class T>
struct Bytes {
  typedef int Number;
  static constexpr int COUNT = 4;
  static int number(unsigned word, int i) { return byte_of<T>(word, i); }
};
template <class Pair>
struct Halves {
  typedef float Number;
  static constexpr int COUNT = 2;
  static float number(unsigned word, int i) {
    Pair pair;
    __builtin_memcpy(&pair, &word, sizeof pair);
    return widened(i ? pair.y : pair.x);
  }
};
// What two words add to a sum, in the order of their numbers; `T` is exact for it.
struct Multiply {
  template <class T>
  CUDA_HOST_UNCHECKED static T of(const T* a, const T* b, int count) {
    T sum = a[0] * b[0];
    for (int i = 1; i < count; i++) sum += a[i] * b[i];
    return sum;
  }
};
struct CountBoth {
  static int of(const unsigned* a, const unsigned* b, int) { return __popc(*a & *b); }
};
struct CountDifferent {
  static int of(const unsigned* a, const unsigned* b, int) { return __popc(*a ^ *b); }
};
template <class A, class B, class Dot, class Sum>
CUDA_HOST_UNCHECKED void mma_m16n8(Sum* d, const unsigned* a, const unsigned* b, const char* file, int line) {
  MmaData<Sum> mine{a, b, d};
  cuda_host_collective(
      [](unsigned mask, void** data) __attribute__((no_sanitize_thread)) {
        if (mask != ~0u) cuda_host_fail("mma.sync needs all 32 lanes (mask 0x%08x)", mask);
        constexpr int COUNT = A::COUNT;
        typename A::Number rows[16][8][COUNT], columns[8][8][COUNT];
        for (int lane = 0; lane < 32; lane++) {
          auto* of = (MmaData<Sum>*)data[lane];
          int g = lane >> 2, t = lane & 3;
          for (int i = 0; i < COUNT; i++) {
            for (int j = 0; j < 4; j++) rows[g + 8 * (j & 1)][t + 4 * (j >> 1)][i] = A::number(of->a[j], i);
            for (int j = 0; j < 2; j++) columns[g][t + 4 * j][i] = B::number(of->b[j], i);
          }
        }
        for (int lane = 0; lane < 32; lane++) {
          Sum* sums = ((MmaData<Sum>*)data[lane])->d;
          int g = lane >> 2, t = lane & 3;
          for (int j = 0; j < 4; j++)
            for (int word = 0; word < 8; word++)
              sums[j] += Dot::of(rows[g + 8 * (j >> 1)][word], columns[2 * t + (j & 1)][word], COUNT);
        }
      },
      ~0u, &mine, 0, "mma.sync", file, line);
}

#define CUDA_HOST_MMA(name, Sum, ...)                                                       \
  inline void name(Sum* d, const unsigned* a, const unsigned* b, CUDA_HOST_PLACE) {         \
    mma_m16n8<__VA_ARGS__, Sum>(d, a, b, file, line);                                       \
  }
CUDA_HOST_MMA(mma_f16, float, Halves<half2>, Halves<half2>, Multiply)
CUDA_HOST_MMA(mma_bf16, float, Halves<__nv_bfloat162>, Halves<__nv_bfloat162>, Multiply)
CUDA_HOST_MMA(mma_s8, int, Bytes<signed char>, Bytes<signed char>, Multiply)
CUDA_HOST_MMA(mma_u8, int, Bytes<unsigned char>, Bytes<unsigned char>, Multiply)
CUDA_HOST_MMA(mma_u8_s8, int, Bytes<unsigned char>, Bytes<signed char>, Multiply)
CUDA_HOST_MMA(mma_s8_u8, int, Bytes<signed char>, Bytes<unsigned char>, Multiply)
CUDA_HOST_MMA(mma_b1_and, int, Bits, Bits, CountBoth)
CUDA_HOST_MMA(mma_b1_xor, int, Bits, Bits, CountDifferent)

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
