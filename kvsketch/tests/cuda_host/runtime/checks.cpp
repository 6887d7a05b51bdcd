// What may be accessed, and whether accesses race: arrays byte for byte, shared memory, and asynchronous copies.
#include <algorithm>
#include <cstring>
#include <list>

#include "shadow.hpp"
#include "state.hpp"
#include "traffic.hpp"

namespace cuda_host {

bool quiet;

// ------------------------------------------------------------------ memory that a kernel may touch
struct Region {  // memory with one history: overlapping arguments share it
  uintptr_t start, end;
  bool written;  // by any argument; what nobody writes needs no history
  Shadow shadow;
};
struct Window {  // an argument or a shared array
  uintptr_t start;
  size_t bytes;
  std::string name;
  bool read_only, shared;
  uint8_t* initialised;      // a flag a byte, or nullptr: all
  const uint8_t* footprint;  // a flag a byte, or nullptr: all; zero between the elements of a strided array
  Region* region;
  TrafficCounter read, written;
};
static std::vector<Window> arguments, shared_arrays;
static std::list<Region> regions;
static std::list<std::vector<uint8_t>> shared_flags;
static const Window* last_found;
static uintptr_t image_start, image_end;
static std::vector<uint8_t> dynamic_bytes;
static void* dynamic_start;

void* dynamic_shared() { return dynamic_start; }

static void add_shared(uintptr_t start, size_t bytes, const std::string& name) {
  shared_flags.emplace_back(bytes);
  regions.push_back({start, start + bytes, true, {}});
  shared_arrays.push_back({start, bytes, name, false, true, shared_flags.back().data(), nullptr, &regions.back(), {}, {}});
}

void start_grid(unsigned shared_bytes) {
  constexpr uintptr_t ALIGNMENT = 128;
  dynamic_bytes.resize(shared_bytes + ALIGNMENT);
  dynamic_start = (void*)(((uintptr_t)dynamic_bytes.data() + ALIGNMENT - 1) & ~(ALIGNMENT - 1));
  if (shared_bytes) add_shared((uintptr_t)dynamic_start, shared_bytes, "dynamic shared memory");
  if (!options.check) return;
  std::vector<Window*> sorted;
  for (Window& window : arguments) sorted.push_back(&window);
  std::sort(sorted.begin(), sorted.end(), [](Window* a, Window* b) { return a->start < b->start; });
  Region* region = nullptr;
  for (Window* window : sorted) {
    uintptr_t end = window->start + window->bytes;
    if (!region || window->start >= region->end) {
      regions.push_back({window->start, end, false, {}});
      region = &regions.back();
    }
    region->end = std::max(region->end, end);
    region->written |= !window->read_only;
    window->region = region;
  }
  for (Region& each : regions)
    if (each.written) each.shadow = Shadow(each.start, each.end);
}

// Shared memory starts as NaN in every type, so that reading it too early shows even unchecked.
void start_block() {
  for (Window& window : shared_arrays) {
    memset((void*)window.start, 0xff, window.bytes);
    memset(window.initialised, 0, window.bytes);
  }
}

void end_grid() {
  arguments.clear();
  shared_arrays.clear();
  regions.clear();
  shared_flags.clear();
  last_found = nullptr;
}

// ------------------------------------------------------------------ finding out whose an address is
static bool holds(const Window& window, uintptr_t address) {
  size_t at = address - window.start;
  return at < window.bytes && (!window.footprint || window.footprint[at]);
}

// Of several arguments over the same memory, one that may be written where a write asks.
static const Window* find(uintptr_t address, Access kind) {
  if (last_found && holds(*last_found, address) && (kind == Access::READ || !last_found->read_only)) return last_found;
  for (const Window& window : shared_arrays)
    if (holds(window, address)) return last_found = &window;
  const Window* found = nullptr;
  for (const Window& window : arguments) {
    if (!holds(window, address)) continue;
    found = &window;
    if (kind == Access::READ || !window.read_only) break;
  }
  if (found) last_found = found;
  return found;
}

static std::string nearest(uintptr_t address) {
  const Window* best = nullptr;
  uintptr_t least = ~(uintptr_t)0;
  for (const auto* windows : {&shared_arrays, &arguments})
    for (const Window& window : *windows) {
      uintptr_t end = window.start + window.bytes;
      uintptr_t apart = address < window.start ? window.start - address : address >= end ? address - end : 0;
      if (apart < least) least = apart, best = &window;
    }
  if (!best) return "no array was given";
  std::string at = "byte " + std::to_string((long)(address - best->start)) + " of " + best->name;
  if (address - best->start < best->bytes) return at + " lies between its elements";
  return at + " (" + std::to_string(best->bytes) + " bytes)";
}

// A place in the module's code, as Python turns it into file:line.
static size_t place(uintptr_t return_address) { return return_address - image_start - 1; }
#define PLACE "@%#zx@"

// ------------------------------------------------------------------ races
static bool happened_before(const Stamp& earlier, const Fiber& now, const Window& window) {
  if (!earlier.made) return true;
  if (earlier.block != now.block) return window.shared || !options.blocks_race;
  if (earlier.thread == now.thread.linear || earlier.block_epoch < now.block_epoch) return true;
  return earlier.thread / WARP == now.thread.warp && earlier.passed < now.passed[earlier.thread % WARP];
}

static void fail_race(const char* kind, const Window& window, uintptr_t address, const Stamp& earlier,
                      uintptr_t return_address) {
  cuda_host_fail("RACE %s on %s byte %zu: this access at " PLACE ", earlier one by block %u thread %u at " PLACE
                 ", no barrier between",
                 kind, window.name.c_str(), (size_t)(address - window.start), place(return_address), earlier.block,
                 earlier.thread, (size_t)earlier.place);
}

static void check_order(const Cell& cell, Access kind, const Window& window, uintptr_t address, const Fiber& me,
                        uintptr_t return_address) {
  if (cell.copying && cell.write.block == me.block)
    fail_race("with cp.async that has not been waited for", window, address, cell.write, return_address);
  if (!(kind == Access::ATOMIC && cell.atomic) && !happened_before(cell.write, me, window))
    fail_race(kind == Access::READ ? "read-after-write" : "write-after-write", window, address, cell.write,
              return_address);
  if (kind == Access::READ) return;
  for (const Stamp& read : cell.reads)
    if (!happened_before(read, me, window)) fail_race("write-after-read", window, address, read, return_address);
}

// ------------------------------------------------------------------ an access
static const char* name_of(Access kind) {
  return kind == Access::READ ? "read" : kind == Access::WRITE ? "write" : "atomic";
}

// The window that all of an access lies in, or nullptr for what needs no check.
static const Window* window_of(uintptr_t address, size_t bytes, Access kind, uintptr_t return_address) {
  if (on_a_stack(address)) return nullptr;
  if (address - (uintptr_t)fibers < sizeof fibers || address == (uintptr_t)&cuda_host_current) return nullptr;
  const Window* window = find(address, kind);
  if (!window && address - image_start < image_end - image_start) return nullptr;  // constants and tables
  size_t held = 0;
  if (window && !window->footprint)
    held = window->start + window->bytes - address;
  else if (window)
    while (held < bytes && holds(*window, address + held)) held++;
  if (held < bytes)
    cuda_host_fail("OUT OF BOUNDS %s of %zu bytes at " PLACE ": %s", name_of(kind), bytes, place(return_address),
                   nearest(address + held).c_str());
  return window;
}

void check_access(uintptr_t address, size_t bytes, Access kind, bool aligned, uintptr_t return_address) {
  if (on_a_stack(address)) return;  // most accesses, as nothing is kept in registers
  Fiber* me = self();
  if (!me || !options.check || quiet || !bytes) return;
  const Window* window = window_of(address, bytes, kind, return_address);
  if (!window) return;
  size_t at = address - window->start;
  if (aligned && bytes <= 16 && !(bytes & (bytes - 1)) && (address & (bytes - 1)))
    cuda_host_fail("MISALIGNED %zu-byte access at " PLACE ": byte %zu of %s", bytes, place(return_address), at,
                   window->name.c_str());
  if (kind != Access::READ && window->read_only)
    cuda_host_fail("WRITE to read-only %s at " PLACE " byte %zu", window->name.c_str(), place(return_address), at);
  Shadow& shadow = window->region->shadow;
  Stamp now{me->block,        (uint16_t)me->thread.linear, true, (uint32_t)place(return_address),
            me->block_epoch, me->passed[me->thread.lane]};
  if (shadow)
    shadow.visit(address, bytes, [&](Cell& cell, uintptr_t of) {
      check_order(cell, kind, *window, of, *me, return_address);
      if (kind == Access::READ) return cell.note_read(now);
      cell.write = now;
      cell.atomic = kind == Access::ATOMIC;
      cell.copying = false;
    });
  if (uint8_t* flags = window->initialised) {
    if (kind != Access::WRITE)
      if (const void* first = memchr(flags + at, 0, bytes))
        cuda_host_fail("UNINITIALISED %s at " PLACE ": byte %zu of %s", name_of(kind), place(return_address),
                       (size_t)((const uint8_t*)first - flags), window->name.c_str());
    if (kind != Access::READ) memset(flags + at, 1, bytes);
  }
  if (kind != Access::WRITE) window->read.add(at, bytes, me->block);
  if (kind != Access::READ) window->written.add(at, bytes, me->block);
  if (options.preempt_ppm && (int)(random_number() % 1000000) < options.preempt_ppm) {
    make_ready((int)me->thread.linear);
    run_another(me);
  }
}

// ------------------------------------------------------------------ cp.async
// Between issue and wait nobody may touch the destination: the bytes arrive at any time in between.
static void mark_copying(const Copy& copy, bool copying, uintptr_t return_address) {
  const Window* window = window_of((uintptr_t)copy.to, copy.bytes, Access::WRITE, return_address);
  if (!window || !window->shared)
    cuda_host_fail("cp.async at " PLACE " does not copy to shared memory", place(return_address));
  window->region->shadow.visit((uintptr_t)copy.to, copy.bytes, [&](Cell& cell, uintptr_t) { cell.copying = copying; });
}
void begin_copy(const Copy& copy, uintptr_t return_address) {
  check_access((uintptr_t)copy.from, copy.from_bytes, Access::READ, false, return_address);
  check_access((uintptr_t)copy.to, copy.bytes, Access::WRITE, false, return_address);
  if (options.check) mark_copying(copy, true, return_address);
}
void end_copy(const Copy& copy, uintptr_t return_address) {
  if (options.check) mark_copying(copy, false, return_address);
  check_access((uintptr_t)copy.to, copy.bytes, Access::WRITE, false, return_address);
  memset(copy.to, 0, copy.bytes);
  memcpy(copy.to, copy.from, copy.from_bytes);
}

}  // namespace cuda_host

using namespace cuda_host;

// ------------------------------------------------------------------ what Python declares before a launch
CUDA_HOST_API void cuda_host_set_image(void* start, void* end) {
  image_start = (uintptr_t)start;
  image_end = (uintptr_t)end;
  end_grid();
}
CUDA_HOST_API void cuda_host_add_argument(void* start, size_t bytes, const char* name, int read_only,
                                          uint8_t* initialised, const uint8_t* footprint) {
  arguments.push_back({(uintptr_t)start, bytes, name, read_only != 0, false, initialised, footprint, nullptr, {}, {}});
}
// Counts what is done with the argument that was added last.
CUDA_HOST_API void cuda_host_count_argument(Traffic* read, uint32_t* reading_blocks, Traffic* written,
                                            uint32_t* writing_blocks) {
  arguments.back().read = {read, reading_blocks};
  arguments.back().written = {written, writing_blocks};
}
CUDA_HOST_API void cuda_host_add_shared(void* start, size_t bytes, const char* name) {
  add_shared((uintptr_t)start, bytes, std::string("__shared__ ") + name);
}
