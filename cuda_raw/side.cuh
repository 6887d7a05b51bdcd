// What a kernel is told of one side, keys or values, of a page.
#include "common.cuh"

// The fields of kvsketch.layout.SideSpec in their order; offsets are in bytes from the side's first byte.
struct SideSpec {
  int kind, tokens, width, nbytes, dtype, bits, group, groups, rows, codes, scale, zero, m, norms, outliers, outlier_m,
      outlier_codes, outlier_norms, channels, channel_bytes;
};
