// Atomics, fences and the loads and stores that name a cache policy.
#pragma once

// Threads change places only at barriers and at checked accesses, so a plain read, change and write is atomic.
#define CUDA_HOST_ATOMIC(name, changed)                                           \
  template <class T>                                                              \
  CUDA_HOST_UNCHECKED T name(T* address, std::common_type_t<T> value) {           \
    cuda_host_atomic(address, sizeof(T), __builtin_return_address(0));                                         \
    T old = *address;                                                             \
    *address = (changed);                                                         \
    return old;                                                                   \
  }
CUDA_HOST_ATOMIC(atomicAdd, (T)(old + value))
CUDA_HOST_ATOMIC(atomicSub, (T)(old - value))
CUDA_HOST_ATOMIC(atomicMax, old > value ? old : value)
CUDA_HOST_ATOMIC(atomicMin, old < value ? old : value)
CUDA_HOST_ATOMIC(atomicOr, (T)(old | value))
CUDA_HOST_ATOMIC(atomicAnd, (T)(old & value))
CUDA_HOST_ATOMIC(atomicXor, (T)(old ^ value))
CUDA_HOST_ATOMIC(atomicExch, value)
CUDA_HOST_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
CUDA_HOST_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
template <class T>
CUDA_HOST_UNCHECKED T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  cuda_host_atomic(address, sizeof(T), __builtin_return_address(0));
  T old = *address;
  if (old == expected) *address = value;
  return old;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}

#define CUDA_HOST_LOAD(name)                 \
  template <class T>                         \
  __forceinline__ T name(const T* address) { \
    return *address;                         \
  }
CUDA_HOST_LOAD(__ldg)
CUDA_HOST_LOAD(__ldca)
CUDA_HOST_LOAD(__ldcg)
CUDA_HOST_LOAD(__ldcs)
CUDA_HOST_LOAD(__ldcv)
CUDA_HOST_LOAD(__ldlu)
#define CUDA_HOST_STORE(name)                                                \
  template <class T>                                                         \
  __forceinline__ void name(T* address, const std::common_type_t<T>& value) { \
    *address = value;                                                        \
  }
CUDA_HOST_STORE(__stcg)
CUDA_HOST_STORE(__stcs)
CUDA_HOST_STORE(__stwb)
CUDA_HOST_STORE(__stwt)
