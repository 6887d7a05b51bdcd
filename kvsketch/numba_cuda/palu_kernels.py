"""The kernels of attention over latents: what is done to keys and values after their matrices.

`plan` (3, b): tokens of each row, where in their pages they begin, and the position of the first.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda


@cuda.jit
def finish_keys(built, plan, finish, true_keys, true_counts, keys):
    """A thread to each token of each head of `keys` (b, h, t, d): bias, RMS norm and RoPE of `built` (b, t, h, d).

    The true keys (b, h, F, d) of the first `true_counts` (b,) positions are taken instead.
    """
    b, heads, tokens, d = keys.shape
    index, t = divmod(cuda.grid(1), tokens)
    row, head = divmod(index, heads)
    if row >= b or t >= plan[0, row]:
        return
    position = plan[2, row] + t
    if position < true_counts[row]:
        for c in range(d):
            keys[row, head, t, c] = true_keys[row, head, position, c]
        return
    square = np.float32(0)
    for c in range(d):
        number = built[row, t, head, c]
        if finish.biased:
            number += finish.bias[head * d + c]
        keys[row, head, t, c] = number
        square += number * number
    if finish.normed:
        root = np.float32(math.sqrt(square / np.float32(d) + finish.eps))
        for c in range(d):
            keys[row, head, t, c] = keys[row, head, t, c] / root * finish.norm[c]
    at = finish.positions[row, position] if finish.placed else position
    for pair in range(finish.rotary // 2):
        first, second = pair, pair + finish.rotary // 2
        if finish.interleaved:
            first, second = 2 * pair, 2 * pair + 1
        x, y = keys[row, head, t, first], keys[row, head, t, second]
        keys[row, head, t, first] = x * finish.cos[at, first] - y * finish.sin[at, first]
        keys[row, head, t, second] = y * finish.cos[at, second] + x * finish.sin[at, second]


@cuda.jit
def finish_values(built, plan, true_values, true_counts, values):
    """A thread to each number of `values` (b, h, t, dv): of `built` (b, t, h, dv), or a true one of a first token."""
    b, heads, tokens, dv = values.shape
    index, c = divmod(cuda.grid(1), dv)
    index, t = divmod(index, tokens)
    row, head = divmod(index, heads)
    if row >= b or t >= plan[0, row]:
        return
    position = plan[2, row] + t
    if position < true_counts[row]:
        values[row, head, t, c] = true_values[row, head, position, c]
    else:
        values[row, head, t, c] = built[row, t, head, c]
