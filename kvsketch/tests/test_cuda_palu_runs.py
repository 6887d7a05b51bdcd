"""Attention over latents on CUDA: tiles and splits, ragged rows, what is not read, what does not fit, many queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvsketch.codecs import Codec, Exact, TokenInts
from kvsketch.cuda_raw import palu, palu_plan
from kvsketch.cuda_raw.attention_plan import shared_limit
from kvsketch.cuda_raw.palu_plan import Keys
from kvsketch.layout import page_layout
from kvsketch.palu import FirstTokens, Reconstruction, Rope
from kvsketch.testing import assert_same
from kvsketch.tests.cuda_host import running
from kvsketch.tests.cuda_host.arrays import ndarray
from kvsketch.tests.cuda_host.fixtures import needs_compiler
from kvsketch.tests.cuda_host.stand_in import installed
from kvsketch.tests.cuda_palu_cases import attend_on_device, check, error, make_exact_parts, make_queries
from kvsketch.tests.palu_cases import Layer, attend_rebuilt, make_layer

pytestmark = needs_compiler

CAPABILITIES = {"simt": "75", "mma": "90"}
PAIRS: dict[str, tuple[Codec, Codec]] = {
    "codes": (TokenInts(4), TokenInts(3)),
    "numbers": (Exact(), TokenInts(8, 16)),
}


@pytest.fixture(params=["check", "fast"])
def _execution(request: pytest.FixtureRequest) -> Iterator[None]:
    with running(request.param, "reverse" if request.param == "fast" else "round-robin"):
        yield


@pytest.fixture(params=list(CAPABILITIES))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cupy(level: str) -> Iterator[Any]:
    with installed(compute_capability=CAPABILITIES[level]) as module:
        yield module


def of_size(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    """As if the device had so many: with none, a block takes all tokens in the largest tiles."""
    monkeypatch.setattr(palu, "multiprocessors", lambda _: multiprocessors)


def ragged(**options: Any) -> Layer:
    """Rows with all tokens, some, one and none, a few of them exact."""
    n = 150
    valid = np.arange(n) >= np.array([0, 70, n - 1, n])[:, None]
    return make_exact_parts(make_layer(b=4, n=n, d=16, rotary=16, valid=valid, **options), sinks=3, window=20)


# ---- tiles and splits ----


@pytest.mark.usefixtures("_execution")
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("multiprocessors", [0, 3])
def test_tiles_and_splits(
    cupy: Any, level: str, pair: str, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores grow along the tokens, or fall: every tile has a new largest one, or none after the first."""
    of_size(monkeypatch, multiprocessors)
    keys, values = PAIRS[pair]
    n = 600
    layer = make_layer(
        b=2, n=n, heads=3, d=24, rotary=16, norm=True, keys=keys, values=values, ranks=(40,), chunks=(n - 1,)
    )
    layer = make_exact_parts(layer, sinks=40, window=100)
    grows = np.broadcast_to(np.arange(n, dtype=np.float32) / 16, (2, 1, 2, n)).copy()
    for mask in (grows, -grows):
        check(cupy, layer, make_queries(2, 6, 2, 24), level, mask=mask)


def test_tiles_shrink_where_there_are_few_tokens() -> None:
    layout, keys = page_layout(TokenInts(4), TokenInts(4), 96, 96), Keys(2, 64, rotary=64)
    found = {}
    for pages in (1, 8, 64, 1000):
        counts = np.array([[pages], [0], [0], [20]])
        kernel, exact, splits = palu_plan.plan_kernels(
            layout, keys, 4, counts, architecture=90, multiprocessors=4, coefficients="int16"
        )
        assert (kernel.level, exact.level, exact.groups) == ("mma", "mma", 1)
        assert splits.page_step * layout.page_tokens % max(kernel.tokens, layout.page_tokens) == 0
        assert 1 <= splits.page_splits <= -(-pages // splits.page_step)
        assert splits.splits == splits.page_splits + 1
        found[pages] = kernel.groups
    assert found == {1: 1, 8: 2, 64: 8, 1000: 8}


# ---- what is not seen, or not read ----


@pytest.mark.usefixtures("_execution")
@pytest.mark.parametrize("s", [1, 4])
def test_ragged_rows(cupy: Any, level: str, s: int) -> None:
    layer = ragged()
    found = check(cupy, layer, make_queries(4, 4, s, 16), level)
    assert not found[3].any()
    assert not found[2, :, : s - 1].any()
    assert found[2, :, s - 1].all()


@pytest.mark.usefixtures("_execution")
def test_what_sees_nothing_is_zero(cupy: Any) -> None:
    layer = ragged(first=2)
    hidden = np.full((4, 1, 2, 150), -np.inf, np.float32)
    assert not attend_on_device(cupy, layer, make_queries(4, 4, 2, 16), mask=hidden).any()


@pytest.mark.usefixtures("_execution")
def test_first_tokens_are_not_read_as_latents(cupy: Any, level: str) -> None:
    """They have most of the weight, fewer than there is room for, and NaN beyond them."""
    layer = ragged(first=2)
    first = layer.options["first"]
    assert first.counts.tolist() == [2, 2, 1, 0]
    k, v = 30 * first.k, 100 * first.v
    for row in (2, 3):
        k[row, :, first.counts[row] :] = v[row, :, first.counts[row] :] = np.nan
    layer.options["first"] = FirstTokens(k, v, first.counts)
    check(cupy, layer, make_queries(4, 4, 2, 16), level)


@pytest.mark.usefixtures("_execution")
@pytest.mark.parametrize("side", ["keys", "values"])
def test_nan_stays_in_its_row(cupy: Any, level: str, side: str) -> None:
    layer = make_layer(b=2, n=40, heads=1, keys=Exact(), values=Exact(), rotary=16, chunks=(39,))
    q = make_queries(2, 2, 1, 16)
    expected = attend_rebuilt(layer, q)
    at = 7 if side == "keys" else 20 + 7
    pages = layer.caches[0]._held("a test").pages.pages
    assert pages.shape[1:3] == (1, 1)
    numbers = pages[1, 0, 0].view(np.float32)
    numbers[(0 if side == "keys" else 640) + at] = np.nan
    found = attend_on_device(cupy, layer, q)
    assert np.isnan(found[1]).any()
    assert error(found[:1], expected[:1]) < 3e-4
    if side == "keys":
        assert np.isnan(found[1]).all()


# ---- other ways to the same numbers ----


def test_without_rope_the_matrix_folds_into_the_queries(cupy: Any, level: str) -> None:
    """Not so where a bias shifts scores before a cap or beside true first tokens, or where there are many queries."""
    m = make_layer(d=16, heads=2, bias=True, first=2)
    plain = make_layer(d=16, heads=2)
    given: dict[str, Any] = {"rope": None, "key_norm": None, "first": None, "softcap": None}
    [matrices], [biased] = plain.matrices, m.matrices
    assert palu.plan_keys(matrices, 16, 8, **given) == Keys(1, 8, whole=True)
    assert palu.plan_keys(biased, 16, 8, **given) == Keys(1, 8, whole=True)
    assert palu.plan_keys(matrices, 16, 32, **given) == Keys(2, 16)
    assert palu.plan_keys(biased, 16, 8, **given | {"softcap": 2.0}) == Keys(2, 16)
    assert palu.plan_keys(biased, 16, 8, **given | {"first": m.options["first"]}) == Keys(2, 16)
    assert palu.plan_keys(matrices, 16, 8, **given | {"key_norm": object()}) == Keys(2, 16, norm=True)
    with running("fast"):
        for layer, s in ((plain, 2), (plain, 8), (make_layer(d=16, heads=2, bias=True), 2), (m, 2)):
            check(cupy, layer, make_queries(1, 4, s, 16), level)
        check(cupy, m, make_queries(1, 4, 2, 16), level, softcap=2.0)


def test_many_queries_take_matrix_products(cupy: Any, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, whatever the kernels round to."""
    monkeypatch.setattr(palu, "launch", None)
    layer = ragged(first=2)
    q = make_queries(4, 4, 65, 16)
    assert q.shape[1] * q.shape[2] > palu.FUSED_QUERIES
    check(cupy, layer, q, "simt")


def test_matrices_are_packed_once(cupy: Any, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(rotary=16)
    launched: list[str] = []
    real = palu.launch

    def launch(file: str, expression: str, *rest: Any, **more: Any) -> None:
        launched.append(expression)
        real(file, expression, *rest, **more)

    monkeypatch.setattr(palu, "launch", launch)
    given = layer.matrices[0]
    there = Reconstruction(2, *(cupy.asarray(x) for x in (given.up_k, given.up_v)))
    matrices = palu._matrices(there, cupy)
    keys = Keys(2, 16, rotary=16)
    packed = matrices.packed(keys, 2)
    assert matrices.packed(keys, 2) is packed
    assert palu._matrices(there, cupy) is matrices
    assert matrices.packed(keys._replace(interleaved=True), 2) is not packed
    assert launched == ["pack_matrix<2>"] * 2


def test_tables_may_lie_anywhere(cupy: Any, level: str) -> None:
    layer = make_layer(rotary=16, n=40, chunks=(39,))
    rope = layer.options["rope"]
    q = make_queries(1, 4, 1, 16)
    with running("check"):
        expected = check(cupy, layer, q, level)
        room = np.zeros(40 * 16 + 1, np.float32)
        moved = []
        for table in (rope.cos, rope.sin):
            place = cupy.asarray(room)[1:]
            place[...] = cupy.asarray(table.reshape(-1))
            moved.append(place.reshape(table.shape))
            assert moved[-1].data.ptr % palu.ALIGNMENT
        layer.options["rope"] = Rope(*moved)
        assert_same(attend_on_device(cupy, layer, q), expected)


# ---- sizes ----


@pytest.mark.parametrize(
    ("capability", "levels"), [("75", ("simt", "simt")), ("86", ("mma", "simt")), ("90", ("mma", "mma"))]
)
def test_wide_latents(capability: str, levels: tuple[str, str]) -> None:
    """Of exact latents 32 take twice the room that codes take, and do not fit every architecture."""
    layer = make_layer(d=16, heads=2, ranks=(1000,), value_ranks=(2100,), rotary=16, n=70, chunks=(69,), first=1)
    with installed(compute_capability=capability) as cupy, running("check"):
        check(cupy, layer, make_queries(1, 4, 1, 16), "simt" if levels[0] == "simt" else "mma")
    layout = layer.caches[0]._held("a test").pages.layout
    keys = Keys(2, 16, rotary=16)
    for exact, level in zip((False, True), levels, strict=True):
        kernel, why = palu_plan.chosen_kernel(layout, keys, 4, int(capability), exact=exact)
        assert kernel.level == level
        assert kernel.shared <= shared_limit(int(capability))
        if capability == "86" and exact:
            assert "bytes of shared memory, a block has 100352" in why
        elif capability == "75":
            assert why == "compute capability 7.5 has no tensor cores for bfloat16"


def test_the_widest_latents_run_without_tensor_cores() -> None:
    layout = page_layout(TokenInts(4), TokenInts(4), 8192, 8192)
    for architecture in (75, 90):
        kernel, _ = palu_plan.chosen_kernel(layout, Keys(32, 128, rotary=128), 256, architecture)
        assert kernel.level == "simt"
        assert kernel.shared <= shared_limit(architecture)
        assert kernel.room % 32 == 0 < kernel.room


def test_two_blocks_share_a_multiprocessor_where_their_registers_do() -> None:
    one, several = (page_layout(keys, TokenInts(4), 256, 256) for keys in (TokenInts(4), TokenInts(4, 64)))
    keys = Keys(4, 128, rotary=128)
    assert palu_plan.chosen_kernel(one, keys, 16, 90)[0].shared * 2 <= shared_limit(90)
    assert palu_plan.chosen_kernel(one, keys, 16, 86)[0].shared * 2 <= shared_limit(86)
    assert palu_plan.chosen_kernel(several, keys, 16, 90)[0].shared * 2 > shared_limit(90)


def test_offsets_take_64_bits(cupy: Any, level: str) -> None:
    """The second row's pages begin 2 GiB behind the first row's."""
    layer = make_layer(b=2, n=70, rotary=16, chunks=(69,))
    q = make_queries(2, 4, 1, 16)
    with running("check"):
        expected = check(cupy, layer, q, level)
        held = layer.caches[0]._held("a test").pages
        step = held.pages.shape[-1]
        if not isinstance(cupy.zeros(1), ndarray):
            pytest.skip("needs memory that is not there until it is written to")
        pages = np.zeros((2, 1, 2**31 // step + 5, step), np.uint8)
        pages[:, :, :2] = held.pages[:, :, :2]
        assert_same(attend_on_device(cupy, layer, q, pages=ndarray(pages)), expected)
