// What the parts of the runtime share: the threads of the running block, and the options of the launch.
#pragma once
#include <string>
#include <vector>

#include "../device/abi.hpp"

namespace cuda_host {

// Which ready thread goes on: the one that has waited longest, the last one to become ready, or any.
enum Order { ROUND_ROBIN, REVERSE, RANDOM };

struct Options {
  int order;
  unsigned seed;
  int preempt_ppm;   // how many of a million checked accesses give way to another thread
  int check;         // whether accesses are checked; the module must be built for it
  int blocks_race;   // whether accesses by two blocks race; no for blocks that wait for one another through memory
  int strict_exit;   // whether a collective may not name lanes that have returned
};
extern Options options;

constexpr int MOST_THREADS = 1024, WARP = 32;
constexpr unsigned MOST_SHARED_BYTES = 227 * 1024;

struct Copy {  // cp.async
  void* to;
  const void* from;
  unsigned bytes, from_bytes;
};

enum class State { READY, IN_COLLECTIVE, IN_BARRIER, DONE };

// A CUDA thread, run on a stack of its own. Accesses are ordered by how many barriers of its block it has passed, and
// by which barriers (__syncwarp) of the lanes of its warp it knows of.
struct Fiber {
  cuda_host_thread thread;  // first: cuda_host_current points to it
  State state;
  char* stack;
  uint32_t block;  // its block's number in the grid
  uint32_t block_epoch;
  uint32_t passed[WARP];  // barriers of each lane of the warp, as far as this one knows
  const char *what, *file;  // where it waits
  int line;
  unsigned mask;
  int predicate, votes[3];
  std::vector<std::vector<Copy>> copies;  // committed groups, oldest first, and the open one
};
extern Fiber fibers[MOST_THREADS];
extern int thread_count, alive;

inline Fiber* self() { return (Fiber*)cuda_host_current; }

// Fibers (fibers.cpp).
constexpr size_t STACK = 128 << 10;  // bytes
extern char* stacks;
inline bool on_a_stack(uintptr_t address) { return address - (uintptr_t)stacks < STACK * MOST_THREADS; }
uint32_t random_number();
void make_ready(int thread);
void run_another(Fiber* me);  // returns when `me` is run again
void fail_deadlocked();       // (collectives.cpp)

// Collectives (collectives.cpp).
void reset_collectives();
void join_warp(const Fiber& fiber);
void leave(const Fiber& fiber);  // the thread returned: what waited only for it goes on

// Checks (checks.cpp). A block's shared memory starts uninitialised.
extern bool quiet;  // accesses belong to the harness
void start_grid(unsigned shared_bytes);
void start_block();
void end_grid();
void* dynamic_shared();
enum class Access { READ, WRITE, ATOMIC };
void check_access(uintptr_t address, size_t bytes, Access kind, bool aligned, uintptr_t return_address);
// An asynchronous copy is issued, and arrives.
void begin_copy(const Copy& copy, uintptr_t return_address);
void end_copy(const Copy& copy, uintptr_t return_address);

}  // namespace cuda_host
