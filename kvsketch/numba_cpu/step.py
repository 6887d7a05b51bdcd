"""A decode step of a cache as one compiled call: look at the new tokens, store them, attend.

It is for the usual step, one token a row for which there is room and before which no page is due. For any other it
changes nothing and says so: the ordinary calls, whose results it has bit for bit, take that step.
"""

from __future__ import annotations

import numpy as np

from kvsketch._contents import Contents
from kvsketch.layout import DTYPE_CODES, KIND_LATENTS, KIND_SKETCH
from kvsketch.numba_cpu._compile import address, kernel, kernel_part
from kvsketch.numba_cpu.attention import (
    FUSED_QUERIES,
    NO_LOGITS,
    TYPES,
    Prepared,
    attend_threaded,
    prepare,
    run_count,
    threaded_work,
)
from kvsketch.numba_cpu.exact import number_bytes
from kvsketch.numba_cpu.fused import Inputs, attend_part, load_inputs, load_plan
from kvsketch.numba_cpu.join import join
from kvsketch.numba_cpu.simd import copy_bytes, load_long, load_word, store_long
from kvsketch.numba_cpu.softmax import LOG2E

#: What a step answers instead of a number of parts that are left to several threads.
UNUSUAL, DONE = -1, 0

#: Where among the inputs, in bytes, those are that a step fills in.
_Q, _RUNS = 8 * Inputs._fields.index("q"), 8 * Inputs._fields.index("runs")
_HALF = DTYPE_CODES["float16"]
#: All ones in the exponent of a float16, and of the upper half of a float32, which is a bfloat16.
_EXPONENT_HALF, _EXPONENT = 0x7C00, 0x7F80

_run_count = kernel_part()(run_count)


@kernel_part()
def _finite(numbers, count, dtype):  # type: ignore[no-untyped-def]
    """Whether none of the `count` numbers at an address is infinite or NaN."""
    size, bad = number_bytes(dtype), 0
    exponent = _EXPONENT_HALF if dtype == _HALF else _EXPONENT
    for i in range(count):
        bad += load_word(numbers + size * i + size - 2) & exponent == exponent
    return bad == 0


@kernel_part()
def _room(inputs, full, page):  # type: ignore[no-untyped-def]
    """Pages of the longest row, or UNUSUAL when a row's sinks are not full, its window is, or a page is due.

    Or when the window is so large that an append gives room back.
    """
    pages = 0
    if inputs.window_room > 2 * (full + page):
        return UNUSUAL
    for row in range(inputs.b):
        count = load_long(inputs.window_counts + 8 * row)
        end = load_long(inputs.window_starts + 8 * row) + count
        if load_long(inputs.sink_counts + 8 * row) < inputs.sink_room or count >= full or end >= inputs.window_room:
            return UNUSUAL
        pages = max(pages, load_long(inputs.page_counts + 8 * row))
    return pages


@kernel_part()
def _store(inputs, k, v, key_bytes, value_bytes):  # type: ignore[no-untyped-def]
    """Put a token a row, keys at `k` and values at `v`, behind the windows and count it."""
    for row in range(inputs.b):
        count = load_long(inputs.window_counts + 8 * row)
        end = load_long(inputs.window_starts + 8 * row) + count
        for place in range(row * inputs.h, (row + 1) * inputs.h):
            slot = place * inputs.window_room + end
            copy_bytes(k + place * key_bytes, key_bytes, inputs.window_k + slot * key_bytes)
            copy_bytes(v + place * value_bytes, value_bytes, inputs.window_v + slot * value_bytes)
        store_long(inputs.window_counts + 8 * row, count + 1)


@kernel()
def take_step(inputs_at, plan_at, q, k, v, out, unit, softcap, room, full, checked, threaded):  # type: ignore[no-untyped-def]
    """Store k (b, h, d) and v (b, h, dv) and attend with q (b, hq, d), all at addresses: out (b, hq, dv) float32.

    `full` is the number of window tokens with which a page is due, `threaded` the work with which the parts are left to
    several threads: the answer is then their number, otherwise DONE or, when nothing was changed, UNUSUAL.
    """
    inputs, plan = load_inputs(inputs_at), load_plan(plan_at)
    b, h, queries, keys, values = inputs.b, inputs.h, inputs.queries, plan.key_spec, plan.value_spec
    pages = _room(inputs, full, keys.tokens)
    if pages == UNUSUAL:
        return UNUSUAL
    if checked and not (_finite(k, b * h * keys.width, keys.dtype) and _finite(v, b * h * values.width, values.dtype)):
        return UNUSUAL
    tokens = pages * keys.tokens
    runs = _run_count(tokens, b * h)
    alone = b * h * queries * (tokens + inputs.window_room) * (keys.width + values.width) < threaded
    # What may fail for want of memory comes first.
    parts = runs if alone else 0
    states = np.empty((b, h, parts, queries, 2), np.float32)
    mixes = np.empty((b, h, parts, queries, values.width), np.float32)
    buffer, no_logits = np.empty(room if alone else 0, np.uint8), np.empty(0, np.float32)
    _store(inputs, k, v, keys.width * number_bytes(keys.dtype), values.width * number_bytes(values.dtype))
    store_long(inputs_at + _Q, q)
    store_long(inputs_at + _RUNS, runs)
    if not alone:
        return b * h * runs
    inputs = load_inputs(inputs_at)
    for row in range(b):
        for head in range(h):
            for run in range(runs):
                attend_part(
                    inputs, plan, row, head, run, np.float32(unit), softcap, buffer,
                    states[row, head, run], mixes[row, head, run],
                )  # fmt: skip
    join(states, mixes, no_logits, 1, 0, out)
    return DONE


class Step:
    """Steps over contents whose buffers stay where they are.

    It knows addresses, not arrays, so that it keeps no buffer alive; counts are read where the contents keep them.
    """

    def __init__(self, contents: Contents, hq: int, plan: Prepared) -> None:
        exact, pages = contents.exact, contents.pages
        b, h, room, d = exact.window_k.shape
        capacity, record_bytes = pages.pages.shape[2:]
        dv = exact.window_v.shape[3]
        queries = hq // h
        #: Dtype of q, k and v, and their shapes.
        self.dtype, self.shapes = exact.window_k.dtype, ((b, hq, 1, d), (b, h, 1, d), (b, h, 1, dv))
        inputs = Inputs(
            0, 0, TYPES[self.dtype], 0, 0, plan.extra, plan.keys, plan.values, 0, 0, 1, queries, b, 0, 0, 0,
            address(pages.pages), h, capacity, record_bytes, address(pages.counts),
            address(exact.sink_k), address(exact.sink_v), exact.sink_k.shape[2], address(exact.sink_counts),
            address(exact.window_k), address(exact.window_v), room, address(exact.starts), address(exact.counts),
        )  # fmt: skip
        self._plan, self._inputs = plan, np.array(inputs, np.int64)
        self._at, self._full = address(self._inputs), exact.residual_length + exact.page

    def take(self, q: int, k: int, v: int, out: int, scale: float, softcap: float | None, checked: bool) -> int:
        """:func:`take_step` at these addresses; parts that are left are for :meth:`attend_parts`."""
        unit, cap = _unit(scale, softcap)
        plan = self._plan
        return take_step(
            self._at, plan.at, q, k, v, out, unit, cap, plan.room, self._full, checked, threaded_work()
        )  # fmt: skip

    def attend_parts(self, parts: int, out: int, scale: float, softcap: float | None) -> None:
        """Attend on all threads over what :meth:`take` has stored."""
        unit, cap = _unit(scale, softcap)
        (b, h, _, _), (_, hq, _, _), dv = self.shapes[1], self.shapes[0], self.shapes[2][3]
        fixed = self._at, self._plan.at, np.float32(unit), cap, self._plan.room
        attend_threaded((b, h, parts // (b * h), hq // h, dv), 1, fixed, NO_LOGITS, 0, out)


def make_step(contents: Contents, hq: int, coefficients: str) -> Step | None:
    """Steps of `hq` query heads over the contents as they are, or None where only the ordinary calls can take them."""
    exact, pages = contents.exact, contents.pages
    h = exact.window_k.shape[1]
    counts = (pages.counts, exact.sink_counts, exact.starts, exact.counts)
    arrays = (pages.pages, exact.sink_k, exact.sink_v, exact.window_k, exact.window_v, *counts)
    given = {*contents.given[:2], exact.window_k.dtype, exact.window_v.dtype}
    if (
        pages.layout.keys.spec.kind in (KIND_SKETCH, KIND_LATENTS)  # their queries take matrix products, or a copy
        or hq % h
        or hq // h > FUSED_QUERIES
        or len(given) > 1
        or not all(array.flags.c_contiguous for array in arrays)
        or any(array.dtype != np.int64 for array in counts)
    ):
        return None
    return Step(contents, hq, prepare(pages.layout, hq // h, coefficients))


def _unit(scale: float, softcap: float | None) -> tuple[float, float]:
    return (scale / softcap, float(softcap)) if softcap else (scale * LOG2E, 0.0)
