"""The sign sketch of keys: constants, moments, variances, tails and sizes, with their proofs.

Public as :mod:`kvsketch.bounds`, where the notation is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch._checks import check_choice, check_integer, check_positive, check_probability


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


def sketch_orthogonal_gain(m: int, d: int, cosine: float) -> float:
    """How many times smaller the variance is with orthogonal rows than with Gaussian ones, both m rows.

    Statement: it is above 1 for every m, d >= 2 and cosine. With full blocks, m = d, it tends to
    ``1/(1 - 2/pi)`` = 2.75 at cosine 0 and to ``(pi-2)/(pi-3)`` = 8.06 at cosine 1 as d grows; as variances of full
    blocks fall like 1/m, it is also how many times fewer rows give the same variance.

    Source: QJL, section 4, says that orthogonal rows "almost always" improve the sketch. In variance, always.

    Proof: for one block :func:`sketch_variance` gives m times the difference of the variances as
    (c_d^2 - pi/2) + (m-1) ((2/pi) c_d^2 (t^2 - (1-t^2)/(d-1)) - t^2). As c_d^2 < pi/2 the first part is negative and
    the second at most 0. For several blocks compare block by block, Gaussian rows cut in the same way. The limits
    follow from c_d^2 = (pi/2) (1 - 1/(2d) + O(1/d^2)).
    """
    gaussian = sketch_variance(m, check_integer("d", d, low=2), cosine, kind="gaussian")
    return float(gaussian / sketch_variance(m, d, cosine))


def sketch_moment(order: int) -> float:
    """Moment E|z|^order of one summand ``z = sqrt(pi/2) |k| <s,q> sign(<s,k>)`` for unit q and k, Gaussian rows.

    Statement: ``E|z|^l = pi^(l/2) Gamma((l+1)/2)/sqrt(pi)``, times (|q||k|)^l for others, whatever their cosine.

    Source: the proof of Lemma 3.5 of QJL, where it holds as published.

    Proof: |z| = sqrt(pi/2) |<s,q>| and <s,q> is N(0,1), with E|g|^l = 2^(l/2) Gamma((l+1)/2)/sqrt(pi).
    """
    order = check_integer("order", order, low=1)
    return math.exp((order - 1) / 2 * math.log(math.pi) + math.lgamma((order + 1) / 2))


def sketch_failure_bound(m: int, eps: float) -> float:
    """Bound on the probability that the estimate is off by more than eps |q||k|, Gaussian rows.

    Statement: ``P(|est - <q,k>| > eps |q||k|) <= 2 exp(-m eps^2/pi)``, whatever q and k.

    Source: proved here; replaces the tail of QJL's Lemma 3.5 (:func:`sketch_size_published`). For orthogonal rows
    see :func:`sketch_failure_bound_orthogonal`.

    Proof: for unit vectors the i-th summand is sqrt(pi/2) (t |x_i| + sqrt(1-t^2) y_i), where x_i = <s_i,k> and y_i,
    the part of <s_i,q> off k times sign(x_i), are independent N(0,1). It is a sqrt(pi/2)-Lipschitz function of
    (x_i, y_i), so their mean is a sqrt(pi/(2m))-Lipschitz function of 2m independent N(0,1) numbers, and Gaussian
    concentration P(|F - E F| > eps) <= 2 exp(-eps^2/(2 L^2)) gives the bound.
    """
    m, eps = check_integer("m", m, low=1), check_positive("eps", eps)
    return min(1.0, 2 * math.exp(-m * eps**2 / math.pi))


def sketch_failure_bound_orthogonal(m: int, d: int, eps: float) -> float:
    """Bound on the probability that the estimate is off by more than eps |q||k|, orthogonal rows, d >= 2.

    Statement: ``P(|est - <q,k>| > eps |q||k|) <= 2 exp(-m eps^2 (d-1)/(2 d c_d^2))``, whatever q, k and m. As
    2 c_d^2 d/(d-1) = pi (1 + 1/(2d) + O(1/d^2)) this is nearly the bound of Gaussian rows.

    Source: proved here; we know of no published tail for orthogonal rows.

    Proof: take unit vectors, one block, and a, b, e, f, w as in the proof of :func:`sketch_variance`, a and b with all
    d coordinates of the whole block. Given a, b is uniform on the unit vectors orthogonal to a, so (b_i sign(a_i)) is
    uniform on those orthogonal to |a|. The sum of its first m coordinates is its product with the vector of m ones;
    the part of that vector orthogonal to |a| has the squared length m - A^2 with A = sum_{i<=m} |a_i|. Hence, exactly,
    est = c_d sqrt(d)/m (t A + w sqrt(m - A^2) x), with x one coordinate of a uniform point of the sphere in R^(d-1),
    independent of a. E x^(2j) <= (2j-1)!!/(d-1)^j, so E e^(l x) <= e^(l^2/(2(d-1))); as m - A^2 <= m, the second term
    contributes at most e^(l^2 w^2 v/2) to E e^(l (est - t)), with v = c_d^2 d/(m (d-1)). A is a sqrt(m)-Lipschitz
    function on the sphere in R^d, whose logarithmic Sobolev constant is d-1, so by Herbst's argument the first one
    contributes at most e^(l^2 t^2 v/2). The product is e^(l^2 v/2). For blocks of m_b rows the v add with weights
    (m_b/m)^2, which gives c_d^2 d/(m (d-1)) again. Chernoff's bound at both ends.

    Room: the proof bounds m - A^2 by m, but at t = 0 and m = d it is near d (1 - 2/pi), 2.75 times less.
    """
    m, d, eps = check_integer("m", m, low=1), check_integer("d", d, low=2), check_positive("eps", eps)
    return min(1.0, 2 * math.exp(-m * eps**2 / _orthogonal_factor(d)))


def _orthogonal_factor(d: int) -> float:
    return 2 * sketch_constant(d) ** 2 * d / (d - 1)


def sketch_failure_orthogonal_pair(m: int, eps: float) -> float:
    """Exact probability of an error beyond eps |q||k| when q is orthogonal to k, Gaussian rows.

    Statement: ``erfc(eps sqrt(m/pi))``. No size rule that promises less for all q and k can hold.

    Proof: at t = 0 the summands in :func:`sketch_failure_bound` are sqrt(pi/2) y_i, so est is N(0, pi/(2m)).
    """
    m, eps = check_integer("m", m, low=1), check_positive("eps", eps)
    return math.erfc(eps * math.sqrt(m / math.pi))


def sketch_size(eps: float, delta: float) -> int:
    """Rows that keep one score within eps |q||k| with probability at least 1 - delta, Gaussian rows.

    Statement: ``m >= pi/eps^2 log(2/delta)`` suffices: :func:`sketch_failure_bound` is then at most delta.
    """
    eps, delta = check_positive("eps", eps), check_probability("delta", delta)
    return math.ceil(math.pi / eps**2 * math.log(2 / delta))


def sketch_size_orthogonal(eps: float, delta: float, d: int) -> int:
    """Rows that keep one score within eps |q||k| with probability at least 1 - delta, orthogonal rows, d >= 2.

    Statement: ``m >= 2 c_d^2 d/(d-1)/eps^2 log(2/delta)`` suffices (:func:`sketch_failure_bound_orthogonal`): 0.8 %
    more than :func:`sketch_size` at d = 64, though the variance is 2.75 to 8 times smaller.
    """
    eps, delta = check_positive("eps", eps), check_probability("delta", delta)
    return math.ceil(_orthogonal_factor(check_integer("d", d, low=2)) / eps**2 * math.log(2 / delta))


def sketch_size_bernstein(eps: float, delta: float) -> int:
    """What the moments in the proof of Lemma 3.5 of QJL really give: ``m >= (pi + 4 eps/3)/eps^2 log(2/delta)``.

    Holds, but asks for more rows than :func:`sketch_size`. The published ``4/3 (1+eps)`` has 4/3 in the place of pi.

    Proof: Bernstein's inequality (Boucheron, Lugosi, Massart, Theorem 2.10) needs v >= E z^2 and
    E|z|^l <= l!/2 v c^(l-2) for l >= 3, and gives failure at most 2 exp(-m eps^2/(2 (v + c eps))). By
    :func:`sketch_moment` E z^2 = pi/2 = v, where the published size asks for v = 2/3, less than that. With
    Gamma((l+1)/2)/l! = 2^-l sqrt(pi)/Gamma(l/2+1) the least c of l is sqrt(pi)/2 Gamma(l/2+1)^(-1/(l-2)). It falls with
    l: log Gamma(1+x) is convex and 0 at x = 1, so its slope from there grows. At l = 3 it is 2/3.
    """
    eps, delta = check_positive("eps", eps), check_probability("delta", delta)
    return math.ceil((math.pi + 4 / 3 * eps) / eps**2 * math.log(2 / delta))


def sketch_size_published(eps: float, delta: float) -> int:
    """Lemma 3.5 of QJL as published: ``m >= 4/3 (1+eps)/eps^2 log(2/delta)``. It does not hold.

    Counterexample: q orthogonal to k fails with probability erfc(eps sqrt(m/pi)), which for this m behaves like
    (delta/2)^(4/3 (1+eps)/pi): for every eps < 3 pi/4 - 1 = 1.356 it exceeds delta once delta is small enough. At
    eps = 0.3 it is .042 for delta = .05, but .015 for delta = .01. Use :func:`sketch_size`.
    """
    eps, delta = check_positive("eps", eps), check_probability("delta", delta)
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
    eps, norm = check_positive("eps", eps), check_positive("norm", norm)
    n, delta = check_integer("n", n, low=1), check_probability("delta", delta)
    return math.ceil(math.pi * norm**4 / eps**2 * math.log(2 * n / delta))


def score_sketch_size_published(eps: float, n: int, *, norm: float) -> int:
    """Theorem 3.6 of QJL as published: ``m >= 2 norm^2/eps^2 log n``, for |error| <= 3 eps score. It does not hold.

    Counterexample: logits grow with norm^2 and so does their error. For n keys orthogonal to q, all norms `norm`, a
    logit's standard deviation is sqrt(pi/2) norm^2/sqrt(m) = eps norm sqrt(pi/(4 log n)): beyond any multiple of eps
    as norm grows. At norm = 1 the slack of the factor 3 hides it. Use :func:`score_sketch_size`.
    """
    eps, norm, n = check_positive("eps", eps), check_positive("norm", norm), check_integer("n", n, low=2)
    return math.ceil(2 * norm**2 / eps**2 * math.log(n))


def score_error_bound(eps: float) -> float:
    """Largest relative error of a softmax score when every logit is off by at most eps: ``e^(2 eps) - 1``.

    At most 3 eps, as Theorem 3.6 of QJL puts it, for eps <= 0.38 (e^(2 eps) is convex and e^0.76 <= 2.14).
    """
    return math.expm1(2 * check_positive("eps", eps))


def sketch_weight_mean(m: int, score: float, norm: float) -> float:
    """Mean of the softmax weight e^est of a key with ``<q,k> = score`` and ``|q||k| = norm``, Gaussian rows.

    Statement: ``E e^est = (2 Phi(a) e^(s^2/2))^m`` with s = sqrt(pi/2) norm/m and a = sqrt(pi/2) score/m. Up to
    O(norm^3/m^2) in the exponent this is ``e^(score + Var(est)/2)``: an unbiased score gives too large a weight, and by
    more for keys at right angles to the query, whose variance is largest.

    Source: proved here. QJL has no statement on it.

    Proof: est is a sum of m independent terms s (t |x| + sqrt(1-t^2) y), x and y independent N(0,1)
    (:func:`sketch_failure_bound`). E e^(a|x|) = 2 Phi(a) e^(a^2/2), and a = s t.
    """
    m, norm = check_integer("m", m, low=1), check_positive("norm", norm)
    if not abs(score) <= norm * (1 + 1e-6):
        raise ValueError(f"score must lie in [-norm, norm] with norm={norm}, got {score!r}")
    scale = math.sqrt(math.pi / 2) / m
    return math.exp(m * (math.log(math.erfc(-scale * score / math.sqrt(2))) + (scale * norm) ** 2 / 2))
