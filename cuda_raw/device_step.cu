// What a step of decoding begins with: one token a row is stored behind those that a cache has, and counted.
#include "numbers.cuh"

// The fields of TOKEN in device_step.py, in their order.
struct Token {
  i64 sink_room, window_room;
  int b, h;
  int key_width, key_given, key_kept;  // kvsketch.layout.DTYPE_CODES of numbers as they come and as they are kept
  int value_width, value_given, value_kept;
};

constexpr int TOKEN_THREADS = 256, VECTOR_BYTES = 16;

// `units` of each of h heads, which are one after another at `from` and `room` tokens apart at `to`.
template <class Unit>
__device__ __forceinline__ void copy_heads(const u8* from, u8* to, int h, int units, i64 room) {
  for (int at = threadIdx.x; at < h * units; at += TOKEN_THREADS)
    reinterpret_cast<Unit*>(to)[at / units * room * units + at % units] = reinterpret_cast<const Unit*>(from)[at];
}

__device__ __forceinline__ int number_size(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

// A row's numbers (h, width) of `from` (b, h, width) to token `slot` of `to` (b, h, room, width).
__device__ __forceinline__ void store_heads(const void* from, void* to, int row, int h, int width, i64 room, i64 slot,
                                            int given, int kept) {
  const int bytes = width * number_size(kept);
  const u8* source = static_cast<const u8*>(from) + (i64)row * h * width * number_size(given);
  u8* target = static_cast<u8*>(to) + ((i64)row * h * room + slot) * bytes;
  if (given != kept) {
    for (int at = threadIdx.x; at < h * width; at += TOKEN_THREADS)
      store_number(target, at / width * room * width + at % width, kept, load_number(source, at, given));
  } else if ((reinterpret_cast<u64>(source) | reinterpret_cast<u64>(target) | bytes) % VECTOR_BYTES == 0) {
    copy_heads<uint4>(source, target, h, bytes / VECTOR_BYTES, room);
  } else {
    copy_heads<u16>(source, target, h, bytes / 2, room);
  }
}

// Keys k (b, h, d) and values v (b, h, dv) go to the first tokens where a row has room for more of these, else behind
// its window. Grid (rows).
__global__ void __launch_bounds__(TOKEN_THREADS)
    append_token(const void* k, const void* v, void* sink_k, void* sink_v, void* window_k, void* window_v, i64* counts,
                 const Token token) {
  const int row = blockIdx.x;
  i64 *sinks = counts + token.b + row, *window = counts + 3 * token.b + row;
  const bool to_sinks = *sinks < token.sink_room;
  const i64 slot = to_sinks ? *sinks : counts[2 * token.b + row] + *window;
  const i64 room = to_sinks ? token.sink_room : token.window_room;
  __syncthreads();
  // Nobody has made room: what lies behind belongs to another head.
  if (slot >= room) return;
  if (threadIdx.x == 0) ++*(to_sinks ? sinks : window);
  store_heads(k, to_sinks ? sink_k : window_k, row, token.h, token.key_width, room, slot, token.key_given,
              token.key_kept);
  store_heads(v, to_sinks ? sink_v : window_v, row, token.h, token.value_width, room, slot, token.value_given,
              token.value_kept);
}
