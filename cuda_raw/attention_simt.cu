// Decode attention over pages without tensor cores, for every codec and architecture: see attention_run.cuh.
#include "attention_run.cuh"

template <class Key, class Value, int QUERIES, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 16 / WARPS)
    attend_pages_simt(const float* __restrict__ q, const float* __restrict__ sketched,
                      const float* __restrict__ table, const float* __restrict__ outlier_table,
                      const u8* __restrict__ pages, const i64* __restrict__ counts, const i64* __restrict__ limits,
                      const float* __restrict__ bias, float* __restrict__ partial, const Shapes shapes) {
  const QueryTile tile = query_tile<QUERIES>(shapes);
  const int split = split_of_block<QUERIES>(shapes);
  const RowCounts row = row_counts(counts, tile.row, shapes);
  const Cut cut = page_cut(row, split, shapes);
  if (cut.count == 0) return;
  const u8* record =
      pages + (((i64)tile.row * shapes.h + tile.head) * shapes.capacity + cut.first) * shapes.record_bytes;
  const int p = shapes.keys.tokens;
  const Run run = {record,   record + shapes.keys.nbytes, shapes.record_bytes, shapes.record_bytes, __ffs(p / LANES) - 1,
                   cut.count * p, row.sinks + (i64)cut.first * p};
  attend_run<Key, Value, QUERIES, WARPS>(run, tile, split, q, sketched, table, outlier_table, counts, limits, bias, partial,
                                  shapes);
}
