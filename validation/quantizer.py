"""The error of grouped integers is bounded: half a step, plus what rounding scale and zero to float16 costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvsketch._checks import BITS, FLOAT_DTYPES
from kvsketch.bounds import quantizer_error_bound, quantizer_error_bound_textbook
from kvsketch.kivi import AXES, dequantize_groups, quantize_groups
from kvsketch.statistical_tests import Check, check_at_least, check_at_most
from kvsketch.validation.claim import HOLDS, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.quantizer_search import Bound, Recover, library_recover, search_worst

#: Numbers of a row and of a group, with some last groups shorter; of several, so that some lie between two codes.
WIDTHS = ((8, 8), (40, 32), (96, 64))
MORE_WIDTHS = ((16, 16), (32, 32), (128, 128), (300, 128))
ROUNDS, FULL_ROUNDS = 12, 100
#: What the search reaches of the bound, at least: a bound that is 1 % too generous fails.
NEARNESS = 0.995
HALF_MAX = 65504.0


def check_search(
    setting: Setting, recover: Callable[[str], Recover], bound: Bound, *, bits: Any = BITS, axes: Any = AXES
) -> Outcome:
    """The worst errors that a search finds, for all `bits`, dtypes, axes and groups, in units of `bound`."""
    outcome, rounds = Outcome(), FULL_ROUNDS if setting.full else ROUNDS
    widths = WIDTHS + MORE_WIDTHS if setting.full else WIDTHS
    found: dict[str, list[float]] = {dtype: [] for dtype in FLOAT_DTYPES}
    for dtype, b, axis, (width, group) in itertools.product(FLOAT_DTYPES, bits, axes, widths):
        rng = setting.generator("quantizer", dtype, b, axis, width)
        worst, _ = search_worst(
            recover(axis), bound, bits=b, group=group, width=width, dtype=dtype, rng=rng, rounds=rounds
        )
        found[dtype].append(worst)
    for dtype, ratios in found.items():
        what = f"worst error a search finds, {dtype}, in units of the bound"
        outcome.checks.append(check_at_most(what, max(ratios), 1, n=len(ratios)))
    least = min(ratio for ratios in found.values() for ratio in ratios)
    cases = sum(map(len, found.values()))
    what = "the search comes near the bound in every case, in units of the bound"
    outcome.checks.append(check_at_least(what, least, NEARNESS, n=cases))
    largest = max(ratio for ratios in found.values() for ratio in ratios)
    outcome.figures.append(
        Figure(f"worst error found over the bound, {cases} searches", "", "at most 1", f"{least:.4f} to {largest:.4f}")
    )
    return outcome


def check_constants(setting: Setting) -> Check:
    """A group of one number comes back as that number, rounded to float16: exactly, if it is one."""
    rng, wrong, count = setting.generator("constants"), 0, 0
    for dtype, bits, axis in itertools.product(FLOAT_DTYPES, BITS, AXES):
        numbers = (rng.standard_normal(40) * 10.0 ** rng.uniform(-9, 4, 40)).clip(-HALF_MAX, HALF_MAX)
        numbers[:4] = 0, -0.0, HALF_MAX, -HALF_MAX
        numbers = numbers.astype(np.float32).astype(FLOAT_DTYPES[dtype])
        # bfloat16 has numbers next to 65504 that are beyond it.
        numbers = np.where(np.abs(numbers.astype(np.float32)) > HALF_MAX, FLOAT_DTYPES[dtype].type(1), numbers)
        x = np.repeat(numbers[:, None], 32, axis=1)
        found = library_recover(setting.engine, axis)(x, bits, 32)
        expected = x.astype(np.float32).astype(np.float16).astype(np.float32)
        wrong += int((found != expected).sum())
        count += x.size
    return check_at_most("numbers of constant groups that are not recovered exactly", wrong, 0, n=count)


def check_saturation(setting: Setting) -> list[Check]:
    """Scales and zeros beyond float16 are counted, and the groups beside them are what they are without."""
    rng, miscounted, harmed, count = setting.generator("saturation"), 0, 0, 0
    for bits, axis in itertools.product(BITS, AXES):
        x = rng.standard_normal((16, 32)).astype(np.float32)
        alone = _recover_rows(setting, x, bits, axis)[0]
        wild = rng.choice(16, size=6, replace=False)
        x[wild, 3] = 1e5 * np.array([1, -1, 3, -3, 30, -30])
        x[wild[::2], 9] = np.float32(-7e4)
        recovered, saturated = _recover_rows(setting, x, bits, axis)
        lo, hi = x.min(axis=1), x.max(axis=1)
        expected = (np.abs(lo) > HALF_MAX).sum() + ((hi - lo) / np.float32(2**bits - 1) > HALF_MAX).sum()
        miscounted += abs(saturated - int(expected))
        tame = np.setdiff1d(np.arange(16), wild)
        harmed += int((recovered[tame] != alone[tame]).sum()) + int((~np.isfinite(recovered)).sum())
        count += x.shape[0]
    return [
        check_at_most("scales and zeros beyond float16 that are not counted, or counted without being", miscounted, 0),
        check_at_most("numbers harmed by another group's saturation, or recovered as infinite", harmed, 0, n=count),
    ]


def _recover_rows(setting: Setting, x: Any, bits: int, axis: str) -> tuple[Any, int]:
    given = np.ascontiguousarray(x.T) if axis == "tokens" else x
    codes = quantize_groups(given, bits=bits, group=32, axis=axis, engine=setting.engine)
    found = dequantize_groups(codes, engine=setting.engine)
    return (found.T if axis == "tokens" else found), codes.saturated


def run(setting: Setting) -> Outcome:
    outcome = check_search(setting, lambda axis: library_recover(setting.engine, axis), quantizer_error_bound)
    outcome.checks += [check_constants(setting), *check_saturation(setting)]
    return outcome


def recover_with_half_range(x: Any, bits: int, group: int) -> Any:
    """The quantizer with its range and scale computed in float16, of which the scale then has its error twice."""
    out = np.empty(x.shape, dtype=np.float32)
    levels = 2**bits - 1
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start in range(0, x.shape[1], group):
            part = x[:, start : start + group].astype(np.float32)
            lo, hi = (f(axis=1, keepdims=True).astype(np.float16) for f in (part.min, part.max))
            scale = ((hi - lo) / np.float16(levels)).astype(np.float16).astype(np.float32)
            zero = lo.astype(np.float32)
            codes = np.where(scale > 0, np.rint((part - zero) / scale).clip(0, levels), 0)
            out[:, start : start + group] = codes * scale + zero
    return out


CLAIM = Claim(
    name="quantizer",
    title="A number stored as a small integer comes back within a stated error",
    source="KIVI, section 3 (the rule; no bound is published)",
    published="code = round((x - zero)/scale), scale = (max - min)/(2^bits - 1); the rule suggests |x - x^| <= scale/2",
    proved="|x - x^| <= max(s'/2, |lo - z'| + L |s - s'|) + 2^-22 (L s' + |z'| + hi - lo), s' and z' stored in float16 "
    "(bounds.quantizer_error_bound)",
    finding="True for every width, group size and input type: a search that tries to break the bound comes within "
    "half a percent of it and never passes it. Groups of one repeated number are exact, and numbers too large for the "
    "stored scale are counted and harm no other group.",
    verdict=HOLDS,
    run=run,
    twins=(
        Twin(
            "range and scale computed in float16",
            lambda setting: check_search(
                setting, lambda axis: recover_with_half_range, quantizer_error_bound, axes=("channels",)
            ),
        ),
        Twin(
            "half a step as the bound",
            lambda setting: check_search(
                setting,
                lambda axis: library_recover(setting.engine, axis),
                quantizer_error_bound_textbook,
                bits=(2, 8),
                axes=("channels",),
            ),
        ),
    ),
)
