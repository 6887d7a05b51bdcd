"""The stand-in for CuPy: as strict as CuPy, counting what would make the host wait, and good enough for the library."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvsketch
from kvsketch._dispatch import array_library, namespace
from kvsketch.environment import describe_environment
from kvsketch.tests.cache_cases import PAIRS, make_cache, make_tokens
from kvsketch.tests.cuda_host import CudaHostError, running
from kvsketch.tests.cuda_host.devices import counts, without_waiting
from kvsketch.tests.cuda_host.fixtures import needs_harness
from kvsketch.tests.cuda_host.stand_in import available, installed

pytestmark = pytest.mark.skipif(available(), reason="a real CuPy with a device is there")

SCALE = """
template <class T> __global__ void scale(const T* a, T* o, float by, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) o[i] = T(float(a[i]) * by);
}
"""


@pytest.fixture
def two() -> Iterator[Any]:
    """The stand-in with two devices."""
    with installed(count=2, compute_capability="75", multiprocessors=40) as module:
        yield module


def test_it_is_cupy_only_inside(two: Any) -> None:
    x = two.zeros(3)
    assert sys.modules["cupy"] is two
    assert (type(x).__module__, type(x).__name__) == ("cupy", "ndarray")
    assert not isinstance(x, np.ndarray)
    assert (array_library(x), namespace(x)) == ("cupy", two)
    from cupy.cuda import runtime

    assert runtime.getDeviceCount() == 2
    with installed() as inner:
        assert sys.modules["cupy"] is inner
    assert sys.modules["cupy"] is two


def test_it_is_taken_out_again() -> None:
    with installed():
        pass
    assert not {name for name in sys.modules if name.partition(".")[0] == "cupy"}


# ---------------------------------------------------------------------- what CuPy refuses
REFUSED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "asarray": lambda xp, x, a: np.asarray(x),
    "array of a list": lambda xp, x, a: np.array([x, x]),
    "assignment to NumPy": lambda xp, x, a: a.__setitem__(slice(None), x),
    "sum with NumPy": lambda xp, x, a: x + a,
    "NumPy's sum with it": lambda xp, x, a: a + x,
    "in place": lambda xp, x, a: x.__iadd__(a),
    "into NumPy": lambda xp, x, a: np.add(x, x, out=a),
    "comparison": lambda xp, x, a: x == a,
    "function": lambda xp, x, a: xp.maximum(x, a),
    "function of a list": lambda xp, x, a: xp.concatenate([x, a]),
    "where": lambda xp, x, a: xp.where(x > 0, x, a),
    "matmul": lambda xp, x, a: x @ a,
    "NumPy's function": lambda xp, x, a: np.concatenate([x, x]),
    "NumPy's reduction": lambda xp, x, a: np.add.reduce(x),
    "a list": lambda xp, x, a: x * [1.0, 2.0, 3.0],
    "method": lambda xp, x, a: x.clip(a, 2),
    "hash": lambda xp, x, a: hash(x),
    "set of a list": lambda xp, x, a: x.set([1.0, 2.0, 3.0]),
    "set of another dtype": lambda xp, x, a: x.set(a.astype(np.float64)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_host_and_device_are_not_mixed(name: str, cupy: Any) -> None:
    x, a = cupy.ones(3, np.float32), np.ones(3, np.float32)
    with pytest.raises(TypeError):
        REFUSED[name](cupy, x, a)


def test_other_refusals(cupy: Any) -> None:
    x = cupy.zeros(3)
    with pytest.raises(ValueError, match=r"non-scalar numpy\.ndarray cannot be used for fill"):
        x[...] = np.ones(3)
    with pytest.raises(ValueError, match="Unsupported dtype"):
        cupy.zeros(3, np.dtype([("a", np.int32)]))
    with pytest.raises(NotImplementedError, match=r"`cupy_bitwise_or\.reduce` is not supported yet"):
        cupy.bitwise_or.reduce(cupy.zeros(3, np.int32))
    with pytest.raises(AttributeError):
        _ = cupy.put
    with pytest.raises(ValueError, match="Shape mismatch"):
        x.set(np.zeros(4))


# ---------------------------------------------------------------------- what works
def test_results_are_arrays_of_the_device(cupy: Any) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = cupy.asarray(a)
    for mine, numpys in (
        (x + 1, a + 1),
        (np.float32(3) * x, np.float32(3) * a),
        (2 / (x + 1), 2 / (a + 1)),
        (x[1], a[1]),
        (x[1, 2], a[1, 2]),
        (x[:, None, ::2], a[:, None, ::2]),
        (x[x > 5], a[a > 5]),
        (x[[0, 2]], a[[0, 2]]),
        (x[np.array([1])], a[np.array([1])]),
        (x.T, a.T),
        (x.sum(), a.sum()),
        (x.max(axis=0), a.max(axis=0)),
        (-x, -a),
        (abs(-x), a),
        (x @ x.T, a @ a.T),
        (x.view(np.uint32) >> 3 & 1, a.view(np.uint32) >> 3 & 1),
        (cupy.matmul(x, x.T), a @ a.T),
        (cupy.where(x > 5, x, 0), np.where(a > 5, a, 0)),
        (cupy.stack([x, x], axis=1), np.stack([a, a], axis=1)),
        (cupy.add.reduce(x), a.sum(0)),
        (cupy.full((2,), 7, np.int8), np.full((2,), 7, np.int8)),
        (cupy.zeros_like(x), np.zeros_like(a)),
        (cupy.arange(3, dtype=np.uint8), np.arange(3, dtype=np.uint8)),
        (x.astype(ml_dtypes.bfloat16), a.astype(ml_dtypes.bfloat16)),
        (cupy.argsort(-x, axis=-1, kind="stable"), np.argsort(-a, axis=-1, kind="stable")),
    ):
        assert type(mine) is cupy.ndarray
        assert (mine.shape, mine.dtype) == (np.shape(numpys), numpys.dtype)
        np.testing.assert_array_equal(mine.get(), numpys)
    first, second = cupy.nonzero(x > 5)
    assert (first.get() == np.nonzero(a > 5)[0]).all()
    assert second.shape == first.shape


def test_infinities_and_nan_are_silent(cupy: Any) -> None:
    x = cupy.asarray(np.array([0, 1e38, -1], np.float32))
    assert np.isnan((x / x)[0].get())
    assert np.isinf((x * x).get()[1])
    assert np.isnan(cupy.sqrt(x).get()[2])
    assert (cupy.log(x) * cupy.inf).astype(np.int32).shape == (3,)


def test_parts_are_views(cupy: Any) -> None:
    x = cupy.zeros((2, 3))
    x[1][2] = 5
    x[0, 0][...] = 4
    x[:, 1] += 1
    x[x == 0] = 9
    assert cupy.asnumpy(x).tolist() == [[4, 1, 9], [9, 1, 5]]
    assert (float(x[1, 2]), int(x[0, 0]), bool(x[0, 1] == 1), x[1, 1].item()) == (5, 4, True, 1)
    assert [row.tolist() for row in x] == x.tolist()


def test_what_waits_and_what_is_sent(cupy: Any) -> None:
    x = cupy.asarray(np.arange(6))
    for action, waits, sends in (
        (lambda: x + 1, 0, 0),
        (lambda: cupy.zeros(9), 0, 0),
        (lambda: x[1:3], 0, 0),
        (lambda: x[cupy.arange(2)], 0, 0),
        (lambda: cupy.count_nonzero(x), 0, 0),
        (lambda: cupy.asarray([1, 2]), 0, 1),
        (lambda: x.set(np.arange(6)), 0, 1),
        (lambda: x[[0, 1]], 0, 1),
        (lambda: x[np.array([0, 1])], 0, 1),
        (lambda: x.get(), 1, 0),
        (lambda: bool((x == x).all()), 1, 0),
        (lambda: range(x[3]), 1, 0),
        (lambda: float(x[0]), 1, 0),
        (lambda: x.tolist(), 1, 0),
        (lambda: x[x > 2], 1, 0),
        (lambda: cupy.argwhere(x), 1, 0),
        (lambda: cupy.where(x), 1, 0),
        (lambda: cupy.cuda.Device().synchronize(), 1, 0),
        (lambda: cupy.cuda.get_current_stream().synchronize(), 1, 0),
    ):
        counts.reset()
        action()
        assert (counts.synchronisations, counts.uploads) == (waits, sends)
        if waits or sends:
            with without_waiting(), pytest.raises(CudaHostError, match="captured graph"):
                action()


@needs_harness
@pytest.mark.parametrize("mode", ["check", "fast"])
def test_capturing_a_stream(cupy: Any, mode: str) -> None:
    """A graph runs what was launched, with the numbers that its arrays hold by then."""
    x, y = cupy.zeros(40, np.float32), cupy.empty(40, np.float32)
    with running(mode), cupy.cuda.Stream(non_blocking=True) as stream:
        assert cupy.cuda.get_current_stream() is stream
        counts.reset()
        stream.begin_capture()
        scale(cupy, x.reshape(5, 8).reshape(40), y)
        scale(cupy, y, x[:40])
        with pytest.raises(CudaHostError, match=r"get\(\) makes the host wait"):
            x.get()
        graph = stream.end_capture()
        assert counts.launches == 0
        for times in (1, 2):
            x[...] = times
            graph.launch(stream)
            np.testing.assert_array_equal(x.get(), np.full(40, 9 * times, np.float32))
        assert counts.launches == 4
        del y
        with pytest.raises(CudaHostError, match="argument 1 lay in memory that was freed"):
            graph.launch()
    assert cupy.cuda.get_current_stream() is cupy.cuda.Stream.null
    assert cupy.cuda.ExternalStream(1234).ptr == 1234


@needs_harness
def test_what_a_captured_step_should_not_do(cupy: Any) -> None:
    x, indices = cupy.zeros((4, 4), np.float32), cupy.zeros(2, np.int64)
    with pytest.raises(RuntimeError, match="default"):
        cupy.cuda.Stream.null.begin_capture()
    with cupy.cuda.Stream() as stream:
        stream.begin_capture()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="already"):
            stream.begin_capture()
        for action in (
            *(lambda: x + 1, lambda: x.sum(), lambda: x.copy(), lambda: x.astype(np.float16), lambda: cupy.zeros(3)),
            *(lambda: x.T.reshape(16), lambda: x[indices], lambda: x.fill(0), lambda: cupy.exp(x, out=x)),
            *(lambda: cupy.matmul(x, x, out=x), lambda: cupy.ascontiguousarray(x.T), lambda: cupy.zeros_like(x)),
            *(lambda: operator.iadd(x, 1), lambda: operator.setitem(x, 0, 1), lambda: x.sort()),
        ):
            with pytest.raises(CudaHostError, match="while the stream captures"):
                action()
        assert x.T[1:, :2].swapaxes(0, 1).shape == (2, 3)
        with cupy.cuda.Stream():
            x += 1
        graph = stream.end_capture()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="does not capture"):
            stream.end_capture()
    graph.launch()
    np.testing.assert_array_equal(x.get(), np.ones((4, 4)))


# ---------------------------------------------------------------------- kernels and devices
def scale(cupy: Any, a: Any, o: Any, n: int | None = None) -> None:
    module = cupy.RawModule(code=SCALE, options=("--std=c++17",), name_expressions=("scale<float>",), backend="nvrtc")
    n = a.size if n is None else n
    module.get_function("scale<float>")((-(-n // 32),), (32,), (a, o, np.float32(3), np.int32(n)))


@needs_harness
@pytest.mark.parametrize("mode", ["check", "fast"])
def test_kernels_run_on_its_arrays(mode: str, cupy: Any) -> None:
    a, o = cupy.arange(70, dtype=np.float32), cupy.empty((2, 50), np.float32)
    assert a.data.ptr % 256 == o.data.ptr % 256 == 0
    counts.reset()
    with running(mode):
        scale(cupy, a, o.reshape(-1)[10:80])
    assert (counts.launches, counts.synchronisations, counts.uploads) == (1, 0, 0)
    np.testing.assert_array_equal(o.get().reshape(-1)[10:80], 3 * np.arange(70, dtype=np.float32))


@needs_harness
def test_unwritten_memory_is_remembered(cupy: Any) -> None:
    a, o = cupy.empty((4, 8), np.float32), cupy.empty((4, 8), np.float32)
    mask, half = cupy.asarray([False, True]), cupy.arange(2)
    with running("check"):
        for write in (
            lambda: a.__setitem__((slice(0, 2), slice(None)), 1),
            lambda: a[2:].__setitem__((slice(None), slice(0, 4)), cupy.ones(4)),
            lambda: a[2:, 4:].__setitem__(mask, 1),
            lambda: a[2:3].__setitem__((slice(None), half + 4), 1),
            lambda: cupy.add(a[2, 6:], 1, out=a[2, 6:]),
        ):
            with pytest.raises(CudaHostError, match="UNINITIALISED read"):
                scale(cupy, a, o)
            write()
        scale(cupy, a, o)
    assert float(o[0, 0]) == 3


@needs_harness
def test_arrays_of_the_host_are_refused(cupy: Any) -> None:
    a = np.zeros(4, np.float32)
    with pytest.raises(CudaHostError, match="argument 0 is a NumPy array, which CuPy passes by value"):
        scale(cupy, a, a)
    broken = cupy.RawModule(code="__global__ void k(int* o) { o = 1; }", name_expressions=("k",)).get_function("k")
    with pytest.raises(cupy.cuda.compiler.CompileException, match=r"kernel\.cu:1"):
        broken((1,), (1,), (cupy.zeros(1, np.int32),))


@needs_harness
def test_devices(two: Any) -> None:
    cuda = two.cuda
    assert (cuda.runtime.getDeviceCount(), cuda.Device().id, cuda.Device().compute_capability) == (2, 0, "75")
    assert cuda.Device().attributes["MultiProcessorCount"] == 40
    with pytest.raises(cuda.runtime.CUDARuntimeError, match="invalid device ordinal 2"):
        cuda.Device(2)
    a, o = two.zeros(4, np.float32), two.zeros(4, np.float32)
    with cuda.Device(1):
        assert cuda.runtime.getDevice() == 1
        b = two.zeros(4, np.float32)
        assert (a.device.id, b.device, b[1:].device.id) == (0, cuda.Device(1), 1)
        for action in (lambda: a + 1, lambda: two.stack([a, b]), lambda: a[1], lambda: a.__setitem__(0, 1)):
            with pytest.raises(ValueError, match=r"resides \(0\) is different from the current device \(1\)"):
                action()
        with pytest.raises(CudaHostError, match="argument 0 lies on device 0, the current device is 1"):
            scale(two, a, b)
        assert a.get().tolist() == [0, 0, 0, 0]
    scale(two, a, o)
    function = two.RawModule(code=SCALE, name_expressions=("scale<float>",)).get_function("scale<float>")
    with pytest.raises(CudaHostError, match=r"must lie in 0\.\.65536 on compute capability 75"):
        function.max_dynamic_shared_size_bytes = 65537
    with pytest.raises(ValueError, match="compute_capability='1' is not known"), installed(compute_capability="1"):
        pass


# ---------------------------------------------------------------------- the library on it
def test_environment_speaks_of_it(two: Any) -> None:
    found = describe_environment()
    assert found["devices"]["gpu"] == "stand-in, kernels on the CPU, stand-in, kernels on the CPU"
    assert "reference" in found["engines"]["cupy"]


@pytest.mark.parametrize("pair", PAIRS)
def test_caches_run_on_it(pair: str, cupy: Any) -> None:
    results = []
    for on_device in (np.asarray, cupy.asarray):
        k, v = map(on_device, make_tokens(3, 2, 2, 200))
        q = on_device(np.random.default_rng(4).standard_normal((2, 4, 1, 16)).astype(np.float32))
        cache = make_cache(pair, engine="reference", sink_tokens=4, residual_length=32)
        for part in (slice(0, 150), slice(150, 199), slice(199, 200)):
            cache.append(k[:, :, part], v[:, :, part])
        cache.flush()
        results.append((cache.attend(q), cache.view().pages))
    (numpys, pages), (mine, pages_of_device) = results
    assert type(mine) is cupy.ndarray
    np.testing.assert_allclose(mine.get(), numpys, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(pages_of_device.get(), pages)


def test_exact_attention_runs_on_it(cupy: Any) -> None:
    k, v = make_tokens(5, 1, 2, 40)
    q = np.random.default_rng(6).standard_normal((1, 4, 3, 16)).astype(np.float32)
    cache = kvsketch.Cache(engine="reference", residual_length=64)
    cache.append(*map(cupy.asarray, (k, v)))
    host = kvsketch.Cache(engine="reference", residual_length=64)
    host.append(k, v)
    np.testing.assert_allclose(cache.attend(cupy.asarray(q)).get(), host.attend(q), rtol=1e-5, atol=1e-5)


def test_masks_of_valid_tokens_and_rows_may_lie_on_the_device(cupy: Any) -> None:
    k, v = make_tokens(3, 2, 2, 70)
    valid = np.arange(70) >= np.array([[0], [30]])
    cache = kvsketch.Cache(engine="reference", residual_length=32)
    cache.append(cupy.asarray(k), cupy.asarray(v), valid=cupy.asarray(valid))
    assert cache.lengths.tolist() == [70, 40]
    cache.reorder(cupy.asarray(np.array([1, 0])))
    assert cache.lengths.tolist() == [40, 70]


def test_a_cache_moves_to_the_device_and_back_with_the_same_bytes(cupy: Any) -> None:
    k, v = make_tokens(3, 2, 2, 150)
    q = np.random.default_rng(4).standard_normal((2, 4, 1, 16)).astype(np.float32)
    host = make_cache("outliers-ints1", sink_tokens=4, residual_length=32)
    host.append(k, v)
    host.flush()
    device = host.to(0)
    view = device.view()
    assert {type(x) for x in (view.pages, view.sink_k, view.window_v)} == {cupy.ndarray}
    np.testing.assert_array_equal(view.pages.get(), host.view().pages)
    np.testing.assert_allclose(
        device.attend(cupy.asarray(q)).get(), host.attend(q, coefficients="int16"), rtol=2e-3, atol=2e-3
    )
    back = device.to("cpu")
    for name, mine, theirs in zip(view._fields[1:], back.view()[1:], host.view()[1:], strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    with pytest.raises(ValueError, match="device=7 does not exist; there are"):
        host.to(7)
    with pytest.raises(ValueError, match=r'device must be "cpu" or the number of a CUDA device, got .tpu.'):
        host.to("tpu")
