"""The quantizer's bound against another search than the claim's own: hypothesis, steered by the error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch._checks import BITS, FLOAT_DTYPES
from kvsketch.bounds import quantizer_error_bound
from kvsketch.kivi import AXES
from kvsketch.testing import CPU_ENGINES
from kvsketch.validation.claim import Setting
from kvsketch.validation.quantizer_search import LARGEST, errors_over_bound, library_recover, search_worst
from kvsketch.validation.quantizer_textbook import bound_around_zero, textbook_bound

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

GROUP = 8
NUMBERS = st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=2 * GROUP)


@pytest.mark.parametrize("engine", CPU_ENGINES)
@hypothesis.settings(max_examples=300, derandomize=True, deadline=None, database=None)
@hypothesis.given(
    numbers=NUMBERS,
    bits=st.sampled_from(BITS),
    axis=st.sampled_from(AXES),
    dtype=st.sampled_from(sorted(FLOAT_DTYPES)),
    offset=st.floats(-LARGEST / 2, LARGEST / 2, width=32),
    size=st.sampled_from((0.0, 2.0**-40, 2.0**-24, 2.0**-12, 0.5)),
)
def test_no_group_errs_more_than_the_bound(engine, numbers, bits, axis, dtype, offset, size):
    x = np.array([numbers]) * size + offset
    x = x.astype(np.float32).astype(FLOAT_DTYPES[dtype])
    recovered = library_recover(engine, axis)(x, bits, GROUP)
    ratio = float(errors_over_bound(x, recovered, bits, GROUP, quantizer_error_bound)[0])
    hypothesis.target(ratio, label="error over bound")
    assert ratio <= 1


def test_the_search_returns_the_row_that_it_found():
    rng = Setting().generator("row")
    recover = library_recover("reference", "channels")
    options: dict[str, Any] = {"bits": 4, "group": GROUP, "width": 2 * GROUP, "dtype": "float16", "rng": rng}
    ratio, row = search_worst(recover, textbook_bound, rounds=5, **options)
    assert row.dtype == np.float16
    assert errors_over_bound(row[None], recover(row[None], 4, GROUP), 4, GROUP, textbook_bound)[0] == ratio
    assert ratio > 1
    calm, row = search_worst(recover, bound_around_zero, rounds=5, around_zero=True, **options)
    assert calm <= 1
    assert row[0] == row[GROUP] == 0
