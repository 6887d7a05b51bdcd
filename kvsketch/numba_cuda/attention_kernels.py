"""The kernels of attention: a block of threads goes over a split of the tokens for a tile of queries.

Everything is as with an online softmax: scores of a tile of tokens, a new largest score, weights, and a mix that is
scaled down by what the largest score grew.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32

from kvsketch.numba_cuda.arithmetic import INFINITY
from kvsketch.numba_cuda.numbers import inlier_number, norm_of, outlier_channel, outlier_number, sign_of

#: Queries and tokens that a block works on together. A page is a whole number of tiles, so a tile is of one page.
QUERY_TILE = 8
TOKEN_TILE = 32
#: Channels that are unpacked together, and how far their rows lie apart: threads of a warp then meet no bank twice.
CHANNELS = 32
ROW = CHANNELS + 1
#: Where each array begins in shared memory, which holds float32: scores, keys, queries, largest scores, decays.
KEYS_AT = QUERY_TILE * TOKEN_TILE
QUERIES_AT = KEYS_AT + TOKEN_TILE * ROW
HIGHEST_AT = QUERIES_AT + QUERY_TILE * ROW
DECAY_AT = HIGHEST_AT + QUERY_TILE
SHARED_BYTES = 4 * (DECAY_AT + QUERY_TILE)


@cuda.jit(device=True)
def plain_query(queries, x, keys, page, c):
    """What channel c of a key is multiplied by."""
    return queries[x, c]


@cuda.jit(device=True)
def sketch_query(queries, x, keys, page, c):
    """Row c of the projected query, or behind these the query itself at an outlier channel of the page."""
    m = keys.spec.m
    return queries[x, c if c < m else m + outlier_channel(keys, page, c - m)]


@cuda.jit(device=True)
def sketch_key(keys, page, token, c):
    """The other factor: ``c/m |k|`` times a sign; or the number that a page's own outlier channel has too little."""
    spec = keys.spec
    if c < spec.m:
        sign = sign_of(keys, page, spec.codes, spec.rows, token, c)
        return norm_of(keys, page, spec.norms, token) * keys.factor * sign
    channel = outlier_channel(keys, page, c - spec.m)
    return outlier_number(keys, page, token, channel) - inlier_number(keys, page, token, channel)


@cache
def part_kernel(query: Any, key_number: Any, value_number: Any) -> Any:
    """The kernel for keys and values that these functions read."""
    score_tile, mix_tile = _scoring(query, key_number), _mixing(value_number)

    @cuda.jit
    def attend_part(queries, keys, values, capacity, plan, limits, bias, biased, width, scale, softcap, partial):
        """A block to each row, head, split and tile of queries (b, h, x, .): `partial` goes on from where it was.

        `plan` (3, b): tokens of each row, where in the pages they begin, and the position of the first. Key products
        have `width` terms; `softcap` is 0 for none.
        """
        _, heads, splits, count, columns = partial.shape
        index, tile = divmod(np.int64(cuda.blockIdx.x), (count + QUERY_TILE - 1) // QUERY_TILE)
        index, split = divmod(index, splits)
        row, head = divmod(index, heads)
        x0 = tile * QUERY_TILE
        live = min(QUERY_TILE, count - x0)
        queries, sums = queries[row, head, x0 : x0 + live], partial[row, head, split, x0 : x0 + live]

        shared = cuda.shared.array(0, float32)
        scores, key_tile, query_tile = shared[:KEYS_AT], shared[KEYS_AT:QUERIES_AT], shared[QUERIES_AT:HIGHEST_AT]
        highest, decay = shared[HIGHEST_AT:DECAY_AT], shared[DECAY_AT:]
        for x in range(cuda.threadIdx.x, live, cuda.blockDim.x):
            highest[x] = sums[x, columns - 1]

        tokens = plan[0, row]
        per_split = (tokens + splits * TOKEN_TILE - 1) // (splits * TOKEN_TILE) * TOKEN_TILE
        end = min(tokens, (split + 1) * per_split)
        for first in range(split * per_split, end, TOKEN_TILE):
            here = min(TOKEN_TILE, end - first)
            page, token = divmod(plan[1, row] + first, keys.spec.tokens)
            page += (row * heads + head) * capacity
            score_tile(queries, keys, page, token, live, here, width, key_tile, query_tile, scores)
            position = plan[2, row] + first
            for pair in range(cuda.threadIdx.x, live * here, cuda.blockDim.x):
                x, t = divmod(pair, here)
                lane, i = divmod(x0 + x, limits.shape[1])
                score = scores[pair] * scale
                if softcap > 0:
                    score = softcap * np.float32(math.tanh(score / softcap))
                if biased:
                    query_head = head * (count // limits.shape[1]) + lane
                    score += bias[row, query_head if bias.shape[1] > 1 else 0, i, position + t]
                scores[pair] = score if position + t < limits[row, i] else -INFINITY
            cuda.syncthreads()
            turn_to_weights(scores, live, here, highest, decay)
            mix_tile(values, page, token, scores, live, here, decay, sums)
            cuda.syncthreads()
        for x in range(cuda.threadIdx.x, live, cuda.blockDim.x):
            sums[x, columns - 1] = highest[x]

    return attend_part


def _scoring(query: Any, key_number: Any) -> Any:
    """The function that multiplies a tile of queries by a tile of keys."""

    @cuda.jit(device=True)
    def score_tile(queries, keys, page, token, live, here, width, key_tile, query_tile, scores):
        """``scores[x * here + t]`` of queries x < `live` and tokens t < `here`; each key is unpacked once for them."""
        thread, threads = cuda.threadIdx.x, cuda.blockDim.x
        for pair in range(thread, live * here, threads):
            scores[pair] = 0
        for c0 in range(0, width, CHANNELS):
            channels = min(CHANNELS, width - c0)
            cuda.syncthreads()
            for i in range(thread, here * channels, threads):
                t, c = divmod(i, channels)
                key_tile[t * ROW + c] = key_number(keys, page, token + t, c0 + c)
            for i in range(thread, live * channels, threads):
                x, c = divmod(i, channels)
                query_tile[x * ROW + c] = query(queries, x, keys, page, c0 + c)
            cuda.syncthreads()
            for pair in range(thread, live * here, threads):
                x, t = divmod(pair, here)
                total = scores[pair]
                for c in range(channels):
                    total += query_tile[x * ROW + c] * key_tile[t * ROW + c]
                scores[pair] = total

    return score_tile


@cuda.jit(device=True)
def turn_to_weights(scores, live, here, highest, decay):
    """Scores as weights below a new largest score, and by what sums of weights below the old one are to shrink."""
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for x in range(thread, live, threads):
        before = highest[x]
        for t in range(here):
            highest[x] = max(highest[x], scores[x * here + t])
        decay[x] = weight(before, highest[x])
    cuda.syncthreads()
    for pair in range(thread, live * here, threads):
        scores[pair] = weight(scores[pair], highest[pair // here])
    cuda.syncthreads()


def _mixing(value_number: Any) -> Any:
    """The function that adds a tile of weighted values to what was mixed before."""

    @cuda.jit(device=True)
    def mix_tile(values, page, token, weights, live, here, decay, sums):
        """To `sums` (x, dv + 2): values, and behind them the weights. A channel is one thread's, tile after tile."""
        dv = sums.shape[1] - 2
        mix = cuda.local.array(QUERY_TILE, float32)
        for c in range(cuda.threadIdx.x, dv + 1, cuda.blockDim.x):
            for x in range(live):
                mix[x] = sums[x, c] * decay[x]
            for t in range(here):
                number = np.float32(1)
                if c < dv:
                    number = value_number(values, page, token + t, c)
                for x in range(live):
                    mix[x] += weights[x * here + t] * number
            for x in range(live):
                sums[x, c] = mix[x]

    return mix_tile


@cuda.jit(device=True)
def weight(score, highest):
    """``exp(score - highest)``, where -inf is what nothing has been seen of."""
    return np.float32(math.exp(score - (highest if highest > -INFINITY else np.float32(0))))


@cuda.jit
def combine_splits(partial, logits, out):
    """A thread to each number of `out` (b, hq, s, dv): the splits' mixes over their sums, zero where none saw any."""
    b, hq, s, dv = out.shape
    index, c = divmod(cuda.grid(1), dv)
    index, i = divmod(index, s)
    row, query_head = divmod(index, hq)
    if row >= b:
        return
    heads, splits = partial.shape[1], partial.shape[2]
    head, lane = divmod(query_head, hq // heads)
    x = lane * s + i
    highest = logits[query_head]
    for split in range(splits):
        highest = max(highest, partial[row, head, split, x, dv + 1])
    mix, total = np.float32(0), weight(logits[query_head], highest)
    for split in range(splits):
        share = weight(partial[row, head, split, x, dv + 1], highest)
        mix += partial[row, head, split, x, c] * share
        total += partial[row, head, split, x, dv] * share
    out[row, query_head, i, c] = mix / total if total > 0 else mix
