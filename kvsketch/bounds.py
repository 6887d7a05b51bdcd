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

from kvsketch._checks import check_bits, check_choice, check_integer

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
    "sketch_failure_orthogonal_pair",
    "sketch_size",
    "sketch_size_published",
    "sketch_variance",
]

HALF_MAX = 65504.0


def sketch_constant(d: int, kind: str = "orthogonal") -> float:
    """The constant c that makes the sign sketch of d-vectors unbiased.

    Statement: E est = <q, k> with c = sqrt(pi/2) for Gaussian rows, and with
    ``c_d = sqrt(pi/d) Gamma((d+1)/2) / Gamma(d/2)`` for Haar-orthogonal rows of norm sqrt(d). `kind` is
    ``"gaussian"``, ``"orthogonal"`` or ``"hadamard"``; the last takes c_d too, which is not exactly unbiased there.

    Source: Lemma 3.2 of QJL for Gaussian rows, where it holds. The published code uses sqrt(pi/2) for orthogonal rows
    too, where it does not hold: see :func:`sketch_constant_bias_published`.

    Proof: split q = <q,k>/|k|^2 k + q', q' orthogonal to k. By the symmetry s -> its reflection that negates q' only,
    E <s,q'> sign(<s,k>) = 0, so E <s,q> sign(<s,k>) = <q,k>/|k| E|<s, k/|k|>|. The last expectation is sqrt(2/pi) for
    a Gaussian row. For s = sqrt(d) u with u uniform on the sphere, a Gaussian vector is R u with R independent of u and
    E R = sqrt(2) Gamma((d+1)/2)/Gamma(d/2), so it is sqrt(d) sqrt(2/pi) / E R = 1/c_d.
    """
    d = check_integer("d", d, low=1)
    check_choice("kind", kind, ("gaussian", "orthogonal", "hadamard"))
    if kind == "gaussian":
        return math.sqrt(math.pi / 2)
    return math.sqrt(math.pi / d) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


def sketch_constant_bias_published(d: int) -> float:
    """Relative bias of every score when orthogonal rows are used with the published constant sqrt(pi/2).

    Statement: E est = (1 + bias) <q, k> with ``bias = sqrt(pi/2)/c_d - 1``, which is 1/(4d) + O(1/d^2): 0.39 % at
    d = 64. Follows from :func:`sketch_constant` and Gamma(x + 1/2)/Gamma(x) = sqrt(x) (1 - 1/(8x) + O(1/x^2)).
    """
    return math.sqrt(math.pi / 2) / sketch_constant(d) - 1


def sketch_variance(m: int, d: int, cosine: Any, *, kind: str = "orthogonal") -> Any:
    """Exact variance of the estimate for unit vectors q and k; multiply by |q|^2 |k|^2 for others.

    Statement, with t = `cosine` (a float or an array):

    - Gaussian rows: ``(pi/2 - t^2) / m``.
    - one orthogonal block of m <= d rows: ``c_d^2/m (1 + (m-1) (2/pi) (t^2 - (1-t^2)/(d-1))) - t^2``.
    - several independent blocks of m_b rows (m//d full ones, and m % d rows): ``sum_b (m_b/m)^2 variance(m_b)``.

    Source: the Gaussian case follows from Lemma 3.2 of QJL; the orthogonal case has no published source that we know.
    `kind` is ``"gaussian"`` or ``"orthogonal"``: no exact form is known for Hadamard rows.

    Proof: Gaussian: E (<s,q> sign(<s,k>))^2 = E <s,q>^2 = 1. One block, rows sqrt(d) u_i: write k = e, q = t e + w f
    with e, f orthonormal, w^2 = 1 - t^2, a_i = <u_i,e>, b_i = <u_i,f>, so the i-th term is
    z_i = c_d sqrt(d) (t |a_i| + w b_i sign(a_i)). E z_i^2 = c_d^2. For i != j the terms linear in b vanish (negate b),
    and given the vector a, b is uniform on the unit vectors orthogonal to it (both as d coordinates over a whole
    block), so E[b_i b_j | a] = -a_i a_j/(d-1) and E z_i z_j = c_d^2 d (t^2 - w^2/(d-1)) E|a_i a_j|. A Gaussian vector
    is R a with E R^2 = d, hence d E|a_i a_j| = (2/pi). Sum the m^2 products. Blocks are independent: variances add.
    """
    m, d = check_integer("m", m, low=1), check_integer("d", d, low=1)
    check_choice("kind", kind, ("gaussian", "orthogonal"))
    t = np.asarray(cosine, dtype=np.float64)
    if not np.all(np.abs(t) <= 1):
        raise ValueError(f"cosine must lie in [-1, 1], got {cosine!r}")
    if kind == "gaussian":
        variance = (math.pi / 2 - t**2) / m
    else:
        full, rest = divmod(m, d)
        variance = full * (d / m) ** 2 * _block_variance(d, d, t)
        if rest:
            variance = variance + (rest / m) ** 2 * _block_variance(rest, d, t)
    return float(variance) if np.ndim(cosine) == 0 else variance


def _block_variance(m: int, d: int, t: Any) -> Any:
    constant = sketch_constant(d) ** 2
    if m == 1:
        return constant - t**2
    products = (m - 1) * (2 / math.pi) * (t**2 - (1 - t**2) / (d - 1))
    return constant / m * (1 + products) - t**2


def sketch_failure_bound(m: int, eps: float) -> float:
    """Bound on the probability that the estimate is off by more than eps |q||k|, Gaussian rows.

    Statement: ``P(|est - <q,k>| > eps |q||k|) <= 2 exp(-m eps^2/pi)``, whatever q and k.

    Source: proved here; replaces the tail of QJL's Lemma 3.5 (:func:`sketch_size_published`). Not proved for
    orthogonal rows.

    Proof: for unit vectors the i-th summand is sqrt(pi/2) (t |x_i| + sqrt(1-t^2) y_i), where x_i = <s_i,k> and y_i,
    the part of <s_i,q> off k times sign(x_i), are independent N(0,1). It is a sqrt(pi/2)-Lipschitz function of
    (x_i, y_i), so their mean is a sqrt(pi/(2m))-Lipschitz function of 2m independent N(0,1) numbers, and Gaussian
    concentration P(|F - E F| > eps) <= 2 exp(-eps^2/(2 L^2)) gives the bound.
    """
    m, eps = check_integer("m", m, low=1), _check_positive("eps", eps)
    return min(1.0, 2 * math.exp(-m * eps**2 / math.pi))


def sketch_failure_orthogonal_pair(m: int, eps: float) -> float:
    """Exact probability of an error beyond eps |q||k| when q is orthogonal to k, Gaussian rows.

    Statement: ``erfc(eps sqrt(m/pi))``. No size rule that promises less for all q and k can hold.

    Proof: at t = 0 the summands in :func:`sketch_failure_bound` are sqrt(pi/2) y_i, so est is N(0, pi/(2m)).
    """
    m, eps = check_integer("m", m, low=1), _check_positive("eps", eps)
    return math.erfc(eps * math.sqrt(m / math.pi))


def sketch_size(eps: float, delta: float) -> int:
    """Rows that keep one score within eps |q||k| with probability at least 1 - delta, Gaussian rows.

    Statement: ``m >= pi/eps^2 log(2/delta)`` suffices: :func:`sketch_failure_bound` is then at most delta.
    """
    eps, delta = _check_positive("eps", eps), _check_probability("delta", delta)
    return math.ceil(math.pi / eps**2 * math.log(2 / delta))


def sketch_size_published(eps: float, delta: float) -> int:
    """Lemma 3.5 of QJL as published: ``m >= 4/3 (1+eps)/eps^2 log(2/delta)``. It does not hold.

    Counterexample: q orthogonal to k fails with probability erfc(eps sqrt(m/pi)), which for this m behaves like
    (delta/2)^(4/3 (1+eps)/pi): for every eps < 3 pi/4 - 1 = 1.356 it exceeds delta once delta is small enough. At
    eps = 0.3 it is .042 for delta = .05, but .015 for delta = .01. Use :func:`sketch_size`.
    """
    eps, delta = _check_positive("eps", eps), _check_probability("delta", delta)
    return math.ceil(4 / 3 * (1 + eps) / eps**2 * math.log(2 / delta))


def score_sketch_size(eps: float, n: int, *, norm: float, delta: float) -> int:
    """Rows that keep all n attention scores of a query within :func:`score_error_bound`, Gaussian rows.

    Statement: when |q| <= norm and all n keys have |k| <= norm, ``m >= pi norm^4/eps^2 log(2n/delta)`` suffices:
    with probability at least 1 - delta every softmax score (of <q,k>, without 1/sqrt(d)) is within a factor
    e^(2 eps) of the true one either way, which for eps <= 0.38 means |error| <= 3 eps score.

    Source: replaces QJL's Theorem 3.6 (:func:`score_sketch_size_published`).

    Proof: an additive error of eps is a relative one of eps/norm^2, so :func:`sketch_failure_bound` with
    eps/norm^2 gives each key a failure probability of at most delta/n; take the union. If all logits are within eps,
    numerator and denominator of a score are each within a factor e^eps.
    """
    eps, norm = _check_positive("eps", eps), _check_positive("norm", norm)
    n, delta = check_integer("n", n, low=1), _check_probability("delta", delta)
    return math.ceil(math.pi * norm**4 / eps**2 * math.log(2 * n / delta))


def score_sketch_size_published(eps: float, n: int, *, norm: float) -> int:
    """Theorem 3.6 of QJL as published: ``m >= 2 norm^2/eps^2 log n``, for |error| <= 3 eps score. It does not hold.

    Counterexample: logits grow with norm^2 and so does their error. For n keys orthogonal to q, all norms `norm`, a
    logit's standard deviation is sqrt(pi/2) norm^2/sqrt(m) = eps norm sqrt(pi/(4 log n)): beyond any multiple of eps
    as norm grows. At norm = 1 the slack of the factor 3 hides it. Use :func:`score_sketch_size`.
    """
    eps, norm, n = _check_positive("eps", eps), _check_positive("norm", norm), check_integer("n", n, low=2)
    return math.ceil(2 * norm**2 / eps**2 * math.log(n))


def score_error_bound(eps: float) -> float:
    """Largest relative error of a softmax score when every logit is off by at most eps: ``e^(2 eps) - 1``.

    At most 3 eps, as Theorem 3.6 of QJL puts it, for eps <= 0.38 (e^(2 eps) is convex and e^0.76 <= 2.14).
    """
    return math.expm1(2 * _check_positive("eps", eps))


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
    eps, spread = _check_positive("eps", eps), _check_not_negative("spread", spread)
    return math.tanh(eps / 2) * spread + _check_not_negative("value_error", value_error)


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


def _check_positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def _check_not_negative(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def _check_probability(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {value!r}")
    return float(value)
