"""Constants, variances, sketch sizes and error bounds: what the papers state, and what holds.

Where a published form does not hold, a function `*_published` gives it as printed and the other gives the form proved
in its docstring. Logarithms are natural. `q` and `k` are fixed vectors, independent of the random projection; `t` is
their cosine. The estimate of <q, k> from a sign sketch of m rows (QJL, arXiv 2406.03482, Definition 3.1) is::

    est = c/m * |k| * sum_i <s_i, q> sign(<s_i, k>),    s_i the rows of S (m, d)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch._checks import check_bits, check_integer
from kvsketch._sketch_bounds import (
    score_error_bound,
    score_sketch_size,
    score_sketch_size_published,
    sketch_constant,
    sketch_constant_bias_published,
    sketch_failure_bound,
    sketch_failure_bound_orthogonal,
    sketch_failure_orthogonal_pair,
    sketch_moment,
    sketch_orthogonal_gain,
    sketch_size,
    sketch_size_bernstein,
    sketch_size_orthogonal,
    sketch_size_published,
    sketch_variance,
    sketch_weight_mean,
)

__all__ = [
    "kivi_bits",
    "quantizer_error_bound",
    "quantizer_error_bound_textbook",
    "score_error_bound",
    "score_sketch_size",
    "score_sketch_size_published",
    "sketch_bits",
    "sketch_constant",
    "sketch_constant_bias_published",
    "sketch_failure_bound",
    "sketch_failure_bound_orthogonal",
    "sketch_failure_orthogonal_pair",
    "sketch_moment",
    "sketch_orthogonal_gain",
    "sketch_size",
    "sketch_size_bernstein",
    "sketch_size_orthogonal",
    "sketch_size_published",
    "sketch_variance",
    "sketch_weight_mean",
]

HALF_MAX = 65504.0


def quantizer_error_bound(lo: Any, hi: Any, bits: int) -> Any:
    """Bound on |x - x^| for numbers in [lo, hi] stored as :mod:`kvsketch.kivi` does, float16 scale and zero included.

    Statement, with L = 2^bits - 1, s = (hi - lo)/L, and z', s' the stored float16 roundings of lo and s::

        |x - x^| <= max(s'/2, |lo - z'| + L |s - s'|) + 2^-22 (L s' + |z'| + hi - lo)

    As |lo - z'| <= max(2^-11 |lo|, 2^-25), and s likewise, the second term of the maximum is about
    2^-11 (|lo| + hi - lo): for a narrow group far from zero it is what counts.

    Parameters
    ----------
    lo, hi : float or array
        Least and largest number of a group, as float32, within float16's range of ±65504, s as well: beyond it the
        quantizer saturates and no bound holds (ValueError).
    bits : int

    Source: KIVI (arXiv 2402.02750) gives the rule but no bound; for s/2 see :func:`quantizer_error_bound_textbook`.

    Proof: let y = (x - z')/s'. The code is y rounded and clipped to [0, L]. Not clipped: the error is at most s'/2.
    Clipped below, x < z': it is z' - x <= z' - lo. Clipped above: it is
    x - z' - L s' <= hi - z' - L s' = (lo - z') + L (s - s'). When s' = 0 all codes are 0 and the same two bounds hold.
    The last term covers float32: with u = 2^-24, y carries a relative error of 2u (difference, quotient), s one of 2u,
    code s' is exact and the sum x^ is off by at most u (|z'| + L s').
    """
    bits = check_bits(bits)
    lo, hi = np.asarray(lo, dtype=np.float64), np.asarray(hi, dtype=np.float64)
    levels = 2**bits - 1
    step = (hi - lo) / levels
    if not (np.all(lo <= hi) and np.all(lo >= -HALF_MAX) and np.all(hi <= HALF_MAX) and np.all(step <= HALF_MAX)):
        raise ValueError(
            f"the bound needs -65504 <= lo <= hi <= 65504 and (hi - lo)/{levels} <= 65504, got lo={lo} and hi={hi}"
        )
    zero = lo.astype(np.float16).astype(np.float64)
    # The quantizer rounds a float32 quotient to float16; rounding twice can differ from rounding once.
    span = hi.astype(np.float32) - lo.astype(np.float32)
    scale = (span / np.float32(levels)).astype(np.float16).astype(np.float64)
    outside = np.abs(lo - zero) + levels * np.abs(step - scale)
    bound = np.maximum(scale / 2, outside) + 2.0**-22 * (levels * scale + np.abs(zero) + (hi - lo))
    return float(bound) if bound.ndim == 0 else bound


def quantizer_error_bound_textbook(lo: Any, hi: Any, bits: int) -> Any:
    """The textbook bound scale/2 with ``scale = (hi - lo)/(2^bits - 1)``. It does not hold with float16 storage.

    It is true of exact arithmetic: codes are at most half a step away. Counterexample with a float16 zero: numbers
    from 100.02 to 100.03 in 8 bits have zero 100 and all get code 255, which is 100.01: off by 0.01 to 0.02, hundreds
    of times scale/2. Use :func:`quantizer_error_bound`.
    """
    return (hi - lo) / (2 ** check_bits(bits) - 1) / 2


def kivi_bits(bits: int, group: int, count: int | None = None) -> float:
    """Bits a number of grouped integers (KIVI): ``bits + 32/group``, float16 scale and zero included.

    With `count` numbers along the grouped axis the last group may be shorter, and the exact figure is
    ``bits + 32 ceil(count/group)/count``. Published as "2 bits"; scale and zero add one at group 32. Exact tokens and
    the padding of page records are apart.
    """
    bits, group = check_bits(bits), check_integer("group", group, low=1)
    if count is None:
        return bits + 32 / group
    count = check_integer("count", count, low=1)
    return bits + 32 * -(-count // group) / count


def sketch_bits(d: int, m: int, *, outliers: int = 0, outlier_m: int = 0, page: int = 32) -> float:
    """Bits a number of sign-sketched keys (QJL): signs and float16 norm of each part, channel indices of each page.

    ``(m + 16)/d`` without outlier channels; with them ``(m + 16 + outlier_m + 16 + i outliers/page)/d``, i = 8 bits
    an index for d <= 256, else 16. Published as 3 bits a number of keys and values; with the published settings
    (d = 128, 8 outlier channels, 15 layers m = 512 + 128 and 17 layers m = 256 + 256, values of 2 bits in groups of
    32) it is 3.87. Exact tokens and the padding of page records are apart.
    """
    d, m = check_integer("d", d, low=1), check_integer("m", m, low=1)
    outliers = check_integer("outliers", outliers, low=0, high=d)
    outlier_m = check_integer("outlier_m", outlier_m, low=0)
    page = check_integer("page", page, low=1)
    if (outliers > 0) != (outlier_m > 0):
        raise ValueError(f"outliers={outliers} and outlier_m={outlier_m} go together: give both, or neither")
    total = float(m + 16)
    if outliers:
        total += outlier_m + 16 + (8 if d <= 256 else 16) * outliers / page
    return total / d
