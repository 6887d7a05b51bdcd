"""What layouts and codecs refuse, by name."""

from __future__ import annotations

import pytest

from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.layout import side_layout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("both", Exact(), 32, 64), r"side must be one of \['keys', 'values'\], got 'both'"),
        (("keys", Exact(), 32, 64, "float64"), "dtype must be one of .*, got 'float64'"),
        (("keys", GroupedInts(), 32, 0), "head size must be between 1 and 512, got 0"),
        (("values", GroupedInts(), 32, 513), "head size must be between 1 and 512, got 513"),
        (("keys", SignSketch(), 32, 513), "head size must be between 1 and 512, got 513"),
        (("keys", Exact(), 32, 8193), "head size must be between 1 and 8192, got 8193"),
        (("keys", TokenInts(), 32, 8193), "head size must be between 1 and 8192, got 8193"),
        (("keys", Exact(), 16, 64), "tokens must be >= 32, got 16"),
        (("keys", Exact(), 48, 64), "page of 48 tokens does not fit"),
        (("keys", GroupedInts(2, 64), 32, 64), "page of 32 tokens does not fit .*group=64.* multiples of 64"),
        (("keys", GroupedInts(2, 48), 96, 64), "group=48 does not fit keys"),
        (("values", SignSketch(), 32, 64), "holds keys only"),
        (("keys", SignSketch(outliers=65, outlier_m=8), 32, 64), "outliers=65 is more than the 64 channels"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        side_layout(*arguments)


def test_an_unknown_field_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"norms.*its fields are .*codes.*scale.*zero"):
        side_layout("keys", GroupedInts(), 32, 64).field("norms")
    assert side_layout("keys", GroupedInts(), 32, 64).field("scale").nbytes == 128


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GroupedInts(bits=5), ValueError, r"bits must be one of \[1, 2, 3, 4, 8\], got 5"),
        (lambda: GroupedInts(bits=True), ValueError, "bits must be one of"),
        (lambda: GroupedInts(group=0), ValueError, "group must be >= 8, got 0"),
        (lambda: GroupedInts(group=36), ValueError, "group must be a multiple of 8, got 36"),
        (lambda: GroupedInts(group=32.0), TypeError, "group must be an integer, got 32.0"),  # type: ignore[arg-type]
        (lambda: TokenInts(bits=5), ValueError, r"bits must be one of \[1, 2, 3, 4, 8\], got 5"),
        (lambda: TokenInts(group=0), ValueError, "group must be >= 8, got 0"),
        (lambda: TokenInts(group=36), ValueError, "group must be a multiple of 8, got 36; leave it out for one group"),
        (lambda: TokenInts(group=8.0), TypeError, "group must be an integer, got 8.0"),  # type: ignore[arg-type]
        (lambda: SignSketch(m=0), ValueError, "m must be >= 1, got 0"),
        (lambda: SignSketch(kind="haar"), ValueError, "kind must be one of"),
        (lambda: SignSketch(outliers=4), ValueError, "outliers=4 and outlier_m=0 go together"),
        (lambda: SignSketch(outlier_channels="layer"), ValueError, "outlier_channels must be one of"),
    ],
)
def test_codecs_check_their_settings(make, error, message):
    with pytest.raises(error, match=message):
        make()
