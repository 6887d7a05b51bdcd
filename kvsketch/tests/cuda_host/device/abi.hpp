// What kernels, built once a module, and the runtime, built once for all, agree on.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#define CUDA_HOST_API extern "C" __attribute__((visibility("default")))

// What a CUDA thread knows about itself.
struct cuda_host_thread {
  uint3 thread_idx, block_idx;
  dim3 block_dim, grid_dim;
  unsigned linear, lane, warp;  // linear index in the block; lane = linear % 32, warp = linear / 32
  void* dynamic_shared;
};

// One launch; arguments[i] points to the value of parameter i.
struct cuda_host_launch {
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  void** arguments;
};

// Runs once for the lanes in `mask` when the last of them has arrived; lane i's data is data[i].
typedef void (*cuda_host_collective_fn)(unsigned mask, void** data);

// The runtime, as kernels see it.
extern "C" {
extern cuda_host_thread* cuda_host_current;
// The number of the planted bug that is switched on, or 0.
int cuda_host_planted();
int cuda_host_run(const cuda_host_launch* launch, void (*body)(void*), void* argument);
// votes: how many threads gave a true predicate, whether all did, whether any did
void cuda_host_barrier(int predicate, int votes[3], const char* file, int line);
// orders_memory: whether what the lanes wrote before is seen by the others afterwards, as for __syncwarp
void cuda_host_collective(cuda_host_collective_fn run, unsigned mask, void* data, int orders_memory, const char* what,
                          const char* file, int line);
void cuda_host_fail(const char* format, ...) __attribute__((format(printf, 1, 2), noreturn));
// Accesses that the compiler does not report by itself, made on behalf of the code that returns to `caller`; by the
// calling code where that is null.
void cuda_host_atomic(const volatile void* address, unsigned bytes, void* caller);
void cuda_host_read(const void* address, size_t bytes, void* caller);
void cuda_host_write(void* address, size_t bytes, void* caller);
void cuda_host_copy_async(void* to, const void* from, unsigned bytes, unsigned from_bytes);
void cuda_host_copy_commit();
void cuda_host_copy_wait(unsigned keep);
}
