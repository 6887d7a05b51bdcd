"""Bugs planted in the kernels over latents, one at a time: the tests must see each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvsketch.codecs import TokenInts
from kvsketch.cuda_raw import palu
from kvsketch.testing import assert_same
from kvsketch.tests.cuda_host import CudaHostError
from kvsketch.tests.cuda_host.arrays import ndarray
from kvsketch.tests.cuda_host.fixtures import needs_harness
from kvsketch.tests.cuda_host.planted import checked_with, planted
from kvsketch.tests.cuda_host.stand_in import installed
from kvsketch.tests.cuda_palu_cases import attend_on_device, check, make_queries
from kvsketch.tests.palu_cases import make_layer

pytestmark = needs_harness


N = 320


def several_tiles(cupy: Any, level: str) -> None:
    """Two tiles of pages by one block, scores that grow or fall, true first tokens, and no kernel besides."""
    layer = make_layer(
        b=2, n=N, heads=2, d=40, dv=24, rotary=40, bias=True, norm=True, first=2,
        keys=TokenInts(8), values=TokenInts(8), ranks=(40,), value_ranks=(40,),
    )  # fmt: skip
    layer.caches[0].flush()
    assert layer.caches[0]._held("a test").pages.counts.tolist() == [N // 32] * 2
    mask = np.broadcast_to(np.arange(N, dtype=np.float32) / 16, (2, 1, 2, N)).copy()
    for sign in (1, -1):
        check(cupy, layer, make_queries(2, 4, 2, 40), level, mask=sign * mask)


def far_apart(cupy: Any, level: str) -> None:
    """The second row's pages begin 2 GiB behind the first row's."""
    layer, q = make_layer(b=2, n=64, rotary=16), make_queries(2, 4, 1, 16)
    layer.caches[0].flush()
    expected = check(cupy, layer, q, level)
    held = layer.caches[0]._held("a test").pages
    pages = np.zeros((2, 1, 2**31 // held.pages.shape[-1] + 5, held.pages.shape[-1]), np.uint8)
    pages[:, :, :2] = held.pages[:, :, :2]
    assert_same(attend_on_device(cupy, layer, q, pages=ndarray(pages)), expected)


Scenario = Callable[[Any, str], None]


class Bug(NamedTuple):
    """What is planted, as in `planted.Planted`; `says` is in what is raised."""

    old: str
    new: str
    says: str
    scenario: Scenario = several_tiles
    level: str = "mma"


WRONG = "error .* over|not equal|Arrays are not|Mismatched"
BAD_MEMORY = "RACE|UNINITIALISED"
BUGS = {
    "no barrier between tiles": Bug("    __syncthreads();\n    load_scales<KEY_PLANES>", "", BAD_MEMORY),
    "no barrier before the keys": Bug("    __syncthreads();\n    const int group", "", BAD_MEMORY),
    "no barrier after the keys": Bug("    __syncthreads();\n    if constexpr (VALUE_PLANES", "", BAD_MEMORY),
    "no barrier before the values": Bug("    __syncthreads();\n    mix_tokens", "", BAD_MEMORY),
    "no barrier of the warp": Bug("  __syncwarp();\n  const float share = peak", "", BAD_MEMORY),
    "no rescale of the mix": Bug("fmaf(*at, room.decay(column), added)", "*at + added", WRONG),
    "no rescale of the sum": Bug("fmaf(room.total(column), decay, total)", "room.total(column) + total", WRONG),
    "no zeros of keys": Bug("column.y * tokens.zero[token]", "0.f", WRONG),
    "no zeros of values": Bug(
        "room.step(column), room.zero(column))", "room.step(column), PLANTED ? 0.f : room.zero(column))", WRONG
    ),
    "codes of 8 bits without a sign": Bug("bytes ^ 0x80808080u", "bytes", WRONG),
    "turned the wrong way": Bug("y * c[b] + x * s[b]", "y * c[b] - x * s[b]", WRONG),
    "squares of the last block alone": Bug("begin ? sum : *at + sum", "sum", WRONG),
    "squares of two lanes of four": Bug("    sum += __shfl_xor_sync(ALL_LANES, sum, 2);\n", "", WRONG),
    "a page too many": Bug("cut_of(row.pages, split", "cut_of(row.pages + PLANTED, split", "OUT OF BOUNDS"),
    "first tokens read as latents": Bug("position < skipped ?", "!PLANTED && position < skipped ?", WRONG),
    "first tokens without their weight": Bug("total += own;", "total = PLANTED ? own : total + own;", WRONG),
    "an offset of 32 bits": Bug(
        "keys + (row * shapes.capacity + cut.first) * shapes.record_bytes",
        "keys + (int)((row * shapes.capacity + cut.first) * shapes.record_bytes)",
        "OUT OF BOUNDS",
        far_apart,
    ),
    "no barrier before latents are loaded": Bug(
        "        __syncthreads();\n        load_latents", "", BAD_MEMORY, level="simt"
    ),
    "no barrier before the mix": Bug("    __syncthreads();\n    for (int channel", "", BAD_MEMORY, level="simt"),
    "no rescale": Bug("fmaf(*at, softmax.decay[query], sum)", "*at + sum", WRONG, level="simt"),
}


@pytest.fixture(autouse=True, scope="module")
def _checked() -> Iterator[None]:
    with checked_with(BUGS):
        yield


@pytest.fixture(autouse=True)
def _one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block takes all tokens."""
    monkeypatch.setattr(palu, "multiprocessors", lambda _: 0)


def run(scenario: Scenario, level: str) -> None:
    with installed(compute_capability="90" if level == "mma" else "75") as cupy:
        scenario(cupy, level)


@pytest.mark.parametrize("level", ["mma", "simt"])
@pytest.mark.parametrize("scenario", [several_tiles, far_apart])
def test_without_a_bug_nothing_is_raised(scenario: Scenario, level: str) -> None:
    run(scenario, level)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str) -> None:
    bug = BUGS[name]
    with planted(name, BUGS), pytest.raises((CudaHostError, AssertionError), match=f"(?s){bug.says}"):
        run(bug.scenario, bug.level)
