// Block barriers and warp collectives, and the report when threads wait for one another forever.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "state.hpp"

namespace cuda_host {

// A collective that some of its lanes have reached. Lanes meet where function, mask and line are the same.
struct Meeting {
  cuda_host_collective_fn run;
  unsigned mask, arrived;
  int line;
  bool orders_memory;
};
struct Warp {
  unsigned live;
  void* data[WARP];
  std::vector<Meeting> meetings;
};
static Warp warps[MOST_THREADS / WARP];
static int at_barrier, first_at_barrier;

void reset_collectives() {
  at_barrier = 0;
  for (Warp& warp : warps) {
    warp.live = 0;
    warp.meetings.clear();
  }
}
void join_warp(const Fiber& fiber) { warps[fiber.thread.warp].live |= 1u << fiber.thread.lane; }

// ------------------------------------------------------------------ block barriers
static void release_barrier() {
  int count = 0, all = 1, any = 0;
  uint32_t epoch = 0;
  for (int i = 0; i < thread_count; i++) {
    const Fiber& fiber = fibers[i];
    if (fiber.state != State::IN_BARRIER) continue;
    count += fiber.predicate != 0;
    all &= fiber.predicate != 0;
    any |= fiber.predicate != 0;
    if (fiber.block_epoch > epoch) epoch = fiber.block_epoch;
  }
  for (int i = 0; i < thread_count; i++) {
    Fiber& fiber = fibers[i];
    if (fiber.state != State::IN_BARRIER) continue;
    fiber.votes[0] = count, fiber.votes[1] = all, fiber.votes[2] = any;
    fiber.block_epoch = epoch + 1;
    fiber.state = State::READY;
    make_ready(i);
  }
  at_barrier = 0;
}

// ------------------------------------------------------------------ warp collectives
// The lanes of a warp that meet at a barrier: each has passed one more, and knows what any of them knew.
static void tell_one_another(int number, unsigned lanes) {
  uint32_t known[WARP] = {};
  for (unsigned left = lanes; left; left &= left - 1) {
    int lane = __builtin_ctz(left);
    Fiber& fiber = fibers[number * WARP + lane];
    fiber.passed[lane]++;
    for (int i = 0; i < WARP; i++) known[i] = std::max(known[i], fiber.passed[i]);
  }
  for (unsigned left = lanes; left; left &= left - 1)
    std::copy(known, known + WARP, fibers[number * WARP + __builtin_ctz(left)].passed);
}

// Runs meeting k when all of its lanes that are still there have arrived; `arriving` goes on without queueing.
static bool try_to_run(Warp& warp, int number, size_t k, int arriving) {
  Meeting meeting = warp.meetings[k];
  if (!meeting.arrived || meeting.arrived != (meeting.mask & warp.live)) return false;
  warp.meetings.erase(warp.meetings.begin() + (long)k);
  quiet = true;
  meeting.run(meeting.arrived, warp.data);
  quiet = false;
  if (meeting.orders_memory && options.check) tell_one_another(number, meeting.arrived);
  for (unsigned left = meeting.arrived; left; left &= left - 1) {
    int i = number * WARP + __builtin_ctz(left);
    fibers[i].state = State::READY;
    if (i != arriving) make_ready(i);
  }
  return true;
}

void leave(const Fiber& fiber) {
  Warp& warp = warps[fiber.thread.warp];
  warp.live &= ~(1u << fiber.thread.lane);
  for (size_t k = 0; k < warp.meetings.size();)
    if (!try_to_run(warp, (int)fiber.thread.warp, k, -1)) k++;
  if (at_barrier && at_barrier == alive) release_barrier();
}

// ------------------------------------------------------------------ deadlock
static bool wait_alike(const Fiber& a, const Fiber& b) {
  if (a.state != b.state) return false;
  return a.state == State::DONE || (a.what == b.what && a.line == b.line && a.mask == b.mask);
}
void fail_deadlocked() {
  std::string report = "DEADLOCK:";
  for (int i = 0, end; i < thread_count; i = end) {
    for (end = i + 1; end < thread_count && wait_alike(fibers[i], fibers[end]);) end++;
    const Fiber& fiber = fibers[i];
    char text[512];
    int used = snprintf(text, sizeof text, "\n  threads %d..%d: ", i, end - 1);
    if (fiber.state == State::DONE)
      snprintf(text + used, sizeof text - used, "returned");
    else if (fiber.state == State::IN_BARRIER)
      snprintf(text + used, sizeof text - used, "waiting at __syncthreads  %s:%d", fiber.file, fiber.line);
    else
      snprintf(text + used, sizeof text - used, "waiting at %s mask 0x%08x  %s:%d", fiber.what, fiber.mask, fiber.file,
               fiber.line);
    report += text;
  }
  cuda_host_fail("%s", report.c_str());
}

}  // namespace cuda_host

using namespace cuda_host;

CUDA_HOST_API void cuda_host_barrier(int predicate, int votes[3], const char* file, int line) {
  Fiber* me = self();
  if (at_barrier) {
    const Fiber& first = fibers[first_at_barrier];
    if (first.line != line || (first.file != file && strcmp(first.file, file)))
      cuda_host_fail("DIVERGENT __syncthreads: this thread is at %s:%d but thread %d waits at %s:%d", file, line,
                     first_at_barrier, first.file, first.line);
  } else {
    first_at_barrier = (int)me->thread.linear;
  }
  me->state = State::IN_BARRIER;
  me->what = "__syncthreads", me->file = file, me->line = line, me->mask = 0, me->predicate = predicate;
  if (++at_barrier == alive) release_barrier();
  run_another(me);
  memcpy(votes, me->votes, sizeof me->votes);
}

CUDA_HOST_API void cuda_host_collective(cuda_host_collective_fn run, unsigned mask, void* data, int orders_memory,
                                        const char* what, const char* file, int line) {
  Fiber* me = self();
  Warp& warp = warps[me->thread.warp];
  unsigned bit = 1u << me->thread.lane;
  if (!(mask & bit))
    cuda_host_fail("%s at %s:%d: calling lane %u is not in its own mask 0x%08x", what, file, line, me->thread.lane,
                   mask);
  if (options.strict_exit && (mask & ~warp.live))
    cuda_host_fail("%s at %s:%d: mask 0x%08x names lanes that have returned", what, file, line, mask);
  me->state = State::IN_COLLECTIVE;
  me->what = what, me->file = file, me->line = line, me->mask = mask;
  warp.data[me->thread.lane] = data;
  size_t k = 0;
  for (; k < warp.meetings.size(); k++) {
    const Meeting& of = warp.meetings[k];
    if (of.run == run && of.mask == mask && of.line == line && !(of.arrived & bit)) break;
  }
  if (k == warp.meetings.size()) warp.meetings.push_back({run, mask, 0, line, orders_memory != 0});
  warp.meetings[k].arrived |= bit;
  if (!try_to_run(warp, (int)me->thread.warp, k, (int)me->thread.linear)) return run_another(me);
  if (options.order == RANDOM && random_number() % 4 == 0) {  // the last to arrive need not be the first to go on
    make_ready((int)me->thread.linear);
    run_another(me);
  }
}
