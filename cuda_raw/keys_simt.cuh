// Scores of a block of 32 tokens, by one warp, for each codec of keys: with `Key` one of those below,
//
//   Key::pitch(spec)                     floats of a query's weights in shared memory, zero beyond what it has
//   Key::score(products, block, shapes)  products of the queries with one token, and which of the block that is
//
// Lane 4 * i + t computes with a quarter of the channels of several tokens and ends up with one token of its own.
#include "attention.cuh"
#include "codes_simt.cuh"

// What a warp scores a block of 32 tokens from.
struct KeyBlock {
  const u8* side;        // the key side of the page, or the first of the exact tokens
  int index;             // of the block in the page
  int tokens;            // in the block: fewer than 32 only at the end of exact tokens
  const float* weights;  // (queries, pitch), shared: the queries, or S q of sketched keys
  int pitch;
  const float* q;  // (rows, d): the queries as they are, for outlier channels
  int rows;
  const float *table, *outlier_table;  // S^T of the two parts of sketched keys with outlier channels
  float* room;                         // (queries, room_pitch), shared: the warp's own
  int room_pitch;
};

// Adds the products of queries with the quad of channels of four tokens, 8 * p + i.
template <int QUERIES>
__device__ __forceinline__ void add_products(float (*sums)[PLANES], const float (*k)[QUAD], const float* weights,
                                             int pitch, int quad) {
#pragma unroll
  for (int q = 0; q < QUERIES; ++q) {
    const float4 w = *reinterpret_cast<const float4*>(weights + q * pitch + QUAD * quad);
#pragma unroll
    for (int p = 0; p < PLANES; ++p)
      sums[q][p] = fmaf(k[p][3], w.w, fmaf(k[p][2], w.z, fmaf(k[p][1], w.y, fmaf(k[p][0], w.x, sums[q][p]))));
  }
}

template <class T>
struct ExactKeys {
  static constexpr bool SKETCHED = false;
  static __device__ __forceinline__ int pitch(const SideSpec& spec) { return round_up(spec.width, QUAD); }

  template <int QUERIES>
  static __device__ __forceinline__ int score(float* products, const KeyBlock& from, const Shapes& shapes) {
    const SideSpec& spec = shapes.keys;
    const int lane = threadIdx.x % LANES, i = lane / QUAD, t = lane % QUAD;
    const T* first = reinterpret_cast<const T*>(from.side) + (i64)LANES * from.index * spec.width;
    float sums[QUERIES][PLANES] = {};
#pragma unroll 1
    for (int quad = t; QUAD * quad < spec.width; quad += QUAD) {
      float k[PLANES][QUAD];
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
#pragma unroll
        for (int r = 0; r < QUAD; ++r) {
          const int token = 8 * p + i, channel = QUAD * quad + r;
          k[p][r] = token < from.tokens && channel < spec.width ? to_float(first[(i64)token * spec.width + channel])
                                                               : 0.f;
        }
      add_products<QUERIES>(sums, k, from.weights, from.pitch, quad);
    }
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) products[q] = sum_quads(sums[q], t);
    return 8 * t + i;
  }
};

// Integers grouped along the tokens of a channel.
template <int BITS>
struct IntKeys {
  static constexpr bool SKETCHED = false;
  static __device__ __forceinline__ int pitch(const SideSpec& spec) { return spec.rows; }

  template <int QUERIES>
  static __device__ __forceinline__ int score(float* products, const KeyBlock& from, const Shapes& shapes) {
    const SideSpec& spec = shapes.keys;
    const int lane = threadIdx.x % LANES, i = lane / QUAD, t = lane % QUAD;
    const u8* codes = from.side + spec.codes + from.index * Unit<BITS>::block_bytes(spec.rows);
    const int group = LANES * from.index / spec.group * spec.rows * 2;
    const u8 *scales = from.side + spec.scale + group, *zeros = from.side + spec.zero + group;
    float sums[QUERIES][PLANES] = {};
#pragma unroll 1
    for (int quad = t; QUAD * quad < spec.rows; quad += QUAD) {
      u32 bytes[PLANES];
      float k[PLANES][QUAD];
      QuadScales<BITS> scale;
      Unit<BITS>::read(bytes, codes, quad, i);
      scale.read(scales + 8 * quad, zeros + 8 * quad);
#pragma unroll
      for (int p = 0; p < PLANES; ++p) scale.decode(k[p], bytes[p]);
      add_products<QUERIES>(sums, k, from.weights, from.pitch, quad);
    }
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) products[q] = sum_quads(sums[q], t);
    return 8 * t + i;
  }
};

// Integers grouped along the channels of a token: units whose lanes are channels and whose rows are tokens.
template <int BITS>
struct TokenIntKeys {
  static constexpr bool SKETCHED = false;
  static constexpr int HALVES = LANES / (QUAD * QUAD);  // quads of tokens that a lane has
  static __device__ __forceinline__ int pitch(const SideSpec& spec) { return round_up(spec.width, LANES); }

  template <int QUERIES>
  static __device__ __forceinline__ int score(float* products, const KeyBlock& from, const Shapes& shapes) {
    const SideSpec& spec = shapes.keys;
    const int lane = threadIdx.x % LANES, i = lane / QUAD, t = lane % QUAD;
    float sums[QUERIES][HALVES][QUAD] = {};
    const int step = Unit<BITS>::block_bytes(spec.tokens);
    const u8* codes = from.side + spec.codes;
#pragma unroll 1
    for (int first = 0; first < spec.width; first += LANES, codes += step) {
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const int quad = LANES / QUAD * from.index + QUAD * half + t;
        u32 bytes[PLANES];
        QuadScales<BITS> scale;
        Unit<BITS>::read(bytes, codes, quad, i);
        const PlaneGroups groups(first, spec);
        const u8* at = from.side + spec.scale + 2 * (first / spec.group * spec.tokens + QUAD * quad);
#pragma unroll
        for (int p = 0; p < PLANES; ++p) {
          const int channel = first + 8 * p;
          if (channel >= spec.width) break;
          if (groups.begins(p)) {
            scale.read(at, at + spec.zero - spec.scale);
            at += 2 * spec.tokens;
          }
          float k[QUAD];
          scale.decode(k, bytes[p]);
#pragma unroll
          for (int q = 0; q < QUERIES; ++q) {
            const float w = from.weights[q * from.pitch + channel + i];
#pragma unroll
            for (int r = 0; r < QUAD; ++r) sums[q][half][r] = fmaf(k[r], w, sums[q][half][r]);
          }
        }
      }
    }
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) products[q] = sum_channels(sums[q], i);
    return QUAD * (t + QUAD * (i / QUAD)) + i % QUAD;
  }

 private:
  // The sum over i of x[half][r], in the lanes with i = 4 * half + r.
  static __device__ __forceinline__ float sum_channels(const float (*x)[QUAD], int i) {
    float y[QUAD];
#pragma unroll
    for (int r = 0; r < QUAD; ++r)
      y[r] = (i & 4 ? x[1][r] : x[0][r]) + __shfl_xor_sync(ALL_LANES, i & 4 ? x[0][r] : x[1][r], 16);
    const float first = (i & 2 ? y[2] : y[0]) + __shfl_xor_sync(ALL_LANES, i & 2 ? y[0] : y[2], 8);
    const float second = (i & 2 ? y[3] : y[1]) + __shfl_xor_sync(ALL_LANES, i & 2 ? y[1] : y[3], 8);
    return (i & 1 ? second : first) + __shfl_xor_sync(ALL_LANES, i & 1 ? first : second, 4);
  }
};

// Signs of a projection and the norm of each key, with outlier channels sketched on their own where there are some.
struct SketchKeys {
  static constexpr bool SKETCHED = true;
  static __device__ __forceinline__ int pitch(const SideSpec& spec) { return round_up(spec.m, 16); }

  template <int QUERIES>
  static __device__ __forceinline__ int score(float* products, const KeyBlock& from, const Shapes& shapes) {
    const SideSpec& spec = shapes.keys;
    const int lane = threadIdx.x % LANES, i = lane / QUAD, t = lane % QUAD, token = 8 * t + i;
    const u8* side = from.side;
    const i64 norm_at = 2 * (LANES * from.index + token);
    if (!spec.outliers) {
      add_signs<QUERIES>(products, side + spec.codes, from.index, shapes.sketch_width, from.weights, from.pitch);
      scale_products<QUERIES>(products, side + spec.norms + norm_at, shapes.factor);
      return token;
    }
    float rest[QUERIES];
    weigh<QUERIES>(from, spec, from.weights, from.table, shapes.sketch_width, -1.f);
    add_signs<QUERIES>(products, side + spec.codes, from.index, shapes.sketch_width, from.room, from.room_pitch);
    scale_products<QUERIES>(products, side + spec.norms + norm_at, shapes.factor);
    weigh<QUERIES>(from, spec, nullptr, from.outlier_table, shapes.outlier_width, 1.f);
    add_signs<QUERIES>(rest, side + spec.outlier_codes, from.index, shapes.outlier_width, from.room, from.room_pitch);
    scale_products<QUERIES>(rest, side + spec.outlier_norms + norm_at, shapes.outlier_factor);
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) products[q] += rest[q];
    return token;
  }

 private:
  // Sums of weights, each with the sign that the sketch of a token has in its row.
  template <int QUERIES>
  static __device__ __forceinline__ void add_signs(float* sums, const u8* codes, int index, int rows,
                                                   const float* weights, int pitch) {
    const int lane = threadIdx.x % LANES, i = lane / QUAD, t = lane % QUAD;
    codes += index * Unit<1>::block_bytes(rows);
    float parts[QUERIES][PLANES] = {};
    QuadScales<1> sign;
#pragma unroll
    for (int r = 0; r < QUAD; ++r) sign.set(r, 2.f, -1.f);
#pragma unroll 1
    for (int quad = t; QUAD * quad < rows; quad += QUAD) {
      u32 bytes[PLANES];
      float k[PLANES][QUAD];
      Unit<1>::read(bytes, codes, quad, i);
#pragma unroll
      for (int p = 0; p < PLANES; ++p) sign.decode(k[p], bytes[p]);
      add_products<QUERIES>(parts, k, weights, pitch, quad);
    }
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) sums[q] = sum_quads(parts[q], t);
  }

  template <int QUERIES>
  static __device__ __forceinline__ void scale_products(float* products, const u8* norm, float factor) {
    const float size = factor * __half2float(*reinterpret_cast<const __half*>(norm));
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) products[q] *= size;
  }

  // Into the warp's room: `base` (nullptr: 0) plus `sign` times what the outlier channels of the page add to S q.
  template <int QUERIES>
  static __device__ __forceinline__ void weigh(const KeyBlock& from, const SideSpec& spec, const float* base,
                                               const float* table, int rows, float sign) {
    __syncwarp();
    for (int row = threadIdx.x % LANES; row < rows; row += LANES) {
      float sums[QUERIES] = {};
      for (int o = 0; o < spec.outliers; ++o) {
        const u8* at = from.side + spec.channels + o * spec.channel_bytes;
        const int channel = spec.channel_bytes == 1 ? *at : *reinterpret_cast<const u16*>(at);
        const float number = sign * table[(i64)channel * rows + row];
#pragma unroll
        for (int q = 0; q < QUERIES; ++q)
          if (q < from.rows) sums[q] = fmaf(from.q[(i64)q * spec.width + channel], number, sums[q]);
      }
#pragma unroll
      for (int q = 0; q < QUERIES; ++q)
        from.room[q * from.room_pitch + row] = sums[q] + (base == nullptr ? 0.f : base[q * from.pitch + row]);
    }
    __syncwarp();
  }
};
