// The history of one byte: enough of it to find any access that no barrier orders before the present one.
#pragma once
#include <cstdint>

#include "state.hpp"

namespace cuda_host {

struct Stamp {
  uint32_t thread;  // Fiber::id; 0: no access yet
  uint32_t place;   // in the module's code
  uint32_t block_epoch, warp_epoch;
};

struct Cell {
  Stamp write;
  // The last read, the last one by another thread than that, the last one by another warp: if any read since the last
  // barrier is not ordered before a write, then one of these three is not either.
  Stamp reads[3];
  bool atomic;   // the write was one
  bool copying;  // an asynchronous copy to this byte is on its way

  void note_read(const Stamp& now, int threads_of_block) {
    if (reads[0].thread == now.thread) {
      reads[0] = now;
      return;
    }
    auto warp = [&](const Stamp& of) {
      uint32_t thread = of.thread - 1;
      return thread / threads_of_block * (MOST_THREADS / WARP) + thread % threads_of_block / WARP;
    };
    if (reads[0].thread && warp(reads[0]) != warp(now)) reads[2] = reads[0];
    reads[1] = reads[0];
    reads[0] = now;
  }
  void note_write(const Stamp& now, bool is_atomic) {
    write = now;
    atomic = is_atomic;
  }
};

}  // namespace cuda_host
