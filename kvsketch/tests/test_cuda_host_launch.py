"""Launches in the harness: blocks, arguments, shared memory, limits, compiling and keeping what was built."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch.tests.cuda_host import CudaHostError, HostModule, empty, missing, running
from kvsketch.tests.cuda_host.fixtures import needs_harness
from kvsketch.tests.cuda_host.toolchain import CACHE_VARIABLE, kept

pytestmark = needs_harness

BLOCKS = """
__global__ void count(int* o) { o[threadIdx.x] = __syncthreads_count(threadIdx.x % 3 == 0); }
__global__ void after_return(unsigned* o) {
  o[threadIdx.x] = 0;
  if (threadIdx.x >= 40) return;
  __syncthreads();
  o[threadIdx.x] = __ballot_sync(~0u, 1);
}
__global__ void beyond_warp(int* o) { o[threadIdx.x] = __shfl_xor_sync(~0u, 1, 16); }
__global__ void two_axes(int* o) {
  o[threadIdx.y * blockDim.x + threadIdx.x] = threadIdx.y * 100 + threadIdx.x + 1000 * (int)(gridDim.y + blockDim.y);
}
__global__ void atomics(int* o) {
  atomicAdd(o, 1);
  atomicMax(o + 1, (int)(blockIdx.x * 64 + threadIdx.x));
  atomicOr((unsigned*)o + 2, 1u << (threadIdx.x & 31));
}
__global__ void ticket(int* o) { if (threadIdx.x == 0) o[atomicAdd(o + gridDim.x, 1)] = blockIdx.x; }
template <class T> __global__ void reversed(const T* a, T* o, int n) {
  extern __shared__ __align__(16) unsigned char bytes[];
  T* s = reinterpret_cast<T*>(bytes);
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = a[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) o[i] = s[n - 1 - i];
}
struct Shape { long long rows; int width; float scale; };
template <class T> __global__ void scaled(const T* a, float* o, Shape shape, bool negative) {
  for (long long r = threadIdx.x; r < shape.rows; r += blockDim.x)
    for (int c = 0; c < shape.width; c++)
      o[r * shape.width + c] = float(a[r * shape.width + c]) * shape.scale * (negative ? -1 : 1);
}
__global__ void vectors(const float4* a, float2* o) {
  const float4 x = __ldg(a + threadIdx.x);
  o[threadIdx.x] = make_float2(x.x + x.y, x.z + x.w);
}
__global__ void static_shared(int* o) {
  __shared__ int s[10240];
  for (int i = threadIdx.x; i < 10240; i += blockDim.x) s[i] = i;
  __syncthreads();
  o[threadIdx.x] = s[10239 - threadIdx.x];
}
"""
BLOCK_NAMES = (
    *("count", "after_return", "beyond_warp", "two_axes", "atomics", "ticket", "reversed<float>"),
    *("reversed<__nv_bfloat16>", "scaled<half>", "scaled<__nv_bfloat16>", "vectors", "static_shared"),
)


@cache
def blocks() -> HostModule:
    return HostModule(BLOCKS, options=("--std=c++17", "-DUNUSED=1"), name_expressions=BLOCK_NAMES)


def launch(name: str, block: tuple[int, ...], *args: Any, grid: tuple[int, ...] = (1,), shared: int = 0) -> None:
    """Run a kernel of :data:`BLOCKS`."""
    blocks().get_function(name)(grid, block, args, shared_mem=shared)


@pytest.fixture(params=["check", "fast"])
def mode(request: pytest.FixtureRequest) -> Any:
    with running(request.param):
        yield request.param


@pytest.mark.usefixtures("mode")
def test_block_votes_and_returned_threads() -> None:
    o = empty(48, np.int32)
    launch("count", (48,), o)
    assert (o == 16).all()
    o = empty(64, np.uint32)
    launch("after_return", (64,), o)
    assert (o[:32] == 0xFFFFFFFF).all()
    assert (o[32:40] == 0xFF).all()
    assert (o[40:] == 0).all()


@pytest.mark.usefixtures("mode")
def test_lanes_that_do_not_exist_cannot_be_read() -> None:
    with pytest.raises(CudaHostError, match="reads lane 16, which does not take part"):
        launch("beyond_warp", (16,), np.zeros(16, np.int32))


@pytest.mark.usefixtures("mode")
def test_axes_of_blocks() -> None:
    o = empty(32, np.int32)
    launch("two_axes", (8, 4), o, grid=(1, 1))
    np.testing.assert_array_equal(o, np.repeat(np.arange(4), 8) * 100 + np.tile(np.arange(8), 4) + 5000)


@pytest.mark.usefixtures("mode")
def test_atomics_across_blocks() -> None:
    o = np.zeros(4, np.int32)
    launch("atomics", (64,), o, grid=(3,))
    assert o.tolist() == [192, 191, -1, 0]


def test_orders_of_blocks() -> None:
    seen = {}
    for order in ("round-robin", "reverse", "random"):
        o = np.zeros(9, np.int32)
        with running("fast", order, seed=3):
            launch("ticket", (32,), o, grid=(8,))
        seen[order] = o[:8].tolist()
    assert seen["round-robin"] == [*range(8)]
    assert seen["reverse"] == [*range(7, -1, -1)]
    assert sorted(seen["random"]) == [*range(8)] != seen["random"]


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "float"), (ml_dtypes.bfloat16, "__nv_bfloat16")])
def test_dynamic_shared_memory(dtype: Any, name: str) -> None:
    a = np.arange(100).astype(dtype)
    o = empty(100, dtype)
    launch(f"reversed<{name}>", (32,), a, o, np.int32(100), shared=100 * a.itemsize)
    np.testing.assert_array_equal(o.astype(np.float32), np.arange(100)[::-1])


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "half"), (ml_dtypes.bfloat16, "__nv_bfloat16")])
def test_structs_are_passed_by_value(dtype: Any, name: str) -> None:
    shape = np.array(
        (3, 5, 2.5), np.dtype([("rows", np.int64), ("width", np.int32), ("scale", np.float32)], align=True)
    )
    a = np.arange(15).reshape(3, 5).astype(dtype)
    for value in (shape, shape[()]):  # an array of no axes, and a numpy.void
        o = empty((3, 5), np.float32)
        launch(f"scaled<{name}>", (32,), a, o, value, np.bool_(True))
        np.testing.assert_array_equal(o, -2.5 * np.arange(15).reshape(3, 5))


@pytest.mark.usefixtures("mode")
def test_vector_types_and_empty_arrays() -> None:
    a, o = np.arange(32, dtype=np.float32).reshape(8, 4), empty((8, 2), np.float32)
    launch("vectors", (8,), a, o)
    np.testing.assert_array_equal(o, a.reshape(8, 2, 2).sum(-1))
    launch("reversed<float>", (32,), np.zeros((0, 3), np.float32), empty(0, np.float32), np.int32(0))


@pytest.mark.usefixtures("mode")
def test_shared_memory_is_limited() -> None:
    n = 30_000
    a, o = np.arange(n, dtype=np.float32), empty(n, np.float32)
    function = blocks().get_function("reversed<float>")
    with pytest.raises(CudaHostError, match="max_dynamic_shared_size_bytes raises it"):
        function((1,), (128,), (a, o, np.int32(n)), shared_mem=4 * n)
    with pytest.raises(CudaHostError, match=r"must lie in 0\.\.232448 on compute capability 90"):
        function.max_dynamic_shared_size_bytes = 228 * 1024
    function.max_dynamic_shared_size_bytes = 4 * n
    function((1,), (128,), (a, o, np.int32(n)), shared_mem=4 * n)
    np.testing.assert_array_equal(o, a[::-1])
    static = blocks().get_function("static_shared")
    assert static.shared_size_bytes == 40960
    with pytest.raises(CudaHostError, match=r"must lie in 0\.\.8192, the kernel's own shared arrays taking 40960"):
        static((1,), (32,), (o.view(np.int32),), shared_mem=8193)
    static((1,), (32,), (o.view(np.int32),), shared_mem=8192)


def test_sizes_of_launches() -> None:
    o = np.zeros(32, np.int32)
    for grid, block, message in (
        ((0,), (32,), r"grid=\(0, 1, 1\) must lie between 1 and"),
        ((1, 70000), (32,), r"grid=\(1, 70000, 1\) must lie between 1 and"),
        ((1,), (2048,), r"block=\(2048, 1, 1\) must lie between 1 and"),
        ((1,), (64, 32), "more than 1024 threads"),
    ):
        with pytest.raises(CudaHostError, match=message):
            blocks().get_function("count")(grid, block, (o,))
    with pytest.raises(TypeError, match="must be a tuple"):
        blocks().get_function("count")(1, (32,), (o,))  # type: ignore[arg-type]


STRUCT = np.dtype([("rows", np.int64), ("width", np.int32)])


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("count", (np.zeros(4, np.int64),), r"array int64\[4\], the kernel wants pointer to int32"),
        ("count", (np.int32(3),), "scalar int32, the kernel wants pointer to int32"),
        ("count", (3,), "is a int; give arrays and NumPy scalars"),
        ("count", (), "0 arguments for 1 parameters"),
        ("reversed<float>", (np.zeros(4, np.float32), np.zeros(4, np.float32), 4), "argument 2 is a int"),
        ("reversed<float>", (np.zeros(4, np.float32), np.zeros(4, np.float32), np.int64(4)), "wants int32"),
        (
            "reversed<float>",
            (np.zeros(4, np.float64), np.zeros(4, np.float32), np.int32(4)),
            "pointer to const float32",
        ),
        ("reversed<__nv_bfloat16>", (np.zeros(4, np.float16), np.zeros(4, np.float16), np.int32(4)), "const bfloat16"),
        (
            "scaled<half>",
            (np.zeros(4, np.float16), np.zeros(4, np.float32), np.zeros((), STRUCT), np.bool_(0)),
            "struct of 16 bytes",
        ),
    ],
)
def test_arguments_must_be_what_the_kernel_takes(name: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(CudaHostError, match=message):
        launch(name, (4,), *args)


def test_what_a_module_needs() -> None:
    with pytest.raises(ValueError, match="name_expressions is empty"):
        HostModule("")
    with pytest.raises(ValueError, match="backend='nvcc' is not known"):
        HostModule("", name_expressions=("k",), backend="nvcc")
    with pytest.raises(CudaHostError, match="'other' is not among"):
        blocks().get_function("other")
    with pytest.raises(ValueError, match="mode='slow' is not known"), running("slow"):
        pass
    with pytest.raises(ValueError, match="order='any' is not known"), running("fast", "any"):
        pass
    with pytest.raises(ValueError, match='preempt_ppm=5 needs mode="check"'), running("fast", preempt_ppm=5):
        pass
    with pytest.raises(CudaHostError, match=r"options=\['--fmad=false'\] mean nothing"):
        HostModule("", options=("--fmad=false",), name_expressions=("k",)).image()


def test_errors_of_compilation_name_the_line() -> None:
    code = '#line 1 "pack.cu"\n__global__ void k(int* o) {\n  o[0] = undefined_thing;\n}\n'
    with pytest.raises(CudaHostError, match=r"pack\.cu:2:10: error: .*undefined_thing"):
        HostModule(code, name_expressions=("k",)).get_function("k")((1,), (1,), (np.zeros(1, np.int32),))
    code = "__global__ void k(int* o) {\n  extern __shared__ int* o2;\n}\n"
    with pytest.raises(CudaHostError, match=r"line 2 of the source: write dynamic shared memory as"):
        HostModule(code, name_expressions=("k",)).get_function("k")((1,), (1,), (np.zeros(1, np.int32),))


def test_builds_are_kept_whoever_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that build the same at once all get it, and nothing else is left."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    both = Barrier(4, timeout=60)

    def build(folder: Path, target: Path) -> None:
        (folder / "intermediate").write_text("")
        both.wait()
        target.write_text("built")

    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(lambda _: kept("name", ".so", ["a", "b"], build), range(4)))
    assert len(set(files)) == 1
    assert files[0].read_text() == "built"
    assert [*(tmp_path / "cache").iterdir()] == [files[0]]

    def fail(folder: Path, target: Path) -> None:
        raise CudaHostError("it does not build")

    assert kept("name", ".so", ["a", "b"], fail) == files[0]
    for other in (["a", "c"], ["ab", ""], ["a", "b", ""]):
        with pytest.raises(CudaHostError, match="it does not build"):
            kept("name", ".so", other, fail)
    assert [*(tmp_path / "cache").iterdir()] == [files[0]]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert missing() == (
        "'no-such-compiler' was not found; install g++ 10 or newer with binutils (CXX names another compiler)"
    )
