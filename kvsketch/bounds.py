"""Constants, variances, sketch sizes and error bounds: what the papers state, and what holds.

Where a published form does not hold, a function `*_published` gives it as printed and the other gives the form proved
in its docstring. Logarithms are natural. `q` and `k` are fixed vectors, independent of the random projection; `t` is
their cosine. The estimate of <q, k> from a sign sketch of m rows (QJL, arXiv 2406.03482, Definition 3.1) is::

    est = c/m * |k| * sum_i <s_i, q> sign(<s_i, k>),    s_i the rows of S (m, d)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch._checks import check_bits, check_integer, check_not_negative, check_positive
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
    "attention_error_bound",
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


def attention_error_bound(eps: float, spread: float, *, value_error: float = 0.0) -> float:
    """Largest error of an attention output when every score is off by at most eps: ``tanh(eps/2) spread``.

    Statement: let o = sum_j p_j v_j with p the softmax of the scores, `spread` be the largest distance |v_i - v_j| of
    two values (of one channel: its largest minus its smallest), and o^ be the same with every score (as the softmax
    sees it, 1/sqrt(d) included) off by at most eps and every value by at most `value_error`. Then
    ``|o^ - o| <= tanh(eps/2) spread + value_error``. The first term is the smallest possible: for two values with
    p = 1/(1 + e^eps) on one of them it is attained.

    Source: proved here; :func:`score_error_bound`, which bounds every weight, gives e^(2 eps) - 1 in place of
    tanh(eps/2), four times as much for small eps and more than everything for eps > .35.

    Proof: with the errors delta_j, the new weights are p^_j = p_j e^delta_j / sum_i p_i e^delta_i. Let A be the tokens
    that gain weight, a = p(A) = sigmoid(x) and a^ = p^(A). The odds of A grow at most by e^(2 eps), so
    a^ - a <= sigmoid(x + 2 eps) - sigmoid(x), which is largest at x = -eps, by symmetry, where it is
    2 sigmoid(eps) - 1 = tanh(eps/2). Now sum_j (p^_j - p_j) v_j = (a^ - a) (u - w), where u is the mean of the values
    in A by the weight they gain, w that of the others by the weight they lose; both lie in the convex hull of the
    values, whose diameter is `spread`. Errors of the values enter as sum_j p^_j (v^_j - v_j), a mean of them.
    """
    eps, spread = check_positive("eps", eps), check_not_negative("spread", spread)
    return math.tanh(eps / 2) * spread + check_not_negative("value_error", value_error)


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

    For a group with lo <= 0 <= hi it holds but for little: ``|x - x^| <= 1.001 scale/2 + 2^(bits-25)``. Proof: there
    |lo| <= hi - lo, and float16 rounds by at most 2^-11 of a number or 2^-25, so that with L = 2^bits - 1 the terms of
    :func:`quantizer_error_bound` are at most (1 + 2^-11) scale/2 + 2^-26 or 2^-10 (hi - lo) + (L + 1) 2^-25, where
    hi - lo = 2 L scale/2 <= 510 scale/2, and 2^-22 times about 3 (hi - lo), less than 0.0004 scale/2.
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
