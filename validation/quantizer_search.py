"""A search for the groups of numbers that a quantizer recovers worst, measured against a bound.

Random numbers meet a bound's worst case almost never. The search keeps a population of rows, changes each a little,
and keeps the changes that bring the error nearer to the bound: it needs no gradient and uses fixed random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch.kivi import dequantize_groups, quantize_groups

#: Numbers are kept in this range, in which neither a zero nor a scale of any width saturates.
LARGEST = 32_000.0
#: Rows that are searched with at once.
ROWS = 96

#: Quantizes rows x (r, w) of `bits` bits in groups of `group` and recovers them: x, bits, group -> float array (r, w).
Recover = Callable[[Any, int, int], Any]
#: A bound on the error in a group: lo, hi, bits -> numbers of the same shape.
Bound = Callable[[Any, Any, int], Any]


def library_recover(engine: str, axis: str) -> Recover:
    """Rows through the library's quantizer and back; a row's groups run along `axis` of what it is given."""

    def recover(x: Any, bits: int, group: int) -> Any:
        given = np.ascontiguousarray(x.T) if axis == "tokens" else x
        codes = quantize_groups(given, bits=bits, group=group, axis=axis, engine=engine)
        found = dequantize_groups(codes, engine=engine)
        return found.T if axis == "tokens" else found

    return recover


def errors_over_bound(x: Any, recovered: Any, bits: int, group: int, bound: Bound) -> Any:
    """The largest error of each row x (r, w), in units of the bound of its group: float64 (r,)."""
    x, recovered = np.asarray(x, dtype=np.float64), np.asarray(recovered, dtype=np.float64)
    worst = np.zeros(len(x))
    for start in range(0, x.shape[1], group):
        part = slice(start, start + group)
        limit = bound(x[:, part].min(axis=1), x[:, part].max(axis=1), bits)
        error = np.abs(x[:, part] - recovered[:, part]).max(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            worst = np.fmax(worst, np.where(error > 0, error / limit, 0.0))
    return worst


def search_worst(
    recover: Recover,
    bound: Bound,
    *,
    bits: int,
    group: int,
    width: int,
    dtype: str,
    rng: np.random.Generator,
    rounds: int,
    around_zero: bool = False,
) -> tuple[float, Any]:
    """The largest error found, in units of `bound`, and the row (width,) of `dtype` that has it.

    With `around_zero` each group of a row has numbers on both sides of 0, or 0 itself.
    """

    def prepare(rows: Any) -> Any:
        rows = np.clip(rows, -LARGEST, LARGEST)
        if around_zero:
            rows[:, ::group] = 0
        return rows.astype(np.float32).astype(FLOAT_DTYPES[dtype])

    def judge(rows: Any) -> Any:
        return errors_over_bound(rows, recover(rows, bits, group), bits, group, bound)

    levels = 2**bits - 1
    best = prepare(_start(rng, width, levels))
    ratios = judge(best)
    for _ in range(rounds):
        changed = prepare(_change(best.astype(np.float64), rng, levels))
        found = judge(changed)
        better = found > ratios
        best[better], ratios[better] = changed[better], found[better]
        # The best row takes the place of the worst.
        worst = int(ratios.argmin())
        best[worst], ratios[worst] = best[ratios.argmax()], ratios.max()
    winner = int(ratios.argmax())
    return float(ratios[winner]), best[winner]


def _start(rng: np.random.Generator, width: int, levels: int) -> Any:
    """Rows of all sizes, half of them off zero, up to 100,000 times their spread.

    Many of a row's numbers are near the middle of two codes.
    """
    size = 10.0 ** rng.uniform(-6, 4, size=(ROWS, 1))
    offset = size * rng.standard_normal((ROWS, 1)) * 10.0 ** rng.uniform(0, 5, size=(ROWS, 1))
    offset[::2] = 0
    rows = rng.standard_normal((ROWS, width))
    lo, hi = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    middle = lo + (hi - lo) * (rng.integers(0, levels, size=rows.shape) + 0.5) / levels
    rows = np.where((rng.random(rows.shape) < 0.5) & (rows != lo) & (rows != hi), middle, rows)
    return rows * size + offset


def _change(rows: Any, rng: np.random.Generator, levels: int) -> Any:
    """Each row changed in one of five ways."""
    count, width = rows.shape
    index, token = np.arange(count), rng.integers(0, width, size=count)
    lo, hi = rows.min(axis=1), rows.max(axis=1)
    near = 1 + rng.choice((-1, 1), size=count) * 2.0 ** -rng.uniform(1, 24, size=count)
    one = rows[index, token]
    middle = lo + (hi - lo) * (rng.integers(0, levels, size=count) + 0.5) / levels
    new = np.choose(
        rng.integers(0, 3, size=count), [middle * (1 + (near - 1) / 16), one * near, lo + (hi - lo) * rng.random(count)]
    )
    moved, scaled = rows.copy(), rows * near[:, None]
    moved[index, token] = new
    shifted = rows + (rng.standard_normal(count) * (hi - lo + np.abs(lo)) * 2.0 ** -rng.uniform(0, 12, count))[:, None]
    way = rng.integers(0, 5, size=count)[:, None]
    return np.where(way < 3, moved, np.where(way == 3, scaled, shifted))
