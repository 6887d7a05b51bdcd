// What the kernels of attention over latents share: the sizes that they are given, a block's run of tokens, and which
// channel of a key stands where.
//
// The cache is one of latents with one head, as attention.cuh has it: Q is all query heads times s, and partial
// results are mixes of value latents. Channels of rebuilt keys are taken in blocks of 32, as four tiles of 8 columns,
// ordered so that RoPE turns column c of tile 2 n against column c of tile 2 n + 1, and that columns 2 t, 2 t + 1 of
// all tiles are neighbours in its tables.
#include "attention.cuh"
#include "numbers.cuh"
#include "values_simt.cuh"

// What keys are rebuilt with; the fields of REBUILD in palu_plan.py, in their order.
struct Rebuild {
  i64 longest;  // positions given for a row; 0: a token stands where it lies
  float eps;    // of the norm
  int heads;    // that latents are rebuilt for; 1 when they are scored as they are
  int d;        // channels of a key; columns of scores, when latents are scored as they are
  int blocks;   // of 32 columns of a head
  int turned;   // of them that RoPE turns
  int rotary, interleaved;
  int has_bias, has_norm;
  int whole;   // whether queries are multiplied with latents as they are
  int skips;   // whether rows' first tokens are left out
  int exact;   // whether the tokens are exact ones, not pages
  int groups;  // tokens of a tile, in 32s
};

constexpr int NO_CHANNEL = -1;
constexpr int EXACT = 0;           // KIND_EXACT of kvsketch.layout
constexpr int ONE_PAGE = 1 << 30;  // more tokens than a run has

// Which of a key's channels a column of a block is, or NO_CHANNEL.
__device__ __forceinline__ int channel_of(int block, int tile, int column, const Rebuild& rebuild) {
  if (block < rebuild.turned) {
    const int pair = 16 * block + column / 2 * 4 + tile / 2 * 2 + column % 2, second = tile % 2;
    if (2 * pair >= rebuild.rotary) return NO_CHANNEL;
    return rebuild.interleaved ? 2 * pair + second : pair + second * (rebuild.rotary / 2);
  }
  const int channel = rebuild.rotary + LANES * (block - rebuild.turned) + 8 * tile + column;
  return channel < rebuild.d ? channel : NO_CHANNEL;
}

// Bytes of an exact number.
__device__ __forceinline__ int number_bytes(const SideSpec& spec) { return spec.dtype == FLOAT32 ? 4 : 2; }

// One side of a run of a row's tokens: of pages, `step` bytes apart, or of exact tokens, which are like one long page.
struct SideRun {
  const u8* bytes;
  i64 step;
  int page, tokens;
  bool exact;

  // The side of the page that a token is in, and which of the page's tokens it is.
  __device__ __forceinline__ const u8* side(int token) const { return bytes + token / page * step; }
  __device__ __forceinline__ int within(int token) const { return token % page; }

  __device__ __forceinline__ const u8* numbers(int token, const SideSpec& spec) const {
    return side(token) + (i64)within(token) * spec.width * number_bytes(spec);
  }

  // v[p][r] = channel 32 * block + 8 * p + i of token `token` + r, for lane 4 * i + t; `token` is a multiple of 4. 0
  // for tokens that are not there; channels that are not there may have any finite number.
  template <class Reader>
  __device__ __forceinline__ void read(float (*v)[QUAD], int token, int block, const SideSpec& spec) const {
    if (token < tokens) {
      const Reader reader(spec, block);
      return reader.read(v, exact ? numbers(token, spec) : side(token), spec, tokens - token,
                         exact ? 0 : within(token) / QUAD);
    }
#pragma unroll
    for (int p = 0; p < PLANES; ++p)
#pragma unroll
      for (int r = 0; r < QUAD; ++r) v[p][r] = 0.f;
  }
};

// A block's run of a row's tokens, none when it has nothing to do.
struct LatentRun {
  SideRun keys, values;
  int tokens;
  i64 position;  // of the first token in its row
};

// The tokens of split `split`, of the launch over pages (`keys` are pages) or of that over exact tokens, in which
// first tokens come before the window.
__device__ __forceinline__ LatentRun latent_run(const u8* keys, const u8* values, const u8* window_keys,
                                                const u8* window_values, int row, int split, const RowCounts& counts,
                                                const Shapes& shapes, const Rebuild& rebuild) {
  if (!rebuild.exact) {
    const Cut cut = page_cut(counts, split, shapes);
    const int p = shapes.keys.tokens, tokens = cut.count * p;
    const u8* record = keys + (row * shapes.capacity + cut.first) * shapes.record_bytes;
    return {{record, shapes.record_bytes, p, tokens, shapes.keys.kind == EXACT},
            {record + shapes.keys.nbytes, shapes.record_bytes, p, tokens, shapes.values.kind == EXACT},
            tokens,
            counts.sinks + (i64)cut.first * p};
  }
  const bool of_sinks = split < shapes.sink_splits;
  const Cut cut = exact_cut(counts, split, shapes);
  const i64 token =
      of_sinks ? row * shapes.sink_room + cut.first : row * shapes.window_room + counts.window_start + cut.first;
  const int tokens = cut.count;
  return {{(of_sinks ? keys : window_keys) + token * shapes.keys.width * number_bytes(shapes.keys), 0, ONE_PAGE, tokens,
           true},
          {(of_sinks ? values : window_values) + token * shapes.values.width * number_bytes(shapes.values), 0, ONE_PAGE,
           tokens, true},
          tokens,
          cut.first + (of_sinks ? 0 : counts.sinks + counts.pages * shapes.keys.tokens)};
}

// The row of RoPE's tables for the token that lies at `position` in its row.
__device__ __forceinline__ i64 table_row(const i64* positions, int row, i64 position, const Rebuild& rebuild) {
  return rebuild.longest ? positions[row * rebuild.longest + position] : position;
}

// Calls use.with<Type>(): the Unit of a number of bits, or what reads a side, see values_simt.cuh, which is the same
// for keys that are latents. (NVRTC takes no lambdas for device functions.)
template <class Use>
__device__ __forceinline__ void with_unit(int bits, const Use& use) {
  switch (bits) {
    case 1: return use.template with<Unit<1>>();
    case 2: return use.template with<Unit<2>>();
    case 3: return use.template with<Unit<3>>();
    case 4: return use.template with<Unit<4>>();
    default: return use.template with<Unit<8>>();
  }
}
template <class Use>
__device__ __forceinline__ void with_reader(const SideSpec& spec, bool exact, const Use& use) {
  switch (exact ? -spec.dtype : spec.bits) {
    case -FLOAT32: return use.template with<ExactValues<float>>();
    case -FLOAT16: return use.template with<ExactValues<__half>>();
    case -BFLOAT16: return use.template with<ExactValues<__nv_bfloat16>>();
    case 1: return use.template with<IntValues<1>>();
    case 2: return use.template with<IntValues<2>>();
    case 3: return use.template with<IntValues<3>>();
    case 4: return use.template with<IntValues<4>>();
    default: return use.template with<IntValues<8>>();
  }
}

// The number of a column's channel, 0 where there is none.
__device__ __forceinline__ float channel_number(const float* numbers, int channel) {
  return channel == NO_CHANNEL ? 0.f : numbers[channel];
}

// What is left of a score that was made from latents: -infinity also for tokens that are not read as latents.
__device__ __forceinline__ float finish_latent_score(float product, i64 position, i64 skipped, i64 seen,
                                                     const float* bias, float cap) {
  return position < skipped ? NEGATIVE_INFINITY : finish_score(product, position, seen, bias, cap);
}
