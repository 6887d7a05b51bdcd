// The history of memory: enough of it to find any access that no barrier orders before the present one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "state.hpp"

namespace cuda_host {

// Who accessed, from where in the module's code, and how many barriers that thread had passed by then.
struct Stamp {
  uint32_t block;
  uint16_t thread;  // in the block
  bool made;        // whether there was an access
  uint32_t place, block_epoch, passed;  // barriers of the block, and of the thread's own lane
};

struct Cell {
  Stamp write;
  // The last read, the last one by another thread than that, the last one by another warp: if any read since the last
  // barrier is not ordered before a write, then one of these three is not either (where warps meet as a whole).
  Stamp reads[3];
  bool atomic;   // the write was one
  bool copying;  // the write is an asynchronous copy that has not been waited for

  void note_read(const Stamp& now) {
    Stamp& last = reads[0];
    if (last.thread != now.thread || last.block != now.block || !last.made) {
      if (last.made && (last.block != now.block || last.thread / WARP != now.thread / WARP)) reads[2] = last;
      reads[1] = last;
    }
    last = now;
  }
};

// The cells of a piece of memory: one a word of 4 bytes, and one a byte where a part of a word was accessed.
// They are zero, so no access, where nothing was done, and the system gives their pages at first use.
class Shadow {
 public:
  Shadow() = default;
  Shadow(uintptr_t start, uintptr_t end) : start_(start & ~(uintptr_t)3) {
    size_t words = (end - start_ + 3) / 4;
    words_.reset((Cell*)calloc(words, sizeof(Cell)));
    bytes_.reset((Cell*)calloc(4 * words, sizeof(Cell)));
    split_.reset((uint8_t*)calloc(words, 1));
  }
  explicit operator bool() const { return (bool)words_; }

  // visit(cell, address) for all cells of some bytes.
  template <class Visit>
  void visit(uintptr_t address, size_t bytes, Visit visit) {
    while (bytes) {
      size_t word = (address - start_) / 4, part = std::min<size_t>(bytes, 4 - (address & 3));
      Cell* cells = &bytes_.get()[4 * word];
      if (part == 4 && !split_.get()[word]) {
        visit(words_.get()[word], address);
      } else {
        if (!split_.get()[word]) std::fill(cells, cells + 4, words_.get()[word]);
        split_.get()[word] = 1;
        for (size_t i = 0; i < part; i++) visit(cells[(address & 3) + i], address + i);
      }
      address += part;
      bytes -= part;
    }
  }

 private:
  struct Free {
    void operator()(void* of) const { free(of); }
  };
  uintptr_t start_ = 0;
  std::unique_ptr<Cell, Free> words_, bytes_;
  std::unique_ptr<uint8_t, Free> split_;
};

}  // namespace cuda_host
