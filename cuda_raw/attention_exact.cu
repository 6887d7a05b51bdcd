// Attention over a row's exact tokens, its first ones (sinks) and its newest (the window).
#include "attention_run.cuh"

template <class KeyNumber, class ValueNumber, int QUERIES, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    attend_exact(const float* __restrict__ q, const KeyNumber* __restrict__ sink_k,
                 const ValueNumber* __restrict__ sink_v, const KeyNumber* __restrict__ window_k,
                 const ValueNumber* __restrict__ window_v, const i64* __restrict__ counts,
                 const i64* __restrict__ limits, const float* __restrict__ bias, float* __restrict__ partial,
                 const Shapes shapes) {
  const QueryTile tile = query_tile<QUERIES>(shapes);
  const int split = split_of_block<QUERIES>(shapes);
  const RowCounts row = row_counts(counts, tile.row, shapes);
  const bool of_sinks = split < shapes.sink_splits;
  const Cut cut = exact_cut(row, split, shapes);
  if (cut.count == 0) return;
  const i64 head = (i64)tile.row * shapes.h + tile.head;
  const i64 token =
      of_sinks ? head * shapes.sink_room + cut.first : head * shapes.window_room + row.window_start + cut.first;
  const i64 position = cut.first + (of_sinks ? 0 : row.sinks + row.pages * shapes.keys.tokens);
  const KeyNumber* k = (of_sinks ? sink_k : window_k) + token * shapes.keys.width;
  const ValueNumber* v = (of_sinks ? sink_v : window_v) + token * shapes.values.width;
  const Run run = {reinterpret_cast<const u8*>(k),
                   reinterpret_cast<const u8*>(v),
                   (i64)sizeof(KeyNumber) * LANES * shapes.keys.width,
                   (i64)sizeof(ValueNumber) * LANES * shapes.values.width,
                   0,
                   cut.count,
                   position};
  attend_run<ExactKeys<KeyNumber>, ExactValues<ValueNumber>, QUERIES, WARPS>(
      run, tile, shapes.page_splits + split, q, nullptr, nullptr, nullptr, counts, limits, bias, partial, shapes);
}
