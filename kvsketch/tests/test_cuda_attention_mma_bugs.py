"""Bugs planted in the kernels of attention on tensor cores, one at a time: the tests must see each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvsketch.codecs import Codec, GroupedInts, SignSketch
from kvsketch.cuda_raw import attention
from kvsketch.tests.cuda_host import CudaHostError
from kvsketch.tests.cuda_host.fixtures import needs_harness
from kvsketch.tests.cuda_host.planted import checked_with, planted
from kvsketch.tests.page_cases import Row, make_view
from kvsketch.tests.test_cuda_attention_bugs import Bug, Scenario, far_apart
from kvsketch.tests.test_cuda_attention_mma import check, queries

pytestmark = needs_harness

KEYS, VALUES = GroupedInts(2, 64), GroupedInts(2, 64)


def growing(cupy: Any, monkeypatch: pytest.MonkeyPatch, keys: Codec, ratio: int, s: int) -> None:
    """Several pages of two tiles for each warp of one block, with scores that grow; a row without some of them."""
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 0)
    rows = [Row(3, 21, 5), Row(0, 3, 0), Row(0, 0, 2)]
    view, tokens = make_view(keys, VALUES, d=40, dv=40, h=1, rows=rows)
    n = int(view.lengths.max())
    bias = np.broadcast_to(np.arange(n, dtype=np.float32) / 32, (3, 1, s, n)).copy()
    check(cupy, queries(3, ratio, s, 40), view, tokens, bias=bias)


def turns(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that take turns with pages."""
    growing(cupy, monkeypatch, KEYS, 2, 2)


def together(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warps that have the same pages."""
    growing(cupy, monkeypatch, KEYS, 2, 5)


def sketches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys with outlier channels."""
    growing(cupy, monkeypatch, SignSketch(m=72, outliers=3, outlier_m=20), 2, 2)


SCENARIOS: tuple[Scenario, ...] = (turns, together, sketches, far_apart)
WRONG = "error .*, limit|largest error|not equal|Arrays are not|Mismatched"
UNORDERED = "RACE|UNINITIALISED"
BUGS = {
    "copies that are not waited for": Bug(turns, "    copy_wait<0>();\n", "", UNORDERED),
    "no barrier between warps and the next page": Bug(together, "    Members::sync();  // what", "", UNORDERED),
    "no barrier between lanes and the next page": Bug(turns, "    Members::sync();  // what", "", UNORDERED),
    "no barrier before scores change lanes": Bug(turns, "    __syncwarp();\n\n    float", "", UNORDERED),
    "no barrier before parts lie where pages did": Bug(turns, "  __syncthreads();\n  OwnPart*", "", UNORDERED),
    "no barrier before parts are joined": Bug(turns, "  __syncthreads();\n  parts +=", "", UNORDERED),
    "no barrier after scales are made smaller": Bug(
        together, "    Team::sync();\n    return power_of_2", "", UNORDERED
    ),
    "one place for the scales of pages": Bug(turns, "next.tile == 0 ? slot ^ 1 : slot", "slot", f"{UNORDERED}|{WRONG}"),
    "a page too many": Bug(turns, "(any_sees + p - 1) / p", "any_sees / p + 1", f"{UNORDERED}|{WRONG}"),
    "an offset of 32 bits": Bug(
        far_apart,
        "pages + (((i64)row * shapes.h + head) * shapes.capacity + cut.first) * shapes.record_bytes",
        "pages + (int)((((i64)row * shapes.h + head) * shapes.capacity + cut.first) * shapes.record_bytes)",
        "OUT OF BOUNDS",
    ),
    "pages from the second on": Bug(
        turns, "shapes.capacity + cut.first)", "shapes.capacity + cut.first + PLANTED)", WRONG
    ),
    "one token of the future": Bug(turns, "position >= seen", "position > seen", WRONG),
    "tokens of another tile": Bug(turns, "at.page * p + CHUNK * at.tile", "at.page * p", WRONG),
    "no rescale of the mix": Bug(turns, "Values::rescale(mix, ", "", WRONG),
    "no rescale of the sum": Bug(turns, "softmax.total *= decay;", "", WRONG),
    "no rescale of the parts": Bug(turns, "exp2_fast(parts[w].largest[r] - shift)", "1.f", WRONG),
    "a mask of half a warp": Bug(
        turns, "__shfl_xor_sync(ALL_LANES, top, 2)", "__shfl_xor_sync(0xffffu, top, 2)", "not in its own mask"
    ),
    "decays of other columns": Bug(turns, "decay, 8 * t + 4)", "decay, PLANTED ? 8 * t : 8 * t + 4)", WRONG),
    "scales that stay small": Bug(turns, "query.unscale * growth", "query.unscale", WRONG),
    "rests of queries left out": Bug(turns, "fmaf(left[i], factor, products[i])", "products[i]", WRONG),
    "rests of weights left out": Bug(
        together, "if (REST == BY_PRODUCT) mma_f16(sums", "if (REST == BY_PRODUCT && !PLANTED) mma_f16(sums", WRONG
    ),
    "codes found elsewhere than put": Bug(turns, "Chunk<BITS>::swizzle(x, first)", "x + first", WRONG),
    "zeros of another part": Bug(turns, "scale + (PARTS + g) * PART_BYTES", "scale + g * PART_BYTES", WRONG),
    "outlier channels left in": Bug(sketches, "Inner::norm(tile, token) * (inner_unit * in)", "0.f", WRONG),
    "columns of the first page for all": Bug(
        sketches, "(found | found >> 2) & 0x11111111u", "(columns->channels[0] ? 0x11111111u : 0)", WRONG
    ),
    "columns that are not there yet": Bug(sketches, "    Team::sync();\n    return 1.f", "", UNORDERED),
    "norms of another plane": Bug(sketches, "8 * plane + with.g", "with.g", WRONG),
}


@pytest.fixture(autouse=True, scope="module")
def _checked() -> Iterator[None]:
    with checked_with(BUGS):
        yield


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_without_a_bug_nothing_is_raised(cupy: Any, monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    scenario(cupy, monkeypatch)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bug = BUGS[name]
    with planted(name, BUGS), pytest.raises((CudaHostError, AssertionError), match=f"(?s){bug.says}"):
        bug.scenario(cupy, monkeypatch)
