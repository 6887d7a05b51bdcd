// Where the numbers and the records of pages are.
#include "side.cuh"
#include "units.cuh"

// The fields of PLACES in _places.py, in their order: numbers (rows, heads, pages * tokens, width) and records
// (rows, heads, pages, bytes), each with steps of its own; channels and bytes are neighbours.
struct Places {
  i64 x_row, x_head, x_token;                 // in numbers
  i64 record_row, record_head, record_page;  // in bytes
  int rows, heads, pages, dtype;
  int aligned, unused;  // whether all rows of numbers begin at a multiple of 16 bytes
};

__device__ __forceinline__ i64 numbers_at(const Places& places, int head, i64 token) {
  return head / places.heads * places.x_row + head % places.heads * places.x_head + token * places.x_token;
}

__device__ __forceinline__ i64 record_at(const Places& places, int head, i64 page) {
  return head / places.heads * places.record_row + head % places.heads * places.record_head +
         page * places.record_page;
}

// How many of an oct's channels there are.
__device__ __forceinline__ int channels_of(int first, int width) { return min(max(width - first, 0), OCT); }
