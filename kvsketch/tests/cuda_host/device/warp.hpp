// Barriers and warp collectives: a collective is one function over the data of all its lanes, which the last one runs.
#pragma once

inline void __syncthreads(CUDA_HOST_PLACE) {
  int votes[3];
  cuda_host_barrier(1, votes, file, line);
}
inline int __syncthreads_count(int predicate, CUDA_HOST_PLACE) {
  int votes[3];
  cuda_host_barrier(predicate, votes, file, line);
  return votes[0];
}
inline int __syncthreads_and(int predicate, CUDA_HOST_PLACE) {
  int votes[3];
  cuda_host_barrier(predicate, votes, file, line);
  return votes[1];
}
inline int __syncthreads_or(int predicate, CUDA_HOST_PLACE) {
  int votes[3];
  cuda_host_barrier(predicate, votes, file, line);
  return votes[2];
}
inline void __syncwarp(unsigned mask = ~0u, CUDA_HOST_PLACE) {
  cuda_host_collective([](unsigned, void**) {}, mask, nullptr, 1, "__syncwarp", file, line);
}
inline unsigned __activemask() { cuda_host_fail("__activemask() has no defined value: pass masks explicitly"); }

namespace cuda_host {

inline int lane() { return (int)cuda_host_current->lane; }

// ------------------------------------------------------------------ shuffles
template <class T>
constexpr bool can_be_shuffled = std::is_arithmetic<T>::value || std::is_same<T, half>::value ||
                                 std::is_same<T, half2>::value || std::is_same<T, __nv_bfloat16>::value ||
                                 std::is_same<T, __nv_bfloat162>::value;
template <class T>
struct ShuffleData {
  T value, result;
  int source;
};
template <class T>
CUDA_HOST_UNCHECKED T shuffle(unsigned mask, T value, int source, const char* what, const char* file, int line) {
  static_assert(can_be_shuffled<T>, "CUDA does not shuffle this type");
  ShuffleData<T> mine{value, value, source};
  cuda_host_collective(
      [](unsigned mask, void** data) __attribute__((no_sanitize_thread)) {
        for (unsigned left = mask; left; left &= left - 1) {
          int lane = __builtin_ctz(left);
          auto* reader = (ShuffleData<T>*)data[lane];
          if (!(mask >> reader->source & 1))
            cuda_host_fail("shuffle: lane %d reads lane %d, which does not take part (mask 0x%08x)", lane,
                           reader->source, mask);
          reader->result = ((ShuffleData<T>*)data[reader->source])->value;
        }
      },
      mask, &mine, 0, what, file, line);
  return mine.result;
}

// ------------------------------------------------------------------ votes and reductions
struct VoteData {
  uint64_t value, result;
};
// Fold::of(mask, values, lane) is lane's result.
template <class Fold>
CUDA_HOST_UNCHECKED uint64_t vote(unsigned mask, uint64_t value, const char* what, const char* file, int line) {
  VoteData mine{value, 0};
  cuda_host_collective(
      [](unsigned mask, void** data) __attribute__((no_sanitize_thread)) {
        uint64_t values[32];
        for (int lane = 0; lane < 32; lane++) values[lane] = mask >> lane & 1 ? ((VoteData*)data[lane])->value : 0;
        for (unsigned left = mask; left; left &= left - 1) {
          int lane = __builtin_ctz(left);
          ((VoteData*)data[lane])->result = Fold::of(mask, values, lane);
        }
      },
      mask, &mine, 0, what, file, line);
  return mine.result;
}
#define CUDA_HOST_FOLD(name, start, next)                                                                  \
  struct name {                                                                                            \
    __attribute__((no_sanitize_thread)) static uint64_t of(unsigned mask, const uint64_t* values, int me) { \
      auto r = start;                                                                                      \
      (void)me;                                                                                            \
      for (int i = 0; i < 32; i++)                                                                         \
        if (mask >> i & 1) {                                                                               \
          auto v = (decltype(r))values[i];                                                                 \
          r = (next);                                                                                      \
        }                                                                                                  \
      return (uint64_t)r;                                                                                  \
    }                                                                                                      \
  };
CUDA_HOST_FOLD(Ballot, uint64_t(0), v ? r | uint64_t(1) << i : r)
CUDA_HOST_FOLD(Match, uint64_t(0), v == values[me] ? r | uint64_t(1) << i : r)
CUDA_HOST_FOLD(Add, 0u, r + v)
CUDA_HOST_FOLD(And, ~0u, r& v)
CUDA_HOST_FOLD(Or, 0u, r | v)
CUDA_HOST_FOLD(Xor, 0u, r ^ v)
CUDA_HOST_FOLD(UnsignedMax, 0u, r > v ? r : v)
CUDA_HOST_FOLD(UnsignedMin, ~0u, r < v ? r : v)
CUDA_HOST_FOLD(SignedMax, (int)0x80000000, r > v ? r : v)
CUDA_HOST_FOLD(SignedMin, 0x7fffffff, r < v ? r : v)

}  // namespace cuda_host

// A segment of `width` lanes, a power of two, shuffles among its own lanes.
template <class T>
CUDA_HOST_INLINED T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_HOST_PLACE) {
  source = (cuda_host::lane() & ~(width - 1)) | (source & (width - 1));
  return cuda_host::shuffle<T>(mask, value, source, "__shfl_sync", file, line);
}
template <class T>
CUDA_HOST_INLINED T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, CUDA_HOST_PLACE) {
  int lane = cuda_host::lane(), source = lane ^ flip;
  if ((source & ~(width - 1)) > (lane & ~(width - 1))) source = lane;
  return cuda_host::shuffle<T>(mask, value, source, "__shfl_xor_sync", file, line);
}
template <class T>
CUDA_HOST_INLINED T __shfl_down_sync(unsigned mask, T value, unsigned apart, int width = 32, CUDA_HOST_PLACE) {
  int lane = cuda_host::lane(), source = lane + (int)apart;
  if (source > (lane | (width - 1))) source = lane;
  return cuda_host::shuffle<T>(mask, value, source, "__shfl_down_sync", file, line);
}
template <class T>
CUDA_HOST_INLINED T __shfl_up_sync(unsigned mask, T value, unsigned apart, int width = 32, CUDA_HOST_PLACE) {
  int lane = cuda_host::lane(), source = lane - (int)apart;
  if (source < (lane & ~(width - 1))) source = lane;
  return cuda_host::shuffle<T>(mask, value, source, "__shfl_up_sync", file, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_HOST_PLACE) {
  return (unsigned)cuda_host::vote<cuda_host::Ballot>(mask, predicate != 0, "__ballot_sync", file, line);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_HOST_PLACE) {
  return cuda_host::vote<cuda_host::Or>(mask, predicate != 0, "__any_sync", file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_HOST_PLACE) {
  return (cuda_host::vote<cuda_host::And>(mask, predicate != 0, "__all_sync", file, line) & 1) != 0;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, CUDA_HOST_PLACE) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return (unsigned)cuda_host::vote<cuda_host::Match>(mask, bits, "__match_any_sync", file, line);
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all, CUDA_HOST_PLACE) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  unsigned same = (unsigned)cuda_host::vote<cuda_host::Match>(mask, bits, "__match_all_sync", file, line);
  *all = same == mask;
  return *all ? mask : 0;
}
#define CUDA_HOST_REDUCE(name, T, Fold)                                                          \
  inline T name(unsigned mask, T value, CUDA_HOST_PLACE) {                                       \
    return (T)cuda_host::vote<cuda_host::Fold>(mask, (unsigned)value, #name, file, line);        \
  }
CUDA_HOST_REDUCE(__reduce_add_sync, unsigned, Add)
CUDA_HOST_REDUCE(__reduce_add_sync, int, Add)
CUDA_HOST_REDUCE(__reduce_max_sync, unsigned, UnsignedMax)
CUDA_HOST_REDUCE(__reduce_max_sync, int, SignedMax)
CUDA_HOST_REDUCE(__reduce_min_sync, unsigned, UnsignedMin)
CUDA_HOST_REDUCE(__reduce_min_sync, int, SignedMin)
CUDA_HOST_REDUCE(__reduce_and_sync, unsigned, And)
CUDA_HOST_REDUCE(__reduce_or_sync, unsigned, Or)
CUDA_HOST_REDUCE(__reduce_xor_sync, unsigned, Xor)
