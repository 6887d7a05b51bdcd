// Bytes of an argument that a launch reads or writes, where they are counted.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cuda_host {

struct Traffic {
  uint64_t requested;  // by all threads: a byte as often as it is asked for
  uint64_t by_block;   // a byte once for each block that asks for it
  uint64_t distinct;   // a byte once
};

struct TrafficCounter {
  Traffic* traffic = nullptr;  // nullptr: nothing is counted
  uint32_t* blocks = nullptr;  // of each byte, one more than the last block that asked for it, which run in turn; 0: none

  void add(size_t at, size_t bytes, uint32_t block) const {
    if (!traffic) return;
    traffic->requested += bytes;
    for (uint32_t* of = blocks + at; of != blocks + at + bytes; of++) {
      traffic->distinct += !*of;
      traffic->by_block += *of != block + 1;
      *of = block + 1;
    }
  }
};

}  // namespace cuda_host
