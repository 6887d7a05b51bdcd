// Every CUDA thread is a fiber: blocks run one after another, the threads of a block by turns.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "state.hpp"
#include "switch.hpp"

CUDA_HOST_API cuda_host_thread* cuda_host_current;
cuda_host_thread* cuda_host_current;

namespace cuda_host {

Options options;
Fiber fibers[MOST_THREADS];
int thread_count, alive;

static Context contexts[MOST_THREADS], main_context;
static void (*body)(void*);
static void* body_argument;

static char message[16384];
static bool failed;

// ------------------------------------------------------------------ stacks
static constexpr size_t PAGE = 4096;  // the lowest one of a stack is a guard
char* stacks;

static void make_stacks() {
  stacks = (char*)mmap(nullptr, STACK * MOST_THREADS, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (int i = 0; i < MOST_THREADS; i++) {
    mprotect(stacks + i * STACK, PAGE, PROT_NONE);
    fibers[i].stack = stacks + i * STACK + PAGE;
  }
}

// ------------------------------------------------------------------ who goes on
static uint64_t random_state;
uint32_t random_number() {  // xorshift
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 16);
}

static int ready[2 * MOST_THREADS], first_ready, end_ready, ready_count;  // a ring
void make_ready(int thread) {
  ready[end_ready] = thread;
  end_ready = (end_ready + 1) % (2 * MOST_THREADS);
  ready_count++;
}
static int take_ready() {
  if (options.order == RANDOM)
    std::swap(ready[(first_ready + random_number() % ready_count) % (2 * MOST_THREADS)], ready[first_ready]);
  ready_count--;
  if (options.order == REVERSE) {
    end_ready = (end_ready + 2 * MOST_THREADS - 1) % (2 * MOST_THREADS);
    return ready[end_ready];
  }
  int thread = ready[first_ready];
  first_ready = (first_ready + 1) % (2 * MOST_THREADS);
  return thread;
}

static void go(Fiber* from, Fiber* to) {  // nullptr: the caller of the launch
  cuda_host_current = to ? &to->thread : nullptr;
  switch_context(from ? contexts[from - fibers] : main_context, to ? contexts[to - fibers] : main_context);
}
void run_another(Fiber* me) {
  if (ready_count) {
    Fiber* other = &fibers[take_ready()];
    if (other != me) go(me, other);
    return;
  }
  if (alive) fail_deadlocked();
  go(me, nullptr);
}

// ------------------------------------------------------------------ a block
static void run_thread() {
  body(body_argument);
  Fiber* me = self();
  me->state = State::DONE;
  alive--;
  leave(*me);
  run_another(me);
  abort();
}

static void run_block(const cuda_host_launch& launch, uint3 block, uint32_t number) {
  start_block();
  reset_collectives();
  first_ready = end_ready = ready_count = 0;
  alive = thread_count;
  const unsigned *size = launch.block, *grid = launch.grid;
  for (unsigned i = 0; i < (unsigned)thread_count; i++) {
    Fiber& fiber = fibers[i];
    uint3 thread{i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
    fiber.thread = {thread, block, {size[0], size[1], size[2]}, {grid[0], grid[1], grid[2]}, i, i % WARP, i / WARP,
                    dynamic_shared()};
    fiber.state = State::READY;
    fiber.block = number;
    fiber.block_epoch = 0;
    std::fill(fiber.passed, fiber.passed + WARP, 0u);
    if (fiber.copies.size() != 1 || !fiber.copies[0].empty()) fiber.copies.assign(1, {});
    make_context(contexts[i], fiber.stack, STACK - PAGE, run_thread);
    make_ready((int)i);
    join_warp(fiber);
  }
  go(nullptr, &fibers[take_ready()]);
}

// Blocks are promised no order either.
static std::vector<uint32_t> order_of_blocks(size_t count) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (options.order == REVERSE) std::reverse(order.begin(), order.end());
  if (options.order == RANDOM)
    for (size_t i = count; i > 1; i--) std::swap(order[i - 1], order[random_number() % i]);
  return order;
}

}  // namespace cuda_host

using namespace cuda_host;

CUDA_HOST_API int cuda_host_run(const cuda_host_launch* launch, void (*of)(void*), void* argument) {
  if (!stacks) make_stacks();
  body = of;
  body_argument = argument;
  failed = quiet = false;
  message[0] = 0;
  thread_count = (int)(launch->block[0] * launch->block[1] * launch->block[2]);
  random_state = 88172645463325252ull ^ (options.seed + 1) * 0x9E3779B97F4A7C15ull;
  start_grid(launch->shared_bytes);
  const unsigned* grid = launch->grid;
  for (uint32_t number : order_of_blocks((size_t)grid[0] * grid[1] * grid[2])) {
    if (failed) break;
    run_block(*launch, {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]}, number);
  }
  end_grid();
  cuda_host_current = nullptr;
  return failed;
}

// The first failure ends the launch: its threads are left where they are.
CUDA_HOST_API void cuda_host_fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  if (!failed) {
    size_t used = 0;
    if (cuda_host_current) {
      const uint3 &b = cuda_host_current->block_idx, &t = cuda_host_current->thread_idx;
      used = snprintf(message, sizeof message, "[block (%u,%u,%u) thread (%u,%u,%u)] ", b.x, b.y, b.z, t.x, t.y, t.z);
    }
    vsnprintf(message + used, sizeof message - used, format, values);
  }
  va_end(values);
  failed = true;
  if (cuda_host_current) go(self(), nullptr);
  abort();
}

static int planted;
CUDA_HOST_API int cuda_host_planted() { return planted; }
CUDA_HOST_API void cuda_host_plant(int number) { planted = number; }
CUDA_HOST_API const char* cuda_host_message() { return message; }
CUDA_HOST_API void cuda_host_set_options(const Options* to) { options = *to; }
