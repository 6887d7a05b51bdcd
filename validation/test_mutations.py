"""Tests of the tests: a library that is broken in any of these ways turns claims red, and no claim passes for nothing.

Each mutation replaces functions of the reference engine, or of what all engines share; at least one of its claims must
fail on that engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvsketch import _dispatch, _palu_factors, bounds, palu, rotation
from kvsketch.reference import kivi, qjl
from kvsketch.reference import palu as reference_palu
from kvsketch.reference.bitpack import pack_signs
from kvsketch.statistical_tests import check_at_most
from kvsketch.validation import model_data, test_claims
from kvsketch.validation.claim import MEASURED, Claim, Outcome, Setting, Twin
from kvsketch.validation.registry import NAMES, load_claim, load_claims

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """A way to break the library, and the claims of which one must fail, the cheapest first."""

    name: str
    apply: Callable[[Patch], None]
    claims: tuple[str, ...]


def scale_constant(patch: Patch) -> None:
    exact = bounds.sketch_constant
    patch.setattr(bounds, "sketch_constant", lambda d, kind="orthogonal": 1.01 * exact(d, kind))


def use_published_constant(patch: Patch) -> None:
    exact = bounds.sketch_constant
    published = math.sqrt(math.pi / 2)
    patch.setattr(bounds, "sketch_constant", lambda d, kind="orthogonal": published if d == 16 else exact(d, kind))


def make_sign_of_zero_negative(patch: Patch) -> None:
    patch.setattr(qjl, "pack_signs", lambda x: pack_signs(np.where(x == 0, np.float32(-1), x)))


def change_matrix(patch: Patch, change: Callable[[Any], Any]) -> None:
    """Let every projection that is drawn have ``change(matrix)``."""
    draw = rotation._draw

    def draw_changed(*arguments: Any) -> rotation.Projection:
        drawn = draw(*arguments)
        rest = {name: getattr(drawn, name) for name in ("kind", "m", "d", "seed", "stream", "constant")}
        return rotation.Projection(matrix=change(drawn.matrix), **rest)

    patch.setattr(rotation, "_draw", draw_changed)


def use_row_twice(patch: Patch) -> None:
    change_matrix(patch, lambda matrix: np.concatenate([matrix[:1], matrix[:-1]]))


def ignore_seed(patch: Patch) -> None:
    draw = rotation._draw
    patch.setattr(rotation, "_draw", lambda m, d, kind, seed, stream: draw(m, d, kind, 0, stream))


def let_norms_overflow(patch: Patch) -> None:
    patch.setattr(qjl, "round_norms", lambda squares: (_half(np.sqrt(squares)), 0))


def sum_squares_in_float16(patch: Patch) -> None:
    exact = qjl.round_norms
    patch.setattr(qjl, "round_norms", lambda squares: exact(_half(squares).astype(np.float32)))


def _half(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def compute_scale_in_float16(patch: Patch) -> None:
    """The range and its quotient in float16, and the codes from that scale."""

    def quantize_block(x: Any, bits: int) -> tuple[Any, Any, Any, int]:
        levels = 2**bits - 1
        with np.errstate(all="ignore"):
            lo, hi = (_half(np.clip(f(axis=-1), -kivi.HALF_MAX, kivi.HALF_MAX)) for f in (x.min, x.max))
            scale = (hi - lo) / np.float16(levels)
            wide = scale.astype(np.float32)[..., None]
            steps = (x - lo.astype(np.float32)[..., None]) / np.where(wide > 0, wide, np.float32(1))
            codes = np.where(wide > 0, np.clip(np.rint(steps), 0, levels), 0)
        return codes.astype(np.uint8), scale, lo, 0

    patch.setattr(kivi, "quantize_block", quantize_block)


def group_keys_along_channels(patch: Patch) -> None:
    quantize = kivi.quantize_groups

    def quantize_groups(x: Any, *, bits: int, group: int, axis: str) -> Any:
        return quantize(x, bits=bits, group=group, axis="channels")

    patch.setattr(kivi, "quantize_groups", quantize_groups)


def subtract_squares(patch: Patch) -> None:
    """The outliers' norm as sqrt(|k|^2 - |k_in|^2)."""
    sketch = qjl.sketch_keys

    def sketch_keys(k: Any, matrix: Any, channels: Any, outlier_matrix: Any, page: int) -> tuple[Any, ...]:
        signs, norms, outlier_signs, outlier_norms, saturated = sketch(k, matrix, channels, outlier_matrix, page)
        if channels is not None:
            inner = qjl.split_outliers(k, channels, page)[0].astype(np.float32)
            whole = k.astype(np.float32)
            with np.errstate(all="ignore"):
                rest = np.sqrt((whole * whole).sum(axis=-1) - (inner * inner).sum(axis=-1))
                outlier_norms = np.minimum(rest, np.float32(qjl.FLOAT16_MAX)).astype(np.float16)
        return signs, norms, outlier_signs, outlier_norms, saturated

    patch.setattr(qjl, "sketch_keys", sketch_keys)


def ignore_gram(patch: Patch) -> None:
    directions = _palu_factors._directions
    patch.setattr(_palu_factors, "_directions", lambda scaled, gram: directions(scaled, np.eye(len(gram))))


def ignore_gradients(patch: Patch) -> None:
    roots = _palu_factors._roots
    patch.setattr(_palu_factors, "_roots", lambda weight, damping: roots(np.eye(len(weight)), damping))


def rotate_one_factor(patch: Patch) -> None:
    patch.setattr(palu, "rotate", lambda down, up, rotation: (rotation @ down, up))


def turn_keys_for_next_place(patch: Patch) -> None:
    rebuild = reference_palu.rebuild_keys
    patch.setattr(
        reference_palu,
        "rebuild_keys",
        lambda latents, matrices, key_norm, rope, at: rebuild(latents, matrices, key_norm, rope, at + 1),
    )


MUTATIONS = (
    Mutation("c_d scaled by 1.01", scale_constant, ("unbiased",)),
    Mutation("sqrt(pi/2) for orthogonal rows at d = 16", use_published_constant, ("unbiased",)),
    Mutation("sign(0) = -1", make_sign_of_zero_negative, ("norm_error", "same_codes")),
    Mutation("one row of S used twice", use_row_twice, ("variance", "orthogonal_gain")),
    Mutation("norms beyond float16 are infinite", let_norms_overflow, ("norm_error", "same_codes")),
    Mutation("squares of norms summed in float16", sum_squares_in_float16, ("norm_error", "outliers")),
    Mutation("scale computed in float16", compute_scale_in_float16, ("quantizer", "same_codes")),
    Mutation("keys grouped along channels", group_keys_along_channels, ("same_codes", "kivi_axes")),
    Mutation("a seed ignored", ignore_seed, ("unbiased", "variance")),
    Mutation("the outliers' norm from sqrt(a^2 - b^2)", subtract_squares, ("outliers", "same_codes")),
    Mutation("whitening ignores the inputs", ignore_gram, ("palu_whitening",)),
    Mutation("two-sided factors ignore the gradients", ignore_gradients, ("palu_whitening",)),
    Mutation("one of two factors rotated", rotate_one_factor, ("palu_rotation",)),
    Mutation("rebuilt keys turned for the next place", turn_keys_for_next_place, ("palu_attention",)),
)


@pytest.fixture
def patch() -> Iterator[Patch]:
    """What mutates the library; nothing that was drawn or found by a mutated one is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        _clear_caches()
        yield patch
    _clear_caches()


DRAW, FIND = rotation._draw, _dispatch._find


def _clear_caches() -> None:
    DRAW.cache_clear()
    FIND.cache_clear()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_broken_library_fails(mutation: Mutation, patch: Patch) -> None:
    mutation.apply(patch)
    tried = []
    for name in mutation.claims:
        claim = load_claim(name) if name in NAMES else None
        if claim is None or claim.missing():
            continue
        with np.errstate(all="ignore"):
            outcome = claim.run(Setting(engine="reference"))
        tried.append(claim.name)
        if outcome.checks and not outcome.passed:
            print(claim.name, *(check for check in outcome.checks if not check.passed), sep="\n")
            return
    pytest.fail(f"no claim finds it out; tried {tried} of {list(mutation.claims)}")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_mutation_ends_with_its_test(mutation: Mutation) -> None:
    before = _fingerprint()
    with pytest.MonkeyPatch.context() as patch:
        mutation.apply(patch)
    assert _fingerprint() == before


#: What mutations change.
MODULES = (bounds, rotation, kivi, qjl, palu, _palu_factors, reference_palu)


def _fingerprint() -> tuple[Any, ...]:
    return (*(vars(module).copy() for module in MODULES),)


class NotRunError(Exception):
    """Raised in place of the engine's work."""


def any_layer() -> model_data.LayerData:
    """Data in the shapes that the demo model has."""
    rng, n = np.random.default_rng(0), model_data.TOKENS
    shapes = ((9, n, 64), (3, n, 64), (3, n, 64), (n, 576), (192, 576), (192, 576))
    return model_data.LayerData(*(rng.standard_normal(shape, dtype=np.float32) for shape in shapes))


@pytest.mark.parametrize("claim", [claim for claim in load_claims() if claim.on_engines], ids=lambda claim: claim.name)
def test_a_claim_on_engines_runs_them(claim: Claim, patch: Patch) -> None:
    """Where the engine cannot run, a claim about it cannot pass."""
    test_claims.need(claim)

    def refuse(operation: str, library: str, engine: str | None) -> Any:
        raise NotRunError(operation)

    patch.setattr(_dispatch, "_find", refuse)
    # Any data will do, as no engine gets as far as to read them; a model's take long to gather.
    patch.setattr(model_data, "collect", lambda: (any_layer(),) * 30)
    with pytest.raises(NotRunError):
        claim.run(Setting(engine="reference"))


def claim_of(run: Callable[[Setting], Outcome]) -> Claim:
    return Claim("x", "x", "x", "x", "x", "x", MEASURED, run, twins=(Twin("y", run),))


def passes(setting: Setting) -> Outcome:
    return Outcome([check_at_most("size", 1, 2)])


def fails(setting: Setting) -> Outcome:
    return Outcome([check_at_most("size", 3, 2)])


def test_a_claim_that_compares_nothing_does_not_pass() -> None:
    nothing = claim_of(lambda setting: Outcome())
    with pytest.raises(AssertionError):
        test_claims.test_claim(nothing, "reference")
    with pytest.raises(AssertionError):
        test_claims.test_twin_is_found_out(nothing, nothing.twins[0])


def test_a_twin_that_passes_is_a_failure() -> None:
    right, broken = claim_of(passes), claim_of(fails)
    test_claims.test_claim(right, "reference")
    with pytest.raises(AssertionError):
        test_claims.test_twin_is_found_out(right, right.twins[0])
    test_claims.test_twin_is_found_out(broken, broken.twins[0])
    with pytest.raises(AssertionError, match="size: 3 <= 2 FAILS"):
        test_claims.test_claim(broken, "reference")


def test_more_false_alarms_than_allowed_are_a_failure() -> None:
    check = replace(check_at_most("size", 1, 2), false_alarm=2e-6)
    with pytest.raises(AssertionError):
        test_claims.test_claim(claim_of(lambda setting: Outcome([check])), "reference")
