"""The compiled end of fused attention: how the runs of tokens of a head are joined."""

from __future__ import annotations

import numpy as np

from kvsketch.numba_cpu._compile import kernel, kernel_part
from kvsketch.numba_cpu.simd import stay_apart, store_float


@kernel_part()
def join(states, mixes, sink_logits, s, sums, out):  # type: ignore[no-untyped-def]
    """What :func:`join_parts` does."""
    stay_apart()
    b, h, runs, count, dv = mixes.shape
    weights = np.empty(runs, np.float32)
    for row in range(b):
        for head in range(h):
            for i in range(count):
                sink = sink_logits[(head * count + i) // s] if sink_logits.size > 0 else np.float32(-np.inf)
                highest = sink
                for run in range(runs):
                    highest = max(highest, states[row, head, run, i, 0])
                if highest == -np.inf:
                    weights[:] = 0
                    total = np.float32(1)
                else:
                    total = np.float32(2.0 ** (sink - highest))
                    for run in range(runs):
                        weights[run] = np.float32(2.0 ** (states[row, head, run, i, 0] - highest))
                        total += weights[run] * states[row, head, run, i, 1]
                if sums != 0:
                    store_float(sums + 4 * ((row * h + head) * count + i), highest + np.float32(np.log2(total)))
                at = out + 4 * dv * ((row * h + head) * count + i)
                for c in range(dv):
                    mixed = np.float32(0)
                    for run in range(runs):
                        mixed += weights[run] * mixes[row, head, run, i, c]
                    store_float(at + 4 * c, mixed / total)


@kernel()
def join_parts(states, mixes, sink_logits, s, sums, out):  # type: ignore[no-untyped-def]
    """Join the runs of each head by log-sum-exp, to float32 (b, h, Q, dv) at the address `out`.

    sink_logits (hq,) in log2, or empty. The log2 of the sum of each query's exponentials goes to the float32 numbers
    (b, h, Q) at `sums`, unless that is 0.
    """
    join(states, mixes, sink_logits, s, sums, out)
