// Latents and weights as words of signed bytes for the tensor cores' integer products, in shared memory.
//
// A side whose tokens have one group keeps its codes: a token's number is code * scale + zero, one plane of bytes.
// Other numbers are rounded to 16 bits of the largest of their token, in two planes: byte 0 and byte 1, both signed.
#include "palu.cuh"

constexpr int MMA_WARPS = 8, MMA_THREADS = LANES * MMA_WARPS;
// The largest number of one plane, and of two: of these, both bytes stay within -128 .. 127.
template <int PLANES_OF_BYTES>
constexpr float LARGEST_CODE = PLANES_OF_BYTES == 1 ? 127.f : 32639.f;

// Four integers as words of bytes, the lowest plane first.
template <int PLANES_OF_BYTES>
__device__ __forceinline__ void bytes_of(u32* words, const int* x) {
  words[0] = __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
  if (PLANES_OF_BYTES == 2)
    words[1] = __byte_perm(__byte_perm(x[0] + 128, x[1] + 128, 0x0051), __byte_perm(x[2] + 128, x[3] + 128, 0x0051),
                           0x5410);
}

// A pair of numbers as bfloat16, and what that leaves as bfloat16.
__device__ __forceinline__ void split_pair(u32& high, u32& low, float x, float y) {
  const __nv_bfloat162 near = __floats2bfloat162_rn(x, y);
  high = reinterpret_cast<const u32&>(near);
  const __nv_bfloat162 rest =
      __floats2bfloat162_rn(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
  low = reinterpret_cast<const u32&>(rest);
}

constexpr int PLANE_BYTES = 4 * 128;  // of a fragment

// Where word `word` of a row's contraction lies among the fragments of 16 rows by 32 bytes that an mma takes as A: one
// after another along a row of `steps` of them, planes innermost, each as four words of every lane. Of the first plane.
__device__ __forceinline__ int word_at(int row, int word, int steps, int planes) {
  return (row / 16 * steps + word / 8) * planes * (PLANE_BYTES / 4) + (row % 8 * 4 + word % 4) * 4 + row % 16 / 8 +
         word % 8 / 4 * 2;
}

// What makes numbers of a tile's tokens of their codes: (tokens) each.
struct TokenScales {
  float *scale, *zero;
};

// Scales of `tokens` tokens of a run from token `first` on; 0 for those that are not there.
template <int PLANES_OF_BYTES>
__device__ __noinline__ void load_scales(TokenScales out, SideRun run, int first, int tokens,
                                            const SideSpec& spec) {
  if (run.exact) {
    for (int t = threadIdx.x / LANES; t < tokens; t += MMA_WARPS) {
      float largest = 0.f;
      bool finite = true;
      if (first + t < run.tokens) {
        const u8* numbers = run.numbers(first + t, spec);
        for (int c = threadIdx.x % LANES; c < spec.width; c += LANES) {
          const float x = fabsf(load_number(numbers, c, spec.dtype));
          largest = fmaxf(largest, x);
          finite &= x <= LARGEST_FLOAT;
        }
      }
      largest = warp_max(largest);
      finite = __all_sync(ALL_LANES, finite);
      if (threadIdx.x % LANES == 0) {
        out.scale[t] = finite ? largest / LARGEST_CODE<PLANES_OF_BYTES> : NOT_A_NUMBER;
        out.zero[t] = finite ? 0.f : NOT_A_NUMBER;
      }
    }
    return;
  }
  for (int t = threadIdx.x; t < tokens; t += MMA_THREADS) {
    float scale = 0.f, zero = 0.f;
    if (first + t < run.tokens) {
      const u8* side = run.side(first + t);
      const __half* scales = reinterpret_cast<const __half*>(side + spec.scale) + run.within(first + t);
      const __half* zeros = reinterpret_cast<const __half*>(side + spec.zero) + run.within(first + t);
      if (PLANES_OF_BYTES == 1) {
        scale = to_float(*scales);
        zero = to_float(*zeros) + (spec.bits == 8 ? 128.f * scale : 0.f);
      } else {
        for (int group = 0; group < spec.groups; ++group) {
          const float low = to_float(zeros[group * spec.tokens]), step = to_float(scales[group * spec.tokens]);
          scale = fmaxf(scale, fmaxf(fabsf(low), fabsf(low + step * (float)((1 << spec.bits) - 1))));
        }
        scale /= LARGEST_CODE<PLANES_OF_BYTES>;
      }
    }
    out.scale[t] = scale;
    out.zero[t] = zero;
  }
}

__device__ __forceinline__ float inverse(float x) { return x > 0.f ? 1.f / x : 0.f; }

// Bytes whose codes are less than 256 as signed ones, what they lose being in the token's zero.
__device__ __forceinline__ u32 signed_bytes(u32 bytes, int bits) { return bits == 8 ? bytes ^ 0x80808080u : bytes; }

// Byte c of row r for byte r of row c.
__device__ __forceinline__ void transpose_bytes(u32* x) {
  const u32 a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
  const u32 c = __byte_perm(x[0], x[1], 0x7362), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, b, 0x5410);
  x[1] = __byte_perm(a, b, 0x7632);
  x[2] = __byte_perm(c, d, 0x5410);
  x[3] = __byte_perm(c, d, 0x7632);
}

// Codes of `tokens` tokens of a run from token `first` on, as rows of words along channels, a row a token.
struct LoadKeyCodes {
  u32* words;
  SideRun run;
  int first, tokens;
  const SideSpec& spec;

  template <class Codes>
  __device__ __forceinline__ void with() const {
    const int blocks = round_up(spec.width, LANES) / LANES;
#pragma unroll 1
    for (int item = threadIdx.x; item < blocks * tokens / 2; item += MMA_THREADS) {
      const int half = item % 2, quad = item / 2 % (tokens / QUAD), block = item / 2 / (tokens / QUAD);
      const int token = first + QUAD * quad;
      u32 bytes[QUAD][PLANES] = {};  // of four channels: four tokens by plane
      if (token < run.tokens) {
        const u8* codes = run.side(token) + spec.codes + (i64)block * Codes::block_bytes(spec.tokens);
#pragma unroll
        for (int j = 0; j < QUAD; ++j) Codes::read(bytes[j], codes, run.within(token) / QUAD, QUAD * half + j);
      }
#pragma unroll
      for (int p = 0; p < PLANES; ++p) {
        u32 turned[QUAD];
#pragma unroll
        for (int j = 0; j < QUAD; ++j) turned[j] = bytes[j][p];
        transpose_bytes(turned);
#pragma unroll
        for (int r = 0; r < QUAD; ++r)
          words[word_at(QUAD * quad + r, 8 * block + 2 * p + half, blocks, 1)] = signed_bytes(turned[r], spec.bits);
      }
    }
  }
};

// The same as rows of `steps` times 32 bytes along tokens, a row a channel.
struct LoadValueCodes {
  u32* words;
  SideRun run;
  int first, tokens, steps;
  const SideSpec& spec;

  template <class Codes>
  __device__ __forceinline__ void with() const {
    const int blocks = round_up(spec.width, LANES) / LANES, parts = tokens / 16;
    const int i = threadIdx.x % LANES / QUAD, t = threadIdx.x % QUAD;
#pragma unroll 1
    for (int item = threadIdx.x / LANES; item < blocks * parts; item += MMA_WARPS) {
      const int block = item / parts, quad = QUAD * (item % parts) + t, token = first + QUAD * quad;
      u32 bytes[PLANES] = {};
      if (token < run.tokens)
        Codes::read(bytes, run.side(token) + spec.codes + (i64)block * Codes::block_bytes(spec.tokens),
                    run.within(token) / QUAD, i);
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
        words[word_at(LANES * block + 8 * p + i, quad, steps, 1)] = signed_bytes(bytes[p], spec.bits);
    }
  }
};

// Numbers of `tokens` tokens of a run from token `first` on as two planes, as rows along channels or, `of_values`,
// along tokens, of `steps` times 32 bytes.
struct LoadNumbers {
  u32* words;
  SideRun run;
  int first, tokens, steps;
  const SideSpec& spec;
  TokenScales scales;
  bool of_values;

  template <class Reader>
  __device__ __forceinline__ void with() const {
    u8* bytes = reinterpret_cast<u8*>(words);
    const int i = threadIdx.x % LANES / QUAD, t = threadIdx.x % QUAD, parts = tokens / 16;
    const int items = round_up(spec.width, LANES) / LANES * parts;
#pragma unroll 1
    for (int item = threadIdx.x / LANES; item < items; item += MMA_WARPS) {
      float v[PLANES][QUAD];
      const int block = item / parts, first_token = 16 * (item % parts) + QUAD * t;
      run.read<Reader>(v, first + first_token, block, spec);
#pragma unroll
      for (int r = 0; r < QUAD; ++r) {
        const int token = first_token + r;
        const float share = inverse(scales.scale[token]);
#pragma unroll
        for (int p = 0; p < PLANES; ++p) {
          const int channel = LANES * block + 8 * p + i, number = __float2int_rn(v[p][r] * share);
          const int row = of_values ? channel : token, along = of_values ? token : channel;
          u8* at = bytes + 4 * word_at(row, along / 4, steps, 2) + along % 4;
          at[0] = (u8)number;
          at[PLANE_BYTES] = (u8)((number + 128) >> 8);
        }
      }
    }
  }
};

__device__ __noinline__ void load_key_codes(LoadKeyCodes load) { with_unit(load.spec.bits, load); }
__device__ __noinline__ void load_value_codes(LoadValueCodes load) { with_unit(load.spec.bits, load); }
__device__ __noinline__ void load_numbers(LoadNumbers load) { with_reader(load.spec, load.run.exact, load); }
