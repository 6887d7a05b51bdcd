"""Ranks: exact totals, caps, and each rule against what it says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvsketch.palu import allocate_ranks

RULES = ("uniform", "fisher", "fisher-uniform", "balanced")


def make_spectra(widths, seed=0):
    rng = np.random.default_rng(seed)
    return [np.sort(rng.uniform(0.1, 3) * rng.exponential(size=width))[::-1] for width in widths]


def importance_for(rule, count, seed=0):
    return np.random.default_rng(seed).uniform(0, 1, count) ** 4 if rule.startswith("fisher") else None


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keep", [0.2, 0.3, 0.5, 0.7, 0.95, 1.0])
@pytest.mark.parametrize(
    ("widths", "block"), [([192] * 12, 32), ([64, 64, 128, 512], 4), ([80] * 6, 8), ([100, 72], 1)]
)
def test_totals_are_exact_and_ranks_whole_blocks(rule, keep, widths, block):
    spectra = make_spectra(widths)
    ranks = allocate_ranks(spectra, keep, rule=rule, importance=importance_for(rule, len(widths)), block=block)
    assert all(isinstance(rank, int) for rank in ranks)
    wanted = keep * sum(widths)
    if keep == 1:
        assert ranks == widths
    else:
        assert sum(ranks) == block * round(wanted / block)
    assert all(block <= rank <= width for rank, width in zip(ranks, widths, strict=True))
    if all(width % block == 0 for width in widths):
        assert not any(rank % block for rank in ranks)


@pytest.mark.parametrize("rule", RULES)
def test_widths_that_are_no_whole_blocks_keep_the_total_exact(rule):
    widths = [80, 80, 40, 20]
    for keep in (0.55, 0.6, 0.8, 0.99, 1.0):
        ranks = allocate_ranks(make_spectra(widths), keep, rule=rule, importance=importance_for(rule, 4), block=32)
        assert sum(ranks) == min([32 * round(keep * 220 / 32), 220], key=lambda total: abs(total - keep * 220))
        assert all(min(32, width) <= rank <= width for rank, width in zip(ranks, widths, strict=True))
        odd = [rank for rank, width in zip(ranks, widths, strict=True) if rank % 32 and rank != width]
        assert len(odd) <= 1


@pytest.mark.parametrize("rule", RULES)
def test_caps_are_honoured(rule):
    caps = [96, 32, 192, 64, 192]
    ranks = allocate_ranks(
        make_spectra([192] * 5), 0.55, rule=rule, importance=importance_for(rule, 5), block=32, caps=caps
    )
    assert sum(ranks) == 32 * round(0.55 * 960 / 32)
    assert all(rank <= cap for rank, cap in zip(ranks, caps, strict=True))


def test_balanced_is_the_best_of_all_divisions_of_spectra_that_fall():
    spectra = make_spectra([12, 12, 12], seed=3)
    ranks = allocate_ranks(spectra, 0.5, block=2)
    kept = {
        blocks: sum(np.square(s[: 2 * count]).sum() for s, count in zip(spectra, blocks, strict=True))
        for blocks in itertools.product(range(1, 7), repeat=3)
        if sum(blocks) == 9
    }
    assert tuple(rank // 2 for rank in ranks) == max(kept, key=kept.__getitem__)


def test_balanced_gives_each_block_to_the_largest_sum_of_the_next():
    spectra = make_spectra([96, 64, 96, 32], seed=5)
    ranks = [8, 8, 8, 8]
    while sum(ranks) < 144:
        gains = [np.square(s[r : r + 8]).sum() if r < len(s) else -1 for s, r in zip(spectra, ranks, strict=True)]
        ranks[int(np.argmax(gains))] += 8
    assert allocate_ranks(spectra, 0.5, rule="balanced", block=8) == ranks


def test_uniform_keeps_the_same_share_of_each():
    assert allocate_ranks(make_spectra([192] * 4), 0.5, rule="uniform") == [96] * 4
    assert allocate_ranks(make_spectra([64, 128, 256]), 0.5, rule="uniform") == [32, 64, 128]
    # 134.4 of 192 each is four blocks and a fifth one for every fifth slice.
    ranks = allocate_ranks(make_spectra([192] * 10), 0.7, rule="uniform")
    assert sorted(ranks) == [128] * 8 + [160] * 2


def test_fisher_ranks_are_proportional_to_importance():
    spectra = make_spectra([256] * 4)
    assert allocate_ranks(spectra, 0.5, rule="fisher", importance=[1, 2, 3, 2]) == [64, 128, 192, 128]
    # What a slice cannot have goes to the others in proportion, and each has a block.
    assert allocate_ranks(spectra, 0.5, rule="fisher", importance=[100, 2, 1, 0]) == [256, 160, 64, 32]
    scaled = allocate_ranks(spectra, 0.5, rule="fisher", importance=np.array([1, 2, 3, 2]) * 1e-9)
    assert scaled == [64, 128, 192, 128]


def test_fisher_uniform_shares_a_projections_total_equally():
    spectra, importance = make_spectra([64] * 6), [5, 1, 3, 1, 1, 1]
    ranks = allocate_ranks(
        spectra, 0.5, rule="fisher-uniform", importance=importance, projections=[0, 0, 0, 7, 7, 7], block=8
    )
    assert ranks == [48, 48, 48, 16, 16, 16]
    assert allocate_ranks(spectra, 0.5, rule="fisher", importance=importance, block=8) != ranks
    alone = allocate_ranks(spectra, 0.5, rule="fisher-uniform", importance=importance, block=8)
    assert alone == allocate_ranks(spectra, 0.5, rule="fisher", importance=importance, block=8)


def test_widths_above_the_singular_values_count():
    ranks = allocate_ranks(make_spectra([64, 64]), 0.5, rule="uniform", widths=[128, 128], block=8)
    assert ranks == [64, 64]
    with pytest.raises(ValueError, match=r"asks for 154 numbers but the ranks can be 128 in all; keep at most 0.5000"):
        allocate_ranks(make_spectra([64, 64]), 0.6, rule="uniform", widths=[128, 128])


@pytest.mark.parametrize("keep", [0, -0.5, 1.0001, float("nan"), "half", True])
def test_a_share_outside_its_range_is_refused(keep):
    with pytest.raises(ValueError, match="keep must be above 0 and at most 1, got"):
        allocate_ranks(make_spectra([64]), keep)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spectra": []}, "spectra is empty"),
        ({"spectra": [np.ones((2, 2))]}, r"spectra\[0\] must be a list of singular values, got shape \(2, 2\)"),
        ({"spectra": [np.array([1.0, np.nan])]}, r"spectra\[0\] must be finite"),
        ({"spectra": [np.array([1.0, 2.0])]}, r"spectra\[0\] must be .* in descending order"),
        ({"rule": "water"}, "rule must be one of"),
        ({"block": 0}, "block must be >= 1, got 0"),
        ({"keep": 0.1}, "keep=0.1 of 192 numbers is less than a first block of each slice, 64 in all; .*smaller block"),
        ({"caps": [97, 96]}, r"caps\[0\] is 97, above the rank 96"),
        ({"caps": [96]}, "caps must have a number for each of 2 slices, got 1"),
        ({"caps": [32, 32]}, "keep=0.5 asks for 96 numbers but the ranks can be 64 in all; keep at most 0.3333"),
        ({"importance": [1, 1]}, "rule='balanced' does not use importance"),
        ({"rule": "fisher"}, "rule='fisher' needs importance"),
        ({"rule": "fisher", "importance": [1]}, r"importance must have shape \(2,\), got \(1,\)"),
        ({"rule": "fisher", "importance": [1, np.nan]}, "importance must be finite"),
        ({"rule": "fisher", "importance": [1, -1]}, "importance must be .* not negative"),
        ({"rule": "fisher", "importance": [0, 0]}, "importance must be .* not all zero"),
        ({"projections": [0, 0]}, "rule='balanced' does not use projections"),
        ({"rule": "fisher-uniform", "importance": [1, 1], "projections": [0]}, "projections must have a number for"),
    ],
)
def test_bad_input_is_named(change, message):
    given = {"spectra": make_spectra([96, 96]), "keep": 0.5} | change
    with pytest.raises(ValueError, match=message):
        allocate_ranks(given.pop("spectra"), given.pop("keep"), **given)
