"""Whole caches on the device against the same ones on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch.cuda_raw import attention
from kvsketch.layout import page_layout
from kvsketch.tests.cache_cases import PAIRS, make_cache, make_tokens
from kvsketch.tests.cuda_attention_cases import assert_same_bytes
from kvsketch.tests.cuda_host import running
from kvsketch.tests.cuda_host.devices import counts
from kvsketch.tests.cuda_host.fixtures import needs_compiler, needs_harness
from kvsketch.tests.cuda_host.stand_in import installed

pytestmark = needs_compiler


@pytest.mark.parametrize("pair", PAIRS)
def test_a_cache_on_the_device_is_the_one_on_the_host(cupy: Any, pair: str) -> None:
    k, v = make_tokens(1, 2, 2, 150, d=24, dtype=np.float16)
    valid = np.ones((2, 150), bool)
    valid[1, :40] = False
    q = np.random.default_rng(2).standard_normal((2, 6, 2, 24)).astype(np.float16)
    mask = np.random.default_rng(3).random((2, 1, 2, 150)) < 0.8
    here, there = (make_cache(pair, residual_length=20, sink_tokens=3, engine=engine) for engine in ("reference", None))
    for part in (slice(0, 90), slice(90, 148), slice(148, 150)):
        here.append(k[:, :, part], v[:, :, part], valid=valid[:, part])
        there.append(cupy.asarray(k[:, :, part]), cupy.asarray(v[:, :, part]), valid=valid[:, part])
    assert there.report()["engines"]["attention.attend"] == "cuda_raw"
    for _ in range(2):
        assert_same_bytes(there, here)
        for given, softcap in ((None, None), (mask, 4.0)):
            with running("check"):
                moved = None if given is None else cupy.asarray(given)
                found = there.attend(cupy.asarray(q), mask=moved, softcap=softcap).get()
            expected = here.attend(q, mask=given, softcap=softcap)
            np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=2e-3, rtol=2e-3)
        here.flush()
        there.flush()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_cache_that_moves_attends_as_before(cupy: Any, pair: str) -> None:
    """Encoded on the host, read on the device, the same bytes when it comes back."""
    k, v = make_tokens(1, 2, 2, 150, d=24)
    here = make_cache(pair, residual_length=20, sink_tokens=3)
    here.append(k, v)
    here.flush()
    there = here.to(0)
    assert_same_bytes(there, here)
    q = np.random.default_rng(2).standard_normal((2, 6, 2, 24)).astype(np.float32)
    with running("check"):
        found = there.attend(cupy.asarray(q))
    np.testing.assert_allclose(found.get(), here.attend(q), atol=2e-3)
    assert_same_bytes(there.to("cpu"), here)


@needs_harness
def test_a_cache_stays_on_the_device_of_its_tokens() -> None:
    k, v = make_tokens(1, 2, 2, 150, d=24)
    q = np.random.default_rng(2).standard_normal((2, 6, 2, 24)).astype(np.float32)
    here = make_cache("outliers-ints1", residual_length=20)
    with installed(count=2) as cupy:
        with cupy.cuda.Device(1):
            parts = [[cupy.asarray(x[:, :, part]) for x in (k, v)] for part in (slice(0, 148), slice(148, 150))]
            queries, mask = cupy.asarray(q), cupy.ones((2, 1, 2, 150), bool)
        there = make_cache("outliers-ints1", residual_length=20)
        for (a, b), part in zip(parts, (slice(0, 148), slice(148, 150)), strict=True):
            there.append(a, b)
            here.append(k[:, :, part], v[:, :, part])
        there.reserve(300)
        here.reserve(300)
        there.flush()
        here.flush()
        assert {x.device.id for x in (there.view().pages, there.view().window_k)} == {1}
        found = there.attend(queries, mask=mask)
        assert found.device.id == 1
        np.testing.assert_allclose(found.get(), here.attend(q), atol=2e-3)
        for cache in (there, here):
            cache.crop(-1)
            cache.reorder([1, 0])
            cache.select([0, 0, 1])
        assert_same_bytes(there.to("cpu"), here)
        np.testing.assert_allclose(there.decode(1)[0].get(), here.decode(1)[0], atol=1e-4)
        assert there.to_tensors()[1] == here.to_tensors()[1]


@needs_harness
def test_a_step_of_decoding_does_not_wait(cupy: Any) -> None:
    """Nor does it send more to the device than counts of tokens, and these when they have changed."""
    host = make_cache("outliers-ints1", residual_length=20)
    host.append(*make_tokens(1, 2, 2, 150, d=24))
    host.flush()
    cache = host.to(0)
    q = cupy.asarray(np.random.default_rng(2).standard_normal((2, 6, 1, 24)).astype(np.float32))
    token = cupy.ones((2, 2, 1, 24), np.float32)
    cache.attend(q)
    for sent in (0, 1, 1):
        counts.reset()
        cache.attend(q)
        assert (counts.synchronisations, counts.uploads) == (0, sent)
        cache.append(token, token)


def test_numbers_are_looked_at_where_that_does_not_wait_or_was_asked_for(cupy: Any) -> None:
    k, v = make_tokens(1, 2, 2, 5, d=24)
    k[1, 0, 2, 3] = np.nan
    with pytest.raises(ValueError, match="row 1, head 0, token position 2, channel 3"):
        make_cache("ints2-ints2").append(k, v)
    cache = make_cache("ints2-ints2")
    cache.append(cupy.asarray(k), cupy.asarray(v))
    assert cache.length == 5
    with pytest.raises(ValueError, match="row 1, head 0, token position 2, channel 3"):
        make_cache("ints2-ints2", checked=True).append(cupy.asarray(k), cupy.asarray(v))


@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_choice_of_kernels_is_told(pair: str, architecture: int) -> None:
    layout = page_layout(*PAIRS[pair], 64, 64)
    kernel, why_not = attention.chosen_kernel(layout, 4, architecture)
    assert (kernel.level == "simt") == bool(why_not)
    assert kernel.level in ("simt", "mma")
    assert kernel.queries * -(-4 // kernel.queries) >= 4


@needs_harness
@pytest.mark.parametrize(("architecture", "told"), [("75", "simt: the architecture is 75"), ("90", "mma")])
def test_a_report_names_the_kernels_of_the_last_attention(architecture: str, told: str) -> None:
    host = make_cache("ints2-ints2", residual_length=20)
    host.append(*make_tokens(1, 2, 2, 150, d=24))
    host.flush()
    q = np.random.default_rng(2).standard_normal((2, 6, 50, 24)).astype(np.float32)
    with installed(compute_capability=architecture) as cupy:
        cache = host.to(0)
        assert cache.report()["kernels"] == {}
        cache.attend(cupy.asarray(q[:, :, :1]))
        for one in (cache, cache.copy(), cache.to(0)):
            assert one.report()["kernels"]["attention.attend"].startswith(told)
        cache.attend(cupy.asarray(q))
        many = "decoded tiles: 150 query rows are more than 128"
        assert cache.report()["kernels"] == {"attention.attend": many}
        cache.engine = "reference"
        assert cache.report()["kernels"] == {}
