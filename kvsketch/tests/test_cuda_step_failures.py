"""Decode steps on a device that are refused, fail, or were prepared and never taken; what they keep, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvsketch.cache import Cache
from kvsketch.cuda_raw import attention, device_step
from kvsketch.tests.cache_cases import make_cache
from kvsketch.tests.cuda_attention_cases import assert_same_bytes
from kvsketch.tests.cuda_host import running
from kvsketch.tests.cuda_host.fixtures import needs_compiler, needs_harness
from kvsketch.tests.cuda_host.stand_in import installed
from kvsketch.tests.cuda_step_cases import (
    DV,
    HQ,
    SETTINGS,
    TOLERANCE,
    B,
    Captured,
    D,
    H,
    begin,
    make_example,
    step_eagerly,
)

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with running("fast"):
        yield


def test_what_a_step_refuses(cupy: Any) -> None:
    tokens = make_example(40)
    _, there = begin(cupy, "ints2-ints2", tokens, 30)
    q, k, v = (cupy.asarray(x) for x in tokens.step(30))
    out = cupy.empty((B, HQ, 1, DV), np.float16)
    with pytest.raises(ValueError, match="not prepared; call prepare_step"):
        there.step(q, k, v)
    there.prepare_step()
    lengths = there.lengths.tolist()
    for match, args, options in (
        ("q must have one token", (cupy.concatenate([q, q], axis=2), k, v), {}),
        ("k must have one token", (q, cupy.concatenate([k, k], axis=2), cupy.concatenate([v, v], axis=2)), {}),
        ("k must have shape", (q, k[:, :1], v[:, :1]), {}),
        ("out must be", (q, k, v), {"out": out[:1]}),
        ("out must be", (q, k, v), {"out": out.astype(np.float32)}),
        ("k must be in C order", (q, cupy.zeros((B, D, 1, H), np.float16).swapaxes(1, 3), v), {}),
        ("softcap must be positive", (q, k, v), {"softcap": 0.0}),
        ("sink_logits must have shape", (q, k, v), {"sink_logits": cupy.zeros(3, np.float32)}),
        ("sink_logits must be float32", (q, k, v), {"sink_logits": cupy.zeros(HQ, np.float16)}),
    ):
        with pytest.raises(ValueError, match=match):
            there.step(*args, **options)
    with pytest.raises(TypeError, match="k has dtype float32"):
        there.step(q, k.astype(np.float32), v)
    with pytest.raises(TypeError, match="one library"):
        there.step(q.get(), k, v)
    assert there.step(q, k, v, out=out) is out
    assert there.lengths.tolist() == lengths
    for spoil in (lambda c: c.flush(), lambda c: c.crop(-1), lambda c: c.append(k, v), lambda c: c.reorder([1, 0])):
        there.prepare_step()
        there.step(q, k, v)
        there.prepare_step()
        spoil(there)
        with pytest.raises(ValueError, match="not prepared"):
            there.step(q, k, v)
    for match, options in (("checked=False", {"checked": True}), ("has no steps", {"engine": "reference"})):
        cache = make_cache("ints2-ints2", **SETTINGS, **({"checked": False} | options))
        with pytest.raises(ValueError, match="is empty"):
            cache.prepare_step()
        cache.append(k, v)
        with pytest.raises(ValueError, match=match):
            cache.prepare_step()
        assert cache.length == 1


def test_more_query_heads_than_a_kernel_takes(cupy: Any) -> None:
    cache = make_cache("ints2-ints2", checked=False)
    k = cupy.zeros((1, 1, 1, 8), np.float16)
    cache.append(k, k)
    cache.prepare_step()
    with pytest.raises(ValueError, match="at most 128 query heads"):
        cache.step(cupy.zeros((1, attention.FUSED_QUERIES + 1, 1, 8), np.float16), k, k)


#: What may come between `prepare_step` and the step that does not.
INSTEAD: dict[str, Callable[[Cache], Any]] = {
    "prepare_step": lambda c: c.prepare_step(),
    "attend": lambda c: c.attend(c.view().sink_k[:, :, :1]),
    "append": lambda c: c.append(*(x[:, :, :1] for x in (c.view().sink_k, c.view().sink_v))),
    "view": lambda c: c.view(),
    "decode": lambda c: c.decode(1),
    "flush": lambda c: c.flush(),
    "reserve": lambda c: c.reserve(500),
    "reorder": lambda c: c.reorder([1, 0]),
    "select": lambda c: c.select([1]),
    "repeat": lambda c: c.repeat(2),
    "copy": lambda c: c.copy(),
    "to": lambda c: c.to("cpu"),
    "to_tensors": lambda c: c.to_tensors(),
    "crop(-1)": lambda c: c.crop(-1) if c.length == LENGTH + 1 else None,
    "crop(-3)": lambda c: c.crop(-3 if c.length == LENGTH + 1 else -2),
    "crop to where it was": lambda c: c.crop(LENGTH),
}
LENGTH = 50


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", INSTEAD)
def test_a_step_that_was_prepared_and_not_taken(cupy: Any, name: str, captured: bool) -> None:
    """Whatever else is done, the token that was to come does not count, in copies neither; nor after other buffers."""
    tokens = make_example(60)
    here, there = begin(cupy, "ints2-ints2", tokens, LENGTH - 2)
    step = Captured(cupy, there)
    for i in range(LENGTH - 2, LENGTH):
        step(tokens.step(i)) if captured else step_eagerly(cupy, there, tokens.step(i))
        here.append(*tokens.step(i)[1:])
    if captured:
        there.reserve(400)
    number = there.prepare_step()
    assert captured == (step.graph is not None)
    assert number != step.buffers
    here.flush()
    caches = []
    for cache in (here, there):
        result = INSTEAD[name](cache)
        caches.append((cache, *([result] if isinstance(result, Cache) else [])))
    for mine, theirs in zip(*caches, strict=True):
        assert mine.length == theirs.length - (name == "prepare_step")
        if name != "prepare_step":
            with pytest.raises(ValueError, match="not prepared"):
                there.step(*map(cupy.asarray, tokens.step(LENGTH)))
            assert_same_bytes(theirs, mine)
        if theirs.batch == B and name != "to":
            q, k, v = tokens.step(LENGTH)
            mine.append(k, v)
            found = step_eagerly(cupy, theirs, (q, k, v))
            np.testing.assert_allclose(found, mine.attend(q), atol=TOLERANCE, rtol=4e-3)
            assert_same_bytes(theirs, mine)


def test_what_a_graph_may_have_taken_stays_counted(cupy: Any) -> None:
    """Nobody sees a launch: a step that was prepared while there is a graph counts, and `crop` takes it back."""
    tokens = make_example(60)
    here, there = begin(cupy, "ints2-ints2", tokens, 42)
    step = Captured(cupy, there)
    for i in range(42, 46):
        step(tokens.step(i))
        here.append(*tokens.step(i)[1:])
    assert step.captures == 2
    assert_same_bytes(there, here)
    there.prepare_step()
    there.flush()
    assert there.length == 47
    there.crop(-1)
    assert_same_bytes(there, here)
    # As many tokens as were expected on the device, which has not counted them.
    there.append(*map(cupy.asarray, tokens.step(46)[1:]))
    here.append(*tokens.step(46)[1:])
    np.testing.assert_allclose(
        there.attend(cupy.asarray(tokens.step(46)[0])).get(), here.attend(tokens.step(46)[0]), atol=TOLERANCE
    )
    q, k, v = tokens.step(47)
    here.append(k, v)
    np.testing.assert_allclose(step((q, k, v)), here.attend(q), atol=TOLERANCE, rtol=4e-3)
    assert step.captures == 2


@pytest.mark.parametrize(("what", "again"), [("append_token", "step"), ("launch_attention", "attend")])
def test_a_step_that_fails(cupy: Any, monkeypatch: pytest.MonkeyPatch, what: str, again: str) -> None:
    """Before its token is stored it is taken again; afterwards the token is there, as after `append`."""

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError("none left")

    tokens = make_example(60)
    here, there = begin(cupy, "ints2-ints2", tokens, 50)
    here.append(*tokens.step(50)[1:])
    given = q, _, _ = [cupy.asarray(x) for x in tokens.step(50)]
    there.prepare_step()
    with monkeypatch.context() as patch:
        patch.setattr(device_step, what, fail)
        with pytest.raises(MemoryError, match="none left"):
            there.step(*given)
    found = getattr(there, again)(*(given if again == "step" else [q]))
    np.testing.assert_allclose(found.get(), here.attend(q.get()), atol=TOLERANCE, rtol=4e-3)
    assert_same_bytes(there, here)


def test_the_memory_of_steps_is_counted(cupy: Any) -> None:
    """Which a cache keeps for each number of query heads and each kind of coefficients, until buffers move."""
    tokens = make_example(60)
    _, there = begin(cupy, "ints2-ints2", tokens, 50)
    sizes = [there.allocated_nbytes]
    for coefficients, heads in (("int16", HQ), ("int16", H), ("int8", H), ("int8", H)):
        there.coefficients = coefficients
        q, k, v = tokens.step(50 + len(sizes))
        step_eagerly(cupy, there, (q[:, :heads], k, v))
        sizes.append(there.allocated_nbytes)
    grown = np.diff(sizes)
    # Queries in float32, two partial results at least, counts.
    assert grown[0] >= 4 * B * HQ * (D + 2 * (DV + 2)) + 8 * 4 * B
    assert grown[2] == grown[1] > 0 == grown[3]
    assert there.copy().allocated_nbytes == sizes[0]


@needs_harness
def test_steps_on_another_device() -> None:
    """Of a cache that came from the first one, while that is the current one."""
    tokens = make_example(60)
    with installed(count=2) as cupy:
        here, first = begin(cupy, "outliers-ints1", tokens, 58)
        there = first.to(1)
        for i in range(58, 60):
            q, k, v = tokens.step(i)
            here.append(k, v)
            there.prepare_step()
            with cupy.cuda.Device(1):
                given = [cupy.asarray(x) for x in (q, k, v)]
            found = there.step(*given)
            assert found.device.id == 1
            np.testing.assert_allclose(found.get(), here.attend(q), atol=TOLERANCE, rtol=4e-3)
        assert_same_bytes(there.to("cpu"), here)
        first.prepare_step()
        with pytest.raises(ValueError, match="q must be in C order on the cache's device"):
            first.step(*given)
