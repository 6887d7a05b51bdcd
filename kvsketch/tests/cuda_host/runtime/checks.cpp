// What may be accessed, and whether accesses race: arrays byte for byte, shared memory, and asynchronous copies.
#include "shadow.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "state.hpp"

namespace cuda_host {

bool quiet;

// ------------------------------------------------------------------ memory that a kernel may touch
// Cells are zero where nothing has been accessed, so that the system gives their pages at first use.
struct Free {
  void operator()(void* of) const { free(of); }
};
struct Region {  // memory with a history: overlapping arguments share one
  uintptr_t start, end;
  bool written;  // by any argument; what nobody writes needs no history
  std::unique_ptr<Cell, Free> cells;
};
struct Window {  // an argument or a shared array
  uintptr_t start;
  size_t bytes;
  std::string name;
  bool read_only;
  uint8_t* initialised;      // a flag a byte, or nullptr: all
  const uint8_t* footprint;  // a flag a byte, or nullptr: all; zero between the elements of a strided array
  Region* region;
};
static std::vector<Window> arguments, shared;
static std::vector<std::unique_ptr<Region>> regions, shared_regions;
static std::vector<std::unique_ptr<uint8_t, Free>> shared_flags;
static uintptr_t image_start, image_end;
static std::vector<uint8_t> dynamic_bytes;
static void* dynamic_start;

void* dynamic_shared() { return dynamic_start; }

static Cell* new_cells(size_t bytes) { return (Cell*)calloc(bytes ? bytes : 1, sizeof(Cell)); }

static void add_shared(uintptr_t start, size_t bytes, const std::string& name) {
  shared_flags.emplace_back((uint8_t*)calloc(bytes ? bytes : 1, 1));
  shared_regions.push_back(std::make_unique<Region>());
  *shared_regions.back() = Region{start, start + bytes, true, nullptr};
  shared.push_back({start, bytes, name, false, shared_flags.back().get(), nullptr, shared_regions.back().get()});
}

void start_grid(unsigned shared_bytes) {
  constexpr uintptr_t ALIGNMENT = 128;
  dynamic_bytes.resize(shared_bytes + ALIGNMENT);
  dynamic_start = (void*)(((uintptr_t)dynamic_bytes.data() + ALIGNMENT - 1) & ~(ALIGNMENT - 1));
  if (shared_bytes) add_shared((uintptr_t)dynamic_start, shared_bytes, "dynamic shared memory");
  if (!options.check) return;
  // Overlapping arguments become one region.
  std::vector<Window*> sorted;
  for (Window& window : arguments) sorted.push_back(&window);
  std::sort(sorted.begin(), sorted.end(), [](Window* a, Window* b) { return a->start < b->start; });
  regions.clear();
  for (Window* window : sorted) {
    uintptr_t end = window->start + window->bytes;
    if (regions.empty() || window->start >= regions.back()->end)
      regions.push_back(std::make_unique<Region>(Region{window->start, end, false, nullptr}));
    Region* region = regions.back().get();
    region->end = std::max(region->end, end);
    region->written |= !window->read_only;
    window->region = region;
  }
  for (auto& region : regions)
    if (region->written) region->cells.reset(new_cells(region->end - region->start));
}

// Shared memory starts as NaN in every type, so that reading it too early shows even unchecked.
void start_block() {
  for (Window& window : shared) {
    memset((void*)window.start, 0xff, window.bytes);
    if (!options.check) continue;
    memset(window.initialised, 0, window.bytes);
    window.region->cells.reset(new_cells(window.bytes));
  }
}

void end_grid() {
  arguments.clear();
  shared.clear();
  regions.clear();
  shared_regions.clear();
  shared_flags.clear();
}

// ------------------------------------------------------------------ finding out whose an address is
// Of several arguments over the same memory, one that may be written where a write asks.
static Window* find(uintptr_t address, Access kind) {
  auto holds = [&](const Window& window) {
    size_t at = address - window.start;
    return at < window.bytes && (!window.footprint || window.footprint[at]);
  };
  for (Window& window : shared)
    if (holds(window)) return &window;
  Window* found = nullptr;
  for (Window& window : arguments) {
    if (!holds(window)) continue;
    if (kind == Access::READ || !window.read_only) return &window;
    found = &window;
  }
  return found;
}

// The histories of the bytes of a window from an address on, or nullptr where none are kept.
static Cell* cells_of(const Window& window, uintptr_t address) {
  Cell* cells = window.region->cells.get();
  return cells ? cells + (address - window.region->start) : nullptr;
}

static std::string nearest(uintptr_t address) {
  const Window* best = nullptr;
  uintptr_t least = ~(uintptr_t)0;
  auto look = [&](const Window& window) {
    uintptr_t end = window.start + window.bytes;
    uintptr_t apart = address < window.start ? window.start - address : address >= end ? address - end : 0;
    if (apart < least) least = apart, best = &window;
  };
  for (const Window& window : shared) look(window);
  for (const Window& window : arguments) look(window);
  if (!best) return "no array was given";
  std::string at = "byte " + std::to_string((long)(address - best->start)) + " of " + best->name;
  if (address - best->start < best->bytes) return at + " lies between its elements";
  return at + " (" + std::to_string(best->bytes) + " bytes)";
}

// A place in the module's code, as Python turns it into file:line.
static size_t place(uintptr_t return_address) { return return_address - image_start - 1; }
#define PLACE "@%#zx@"

// ------------------------------------------------------------------ races
static bool happened_before(const Stamp& earlier, const Fiber& now) {
  if (!earlier.thread || earlier.thread == now.id) return true;
  uint32_t threads = (uint32_t)thread_count;
  if ((earlier.thread - 1) / threads != (now.id - 1) / threads) return !options.blocks_race;
  if (earlier.block_epoch < now.block_epoch) return true;
  return (earlier.thread - 1) % threads / WARP == now.thread.warp && earlier.warp_epoch < now.warp_epoch;
}

static void fail_race(const char* kind, const Window& window, uintptr_t address, const Stamp& earlier,
                      uintptr_t return_address) {
  uint32_t thread = earlier.thread - 1;
  cuda_host_fail("RACE %s on %s byte %zu: this access at " PLACE ", earlier one by block %u thread %u at " PLACE
                 ", no barrier between",
                 kind, window.name.c_str(), (size_t)(address - window.start), place(return_address),
                 thread / thread_count, thread % thread_count, (size_t)earlier.place);
}

static void check_order(Cell& cell, Access kind, const Window& window, uintptr_t address, const Fiber& me,
                        uintptr_t return_address) {
  bool both_atomic = kind == Access::ATOMIC && cell.atomic;
  const char* after_write = kind == Access::READ ? "read-after-write" : "write-after-write";
  if (cell.copying)
    cuda_host_fail("RACE with cp.async on %s byte %zu: access at " PLACE ", the copy issued by block %u thread %u at " PLACE
                   " has not been waited for",
                   window.name.c_str(), (size_t)(address - window.start), place(return_address),
                   (cell.write.thread - 1) / thread_count, (cell.write.thread - 1) % thread_count,
                   (size_t)cell.write.place);
  if (!both_atomic && !happened_before(cell.write, me)) fail_race(after_write, window, address, cell.write, return_address);
  if (kind == Access::READ) return;
  for (const Stamp& read : cell.reads)
    if (!happened_before(read, me)) fail_race("write-after-read", window, address, read, return_address);
}

static Stamp stamp(const Fiber& me, uintptr_t return_address) {
  return {me.id, (uint32_t)place(return_address), me.block_epoch, me.warp_epoch};
}

// ------------------------------------------------------------------ an access
static const char* name_of(Access kind) {
  return kind == Access::READ ? "read" : kind == Access::WRITE ? "write" : "atomic";
}

// The window of an access that belongs to one, or nullptr for what needs no check.
static Window* window_of(uintptr_t address, size_t bytes, Access kind, uintptr_t return_address) {
  if (on_a_stack(address)) return nullptr;
  Window* window = find(address, kind);
  if (!window) {
    if (address - image_start < image_end - image_start) return nullptr;  // constants and tables of the module
    if (address - (uintptr_t)fibers < sizeof fibers || address == (uintptr_t)&cuda_host_current) return nullptr;
  }
  size_t held = 0;
  if (window)
    for (size_t at = address - window->start; held < bytes && at + held < window->bytes; held++)
      if (window->footprint && !window->footprint[at + held]) break;
  if (held < bytes)
    cuda_host_fail("OUT OF BOUNDS %s of %zu bytes at " PLACE ": %s", name_of(kind), bytes, place(return_address),
                   nearest(address + held).c_str());
  return window;
}

void check_access(uintptr_t address, size_t bytes, Access kind, bool aligned, uintptr_t return_address) {
  Fiber* me = self();
  if (!me || !options.check || quiet || !bytes) return;
  Window* window = window_of(address, bytes, kind, return_address);
  if (!window) return;
  size_t at = address - window->start;
  if (aligned && bytes <= 16 && !(bytes & (bytes - 1)) && (address & (bytes - 1)))
    cuda_host_fail("MISALIGNED %zu-byte access at " PLACE ": byte %zu of %s", bytes, place(return_address), at,
                   window->name.c_str());
  if (kind != Access::READ && window->read_only)
    cuda_host_fail("WRITE to read-only %s at " PLACE " byte %zu", window->name.c_str(), place(return_address), at);
  Cell* cells = cells_of(*window, address);
  Stamp now = stamp(*me, return_address);
  for (size_t i = 0; i < bytes; i++) {
    if (cells) check_order(cells[i], kind, *window, address + i, *me, return_address);
    if (kind != Access::WRITE && window->initialised && !window->initialised[at + i])
      cuda_host_fail("UNINITIALISED %s at " PLACE ": byte %zu of %s", name_of(kind), place(return_address), at + i,
                     window->name.c_str());
    if (kind == Access::READ) {
      if (cells) cells[i].note_read(now, thread_count);
      continue;
    }
    cells[i].note_write(now, kind == Access::ATOMIC);
    if (window->initialised) window->initialised[at + i] = 1;
  }
  if (options.preempt_ppm && (int)(random_number() % 1000000) < options.preempt_ppm) {
    make_ready((int)me->thread.linear);
    run_another(me);
  }
}

// ------------------------------------------------------------------ cp.async
// Between issue and wait nobody may touch the destination: the bytes arrive at any time in between.
static void mark_copying(const Copy& copy, bool copying, uintptr_t return_address) {
  Window* window = window_of((uintptr_t)copy.to, copy.bytes, Access::WRITE, return_address);
  if (!window) cuda_host_fail("cp.async at " PLACE " does not copy to shared memory", place(return_address));
  for (unsigned i = 0; i < copy.bytes; i++) cells_of(*window, (uintptr_t)copy.to)[i].copying = copying;
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
  arguments.push_back({(uintptr_t)start, bytes, name, read_only != 0, initialised, footprint, nullptr});
}
CUDA_HOST_API void cuda_host_add_shared(void* start, size_t bytes, const char* name) {
  add_shared((uintptr_t)start, bytes, std::string("__shared__ ") + name);
}
