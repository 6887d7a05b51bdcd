"""How many numbers each slice of a cache may keep: a total, shared out in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvsketch._checks import check_choice, check_integer

RULES = ("uniform", "fisher", "fisher-uniform", "balanced")


def allocate_ranks(
    spectra: Sequence[Any],
    keep: float,
    *,
    rule: str = "balanced",
    importance: Any = None,
    projections: Sequence[int] | None = None,
    block: int = 32,
    caps: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
) -> list[int]:
    """Ranks of slices that together keep a share of the numbers of a dense cache.

    Parameters
    ----------
    spectra : for each slice (k,)
        Singular values in descending order (:attr:`kvsketch.palu.Factors.spectrum`).
    keep
        Share of the numbers to keep, above 0 and up to 1.
    rule : {"balanced", "uniform", "fisher", "fisher-uniform"}
        - ``"balanced"``: a block at a time to the slice that gains the most by it, the sum of its squared singular
          values over the next block (a mean, where a last block is shorter); the first of equals. It asks for singular
          values of one scale, as those of ``"two-sided"`` factors are.
        - ``"uniform"``: each slice keeps the same share of its width.
        - ``"fisher"``: the paper's. Ranks are proportional to `importance`: the ratio of a weight's Fisher information
          to that of all.
        - ``"fisher-uniform"``: the paper's text names the rule above only; its authors' code has a second one of this
          name, taken here to mean: the total of each projection (a layer's keys, or its values) is proportional to the
          importance of its slices together, and they share it equally, a block more or less.
    importance : (slices,), not negative
        For the two Fisher rules: for instance the sum, or for slices of one size the mean, of the square roots of the
        diagonal Fisher information of each slice's weight.
    projections : (slices,), for ``"fisher-uniform"``
        A number for each slice, the same for those of one projection; each is its own by default.
    block
        Ranks are multiples of it, but for those at a cap that is none and at most one more.
    caps : (slices,), optional
        Highest rank of each slice; by default as many as it has singular values.
    widths : (slices,), optional
        Numbers of a token that a dense cache stores of each slice; by default as many as it has singular values.

    Returns
    -------
    list of int
        Their sum is exactly the whole number of blocks that is nearest to ``keep * sum(widths)``, or the sum of the
        caps when that is nearer. Every slice has a block at least (or its cap, when that is less).

    Raises
    ------
    ValueError
        For a `keep` outside (0, 1], too small for a block each or more than the caps allow; caps above a slice's
        singular values; an `importance` that is missing, not used, negative or not finite.
    """
    spectra = [_spectrum(i, spectrum) for i, spectrum in enumerate(spectra)]
    count = len(spectra)
    if not count:
        raise ValueError("spectra is empty; give the singular values of at least one slice")
    check_choice("rule", rule, RULES)
    block = check_integer("block", block, low=1)
    if not isinstance(keep, (int, float, np.number)) or isinstance(keep, bool) or not 0 < keep <= 1:
        raise ValueError(f"keep must be above 0 and at most 1, got {keep!r}")
    full = [len(spectrum) for spectrum in spectra]
    sizes = full if widths is None else _integers("widths", widths, count, low=1)
    limits = full if caps is None else _integers("caps", caps, count, low=1)
    for i, (limit, most) in enumerate(zip(limits, full, strict=True)):
        if limit > most:
            raise ValueError(f"caps[{i}] is {limit}, above the rank {most} that its slice can have")
    firsts = [min(block, limit) for limit in limits]
    wanted, most = float(keep) * sum(sizes), sum(limits)
    if wanted > most * (1 + 1e-12):
        raise ValueError(
            f"keep={keep} asks for {wanted:.0f} numbers but the ranks can be {most} in all; keep at most "
            f"{most / sum(sizes):.4f}, or raise the caps"
        )
    total = min((min(block * round(wanted / block), most), most), key=lambda size: abs(size - wanted))
    if total < sum(firsts):
        raise ValueError(
            f"keep={keep} of {sum(sizes)} numbers is less than a first block of each slice, {sum(firsts)} in all; "
            f"keep at least {sum(firsts) / sum(sizes):.4f}, or take a smaller block than {block}"
        )
    fisher = rule in ("fisher", "fisher-uniform")
    if fisher != (importance is not None):
        raise ValueError(f"rule={rule!r} {'needs importance; give it' if fisher else 'does not use importance'}")
    if projections is not None and rule != "fisher-uniform":
        raise ValueError(f"rule={rule!r} does not use projections; leave it out")
    if rule == "balanced":
        squares = [np.square(spectrum) for spectrum in spectra]

        def gain(i: int, rank: int) -> float:
            return float(squares[i][rank : min(rank + block, limits[i])].mean())

        return _hand_out(firsts, limits, total, block, gain)
    shares = np.asarray(sizes, np.float64) if importance is None else _importance(importance, count)
    if rule != "fisher-uniform":
        return _share_out(shares, firsts, limits, total, block)
    groups = list(range(count)) if projections is None else _integers("projections", projections, count, low=0)
    members = [[i for i in range(count) if groups[i] == group] for group in dict.fromkeys(groups)]
    sums = [[sum(x[i] for i in m) for m in members] for x in (shares, firsts, limits)]
    totals = _share_out(np.asarray(sums[0], np.float64), sums[1], sums[2], total, block)
    ranks = [0] * count
    for inside, subtotal in zip(members, totals, strict=True):
        equal = np.ones(len(inside))
        parts = _share_out(equal, [firsts[i] for i in inside], [limits[i] for i in inside], subtotal, block)
        for i, rank in zip(inside, parts, strict=True):
            ranks[i] = rank
    return ranks


def _hand_out(
    ranks: list[int], limits: list[int], total: int, block: int, gain: Callable[[int, int], float]
) -> list[int]:
    """Add blocks to `ranks` where ``gain(slice, rank)`` is largest, until their sum is `total`."""
    ranks, left = list(ranks), total - sum(ranks)
    gains = [gain(i, rank) if rank < limits[i] else -np.inf for i, rank in enumerate(ranks)]
    while left > 0:
        best = int(np.argmax(gains))
        step = min(block, limits[best] - ranks[best], left)
        ranks[best] += step
        left -= step
        gains[best] = gain(best, ranks[best]) if ranks[best] < limits[best] else -np.inf
    return ranks


def _share_out(shares: np.ndarray, firsts: list[int], limits: list[int], total: int, block: int) -> list[int]:
    """Ranks in proportion to `shares` between first blocks and limits, whole blocks, largest remainders first."""
    low, high = np.asarray(firsts, np.float64), np.asarray(limits, np.float64)
    target = _scale_between(shares, low, high, total)
    ranks = [first + (int(x - first + 1e-9 * total) // block) * block for first, x in zip(firsts, target, strict=True)]
    return _hand_out(ranks, limits, total, block, lambda i, rank: float(target[i] - rank))


def _scale_between(shares: np.ndarray, low: np.ndarray, high: np.ndarray, total: int) -> np.ndarray:
    """``clip(c shares, low, high)`` with the c that makes its sum `total`; shares of 0 count as tiny ones."""
    shares = np.maximum(shares, shares.max() * 1e-12 if shares.max() > 0 else 1.0)
    least, most = float((low / shares).min()), float((high / shares).max())
    for _ in range(200):
        middle = (least + most) / 2
        if float(np.clip(middle * shares, low, high).sum()) < total:
            least = middle
        else:
            most = middle
    return np.clip(most * shares, low, high)


def _spectrum(i: int, spectrum: Any) -> np.ndarray:
    x = np.asarray(spectrum, np.float64)
    if x.ndim != 1 or not len(x):
        raise ValueError(f"spectra[{i}] must be a list of singular values, got shape {x.shape}")
    if not np.isfinite(x).all() or (x < 0).any() or (np.diff(x) > 0).any():
        raise ValueError(f"spectra[{i}] must be finite, not negative and in descending order")
    return x


def _integers(name: str, numbers: Sequence[int], count: int, *, low: int) -> list[int]:
    if len(numbers) != count:
        raise ValueError(f"{name} must have a number for each of {count} slices, got {len(numbers)}")
    return [check_integer(f"{name}[{i}]", number, low=low) for i, number in enumerate(numbers)]


def _importance(importance: Any, count: int) -> np.ndarray:
    x = np.asarray(importance, np.float64)
    if x.shape != (count,):
        raise ValueError(f"importance must have shape ({count},), got {x.shape}")
    if not np.isfinite(x).all() or (x < 0).any() or not x.any():
        raise ValueError(f"importance must be finite, not negative and not all zero, got {x.tolist()}")
    return x
