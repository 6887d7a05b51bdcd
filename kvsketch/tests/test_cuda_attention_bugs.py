"""Bugs planted in the kernels of attention, one at a time: the tests must see each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvsketch.attention import attend
from kvsketch.codecs import GroupedInts, SignSketch
from kvsketch.cuda_raw import attention
from kvsketch.testing import assert_same
from kvsketch.tests.cuda_attention_cases import check, moved, queries, take_simt
from kvsketch.tests.cuda_host import CudaHostError
from kvsketch.tests.cuda_host.arrays import ndarray
from kvsketch.tests.cuda_host.fixtures import needs_harness
from kvsketch.tests.cuda_host.planted import checked_with, planted
from kvsketch.tests.page_cases import Row, make_view

pytestmark = needs_harness


def several_tiles(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of three tiles of pages and of exact tokens whose scores grow, by one block; a row without some of them."""
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 0)
    rows = [Row(3, 21, 5), Row(0, 3, 600), Row(0, 0, 2)]
    view, tokens = make_view(GroupedInts(2, 32), GroupedInts(2, 32), d=24, dv=40, h=1, rows=rows)
    n = int(view.lengths.max())
    bias = np.broadcast_to(np.arange(n, dtype=np.float32) / 16, (3, 1, 3, n)).copy()
    check(cupy, queries(3, 2, 3, 24), view, tokens, bias=bias)


def outliers(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sketched keys with outlier channels, several splits."""
    rows = [Row(3, 9, 5), Row(0, 1, 40)]
    keys = SignSketch(m=48, outliers=3, outlier_m=20)
    view, tokens = make_view(keys, GroupedInts(2, 32), d=24, dv=40, h=1, rows=rows)
    check(cupy, queries(2, 2, 2, 24), view, tokens)


def far_apart(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second head's pages begin 2 GiB behind the first head's."""
    view, tokens = make_view(GroupedInts(2, 32), GroupedInts(2, 32), d=16, dv=24, h=2, rows=[Row(4, 2, 7)])
    q, there = queries(1, 4, 2, 16), moved(cupy, view)
    if not isinstance(there.pages, ndarray):
        pytest.skip("needs memory that is not there until it is written to")
    expected = check(cupy, q, view, tokens)
    step = view.layout.record_bytes
    pages = np.zeros((1, 2, 2**31 // step + 5, step), np.uint8)
    pages[:, :, :2] = view.pages[:, :, :2]
    assert_same(attend(cupy.asarray(q), there._replace(pages=ndarray(pages))).get(), expected)


Scenario = Callable[[Any, pytest.MonkeyPatch], None]
SCENARIOS: tuple[Scenario, ...] = (several_tiles, outliers, far_apart)


class Bug(NamedTuple):
    """What is planted, as in `planted.Planted`; `says` is in what is raised."""

    scenario: Scenario
    old: str
    new: str
    says: str


WRONG = "largest error|not equal|Arrays are not|Mismatched"
BUGS = {
    "no barrier before the softmax": Bug(
        several_tiles, "    __syncthreads();\n    for (int query = warp;", "", "RACE|UNINITIALISED"
    ),
    "no barrier before the values": Bug(
        several_tiles, "    __syncthreads();\n    if (part < parts) {", "", "RACE|UNINITIALISED"
    ),
    "no barrier before the parts are summed": Bug(
        several_tiles, "  __syncthreads();\n  const int dv", "", "RACE|UNINITIALISED"
    ),
    "scores kept once": Bug(several_tiles, "turn ^= 1", "turn ^= !PLANTED", "RACE"),
    "no rescale of the mix": Bug(several_tiles, "mix[query][p] *= softmax.decay[query];", "", WRONG),
    "no rescale of the sum": Bug(several_tiles, "fmaf(softmax.total[query], decay, total)", "total", WRONG),
    "no rescale of splits": Bug(outliers, "exp2f(from[0] - shift)", "1.f", WRONG),
    "a page too many": Bug(several_tiles, "cut_of(row.pages, split", "cut_of(row.pages + PLANTED, split", WRONG),
    "a value too many": Bug(several_tiles, "QUAD * quad + r < tokens", "QUAD * quad + r <= tokens", WRONG),
    "one token of the future": Bug(several_tiles, "position >= seen", "position > seen", WRONG),
    "splits of other rows": Bug(
        several_tiles,
        "split - pages - sinks + shapes.page_splits + shapes.sink_splits",
        "split",
        "UNINITIALISED",
    ),
    "a mask of half a warp": Bug(
        several_tiles,
        "__shfl_xor_sync(ALL_LANES, odd ? first",
        "__shfl_xor_sync(PLANTED ? 0xffffu : ALL_LANES, odd ? first",
        "not in its own mask",
    ),
    "another lane": Bug(several_tiles, "x[1] : x[3], 2);", "x[1] : x[3], PLANTED ? 4 : 2);", WRONG),
    "an offset of 32 bits": Bug(
        far_apart,
        "pages + (((i64)tile.row * shapes.h + tile.head) * shapes.capacity + cut.first) * shapes.record_bytes",
        "pages + (int)((((i64)tile.row * shapes.h + tile.head) * shapes.capacity + cut.first) * shapes.record_bytes)",
        "OUT OF BOUNDS",
    ),
    "no barrier of the warp": Bug(outliers, "    __syncwarp();\n", "", "RACE|UNINITIALISED"),
}


@pytest.fixture(autouse=True, scope="module")
def _checked() -> Iterator[None]:
    with checked_with(BUGS):
        yield


@pytest.fixture(autouse=True)
def _simt(monkeypatch: pytest.MonkeyPatch) -> None:
    take_simt(monkeypatch)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_without_a_bug_nothing_is_raised(cupy: Any, monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    scenario(cupy, monkeypatch)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bug = BUGS[name]
    with planted(name, BUGS), pytest.raises((CudaHostError, AssertionError), match=f"(?s){bug.says}"):
        bug.scenario(cupy, monkeypatch)
