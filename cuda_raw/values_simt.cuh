// Values of one quad of tokens in a block of 32 channels, for each codec of values: Value(spec, block) is for a block of
// channels, and value.read(v, side, spec, tokens, quad) gives lane 4 * i + t the numbers v[p][r] of its channel 8 * p + i and
// of token 4 * quad + r of a page or of exact tokens, 0 where there is none.
#include "attention.cuh"
#include "codes_simt.cuh"

template <class T>
struct ExactValues {
  int channel;  // of the lane in plane 0

  __device__ __forceinline__ ExactValues(const SideSpec&, int block)
      : channel(LANES * block + threadIdx.x % LANES / QUAD) {}

  __device__ __forceinline__ void read(float (*v)[QUAD], const u8* side, const SideSpec& spec, int tokens,
                                       int quad) const {
    const int width = spec.width;
    const T* numbers = reinterpret_cast<const T*>(side) + QUAD * quad * width + channel;
#pragma unroll
    for (int r = 0; r < QUAD; ++r)
#pragma unroll
      for (int p = 0; p < PLANES; ++p)
        v[p][r] = QUAD * quad + r < tokens && channel + 8 * p < width ? to_float(numbers[r * width + 8 * p]) : 0.f;
  }
};

template <int BITS>
struct IntValues {
  int codes, scales;  // offsets in bytes: of the block's codes, and of the scales of its first group
  PlaneGroups groups;

  __device__ __forceinline__ IntValues(const SideSpec& spec, int block)
      : codes(spec.codes + block * Unit<BITS>::block_bytes(spec.tokens)),
        scales(spec.scale + 2 * (LANES * block / spec.group) * spec.tokens),
        groups(LANES * block, spec) {}

  __device__ __forceinline__ void read(float (*v)[QUAD], const u8* side, const SideSpec& spec, int, int quad) const {
    u32 bytes[PLANES];
    QuadScales<BITS> scale;
    Unit<BITS>::read(bytes, side + codes, quad, threadIdx.x % LANES / QUAD);
    const u8* at = side + scales + 2 * QUAD * quad;
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
      if (groups.begins(p)) {
        scale.read(at, at + spec.zero - spec.scale);
        at += 2 * spec.tokens;
      }
      scale.decode(v[p], bytes[p]);
    }
  }
};
