"""The harness that executes CUDA C++ on the CPU means what CUDA means."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch.tests.cuda_host import CudaHostError, HostModule, empty, running
from kvsketch.tests.cuda_host.fixtures import needs_compiler

pytestmark = needs_compiler

LANES = np.arange(32)
#: Kernel bodies: `o[i]` is the result of thread i of one warp, which is lane `lane`; and what it must be.
WARP: dict[str, tuple[str, Any]] = {
    "shfl": ("o[i] = __shfl_sync(~0u, lane, 5, 8);", (LANES & ~7) + 5),
    "shfl_up": ("o[i] = __shfl_up_sync(~0u, lane, 3, 16);", np.where((LANES & 15) >= 3, LANES - 3, LANES)),
    "shfl_down": ("o[i] = __shfl_down_sync(~0u, lane, 3, 16);", np.where((LANES & 15) < 13, LANES + 3, LANES)),
    "shfl_xor": ("o[i] = __shfl_xor_sync(~0u, lane, 9);", LANES ^ 9),
    "shfl_xor_width": ("o[i] = __shfl_xor_sync(~0u, lane, 9, 8);", np.where(LANES & 8, LANES ^ 9, LANES)),
    "shfl_half": ("o[i] = (int)float(__shfl_xor_sync(~0u, __float2half(float(lane)), 1));", LANES ^ 1),
    "shfl_half2": (
        "half2 x = __floats2half2_rn(lane, 1); x = __shfl_xor_sync(~0u, x, 1); o[i] = (int)__low2float(x);",
        LANES ^ 1,
    ),
    "shfl_bf16": ("o[i] = (int)float(__shfl_xor_sync(~0u, __float2bfloat16(float(lane)), 1));", LANES ^ 1),
    "shfl_i64": ("o[i] = (int)(__shfl_sync(~0u, (long long)lane << 40, 7) >> 40);", 7),
    "shfl_float": ("o[i] = (int)__shfl_sync(~0u, 0.5f + lane, 7);", 7),
    "shfl_divergent": (
        "if (lane < 16) o[i] = __shfl_sync(0xffffu, lane, 3); else o[i] = -__shfl_sync(0xffff0000u, lane, 20);",
        np.where(LANES < 16, 3, -20),
    ),
    "ballot": ("o[i] = __ballot_sync(~0u, lane % 3 == 0);", sum(1 << i for i in range(0, 31, 3))),
    "any_all": ("o[i] = __any_sync(~0u, lane == 7) * 10 + __all_sync(~0u, lane < 32);", 11),
    "none": ("o[i] = __any_sync(~0u, 0) * 10 + __all_sync(~0u, lane < 31);", 0),
    "match_any": ("o[i] = __match_any_sync(~0u, lane & 1) >> 1;", np.where(LANES & 1, 0x55555555, 0x2AAAAAAA)),
    "match_all": ("int p, q; __match_all_sync(~0u, 4, &p); __match_all_sync(~0u, lane, &q); o[i] = 2 * p + q;", 2),
    "reduce_add": (
        "o[i] = __reduce_add_sync(lane < 16 ? 0xffffu : 0xffff0000u, lane);",
        np.where(LANES < 16, 120, 376),
    ),
    "reduce_max": ("o[i] = __reduce_max_sync(~0u, -lane);", 0),
    "reduce_min": ("o[i] = __reduce_min_sync(~0u, -lane);", -31),
    "reduce_xor": ("o[i] = __reduce_xor_sync(~0u, 1u << lane) == ~0u;", 1),
    "early_return": ("o[i] = 0; if (lane >= 8) return; o[i] = __ballot_sync(~0u, 1);", np.where(LANES < 8, 255, 0)),
    "syncwarp": ("__shared__ int s[32]; s[lane] = lane; __syncwarp(); o[i] = s[lane ^ 1];", LANES ^ 1),
    "atomic_max": (
        "__shared__ int m; if (!lane) m = -5; __syncthreads(); atomicMax(&m, lane); __syncthreads(); o[i] = m;",
        31,
    ),
    "atomic_float": (
        "__shared__ float m; if (!lane) m = 0; __syncthreads(); atomicAdd(&m, 0.5f); __syncthreads(); o[i] = (int)m;",
        16,
    ),
    "atomic_cas": (
        "__shared__ int m; if (!lane) m = 3; __syncthreads(); atomicCAS(&m, 3, 9); __syncthreads(); o[i] = m;",
        9,
    ),
    "device_function": ("o[i] = in_helper(lane);", LANES[::-1]),
    "constant_table": ("o[i] = table[lane & 3];", np.tile([2, 3, 5, 7], 8)),
}
#: Values of single threads.
SCALAR: dict[str, tuple[str, int]] = {
    "byte_perm": ("__byte_perm(0x33221100u, 0x77665544u, 0x7250u)", 0x77225500),
    "byte_perm_sign": ("__byte_perm(0x80ff7f00u, 0, 0xba98u) & 0x7fffffff", 0x7FFF0000),
    "dp4a": ("__dp4a(0x01ff7f80, 0x02020202, 5)", 5 + 2 * (1 - 1 + 127 - 128)),
    "dp4a_unsigned": ("(int)__dp4a(0x01ff7f80u, 0x02020202u, 5u)", 5 + 2 * (1 + 255 + 127 + 128)),
    "brev": ("(int)(__brev(6u) >> 1)", 0x30000000),
    "clz": ("__clz(1) * 100 + __clz(0)", 3132),
    "ffs": ("__ffs(8) * 10 + __ffs(0)", 40),
    "popc": ("__popc(255u) + __popcll(1ull << 40)", 9),
    "funnelshift": ("(int)__funnelshift_l(0xf0000000u, 1u, 4)", 0x1F),
    "lop3": ("(int)cuda_host::lop3(12, 10, 9, 0xe8)", 8),  # majority
    "umulhi": ("(int)__umulhi(1u << 31, 6u)", 3),
    "rn": ("__float2int_rn(2.5f) * 10 + __float2int_rn(3.5f)", 24),
    "rn_saturates": ("__float2int_rn(1e30f)", 0x7FFFFFFF),
    "rd_ru": ("__float2int_rd(-1.5f) * 10 + __float2int_ru(-1.5f)", -21),
    "nan_to_int": ("__float2int_rz(__int_as_float(0x7fc00000))", 0),
    "saturate": ("(int)(10 * __saturatef(3.f) + __saturatef(-3.f))", 10),
    "min_max": ("min(3, 4u) + max(-1, 2) + (int)fmaxf(1.f, 2.f) + (int)max(7ll, 3ll)", 3 + 2 + 2 + 7),
    "as_int": ("__float_as_int(1.f)", 0x3F800000),
    "hfma2": (
        "(int)__high2float(__hfma2(__floats2half2_rn(1, 2), __floats2half2_rn(3, 4), __floats2half2_rn(5, 6)))",
        14,
    ),
    "hfma_rounds_once": ("(int)(1048576 * square_plus(1.0009765625f, -1.001953125f))", 1),
    "half_arithmetic": (
        "(int)float(__hadd2(__hmul2(__half2half2(__float2half(3)), __floats2half2_rn(1, 2)), __float2half2_rn(4)).y)",
        10,
    ),
    "half_compare": ("__hlt(__float2half(1), __float2half(2)) + 2 * __hisnan(__float2half(1))", 1),
    "half_max": ("(int)float(__hmax2(__floats2half2_rn(1, 9), __floats2half2_rn(5, 2)).x)", 5),
    "half_bits": ("(int)__half_as_ushort(__float2half_rn(1.f))", 0x3C00),
    "half_rounds_to_even": ("(int)__half_as_ushort(__float2half_rn(2049.f))", 0x6800),
    "float22half2": ("(int)float(__float22half2_rn(make_float2(1, 7)).y)", 7),
    "halves2half2": ("(int)float(__high2half(__halves2half2(__float2half(1), __float2half(7))))", 7),
    "half22float2": ("(int)__half22float2(__floats2half2_rn(1, 7)).y", 7),
    "bf16": (
        "(int)float(__float2bfloat16_rn(257.f)) + (int)__bfloat162float(__low2bfloat16(__floats2bfloat162_rn(3, 4)))",
        259,
    ),
    "bf162_fma": (
        "(int)float(__hfma2(__floats2bfloat162_rn(1, 2), __floats2bfloat162_rn(3, 4), __floats2bfloat162_rn(5, 6)).y)",
        14,
    ),
    "half2int": ("__half2int_rn(__float2half(2.5f)) * 10 + (int)__bfloat162uint_ru(__float2bfloat16(2.5f))", 23),
    "h2exp2": ("(int)float(h2exp2(__floats2half2_rn(3, 4)).y)", 16),
    "exp2f": ("(int)exp2f(5.f)", 32),
    "int_as_float": ("isinf(__int_as_float(0x7f800000)) ? 1 : 0", 1),
    "rsqrt": ("(int)(100 * rsqrtf(4.f))", 50),
}
PREAMBLE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
__constant__ int table[4] = {2, 3, 5, 7};
__device__ float square_plus(float x, float y) {
  return __half2float(__hfma(__float2half(x), __float2half(x), __float2half(y)));
}
__device__ int in_helper(int lane) {
  __shared__ int s[32];
  s[lane] = lane;
  __syncthreads();
  return s[31 - lane];
}
"""


@cache
def semantics() -> HostModule:
    """One module of all kernels of WARP, and one that computes SCALAR."""
    head = "const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31; (void)lane; (void)i;"
    kernels = [f"__global__ void {name}(int* o) {{ {head}\n{body} }}\n" for name, (body, _) in WARP.items()]
    values = "\n".join(f"o[{i}] = {value};" for i, (value, _) in enumerate(SCALAR.values()))
    kernels.append(f"__global__ void scalars(int* o) {{\n{values}\n}}\n")
    return HostModule(PREAMBLE + "".join(kernels), name_expressions=(*WARP, "scalars"))


@pytest.mark.parametrize("name", WARP)
def test_warp_operations(name: str) -> None:
    for mode, order in (("check", "round-robin"), ("fast", "reverse"), ("fast", "random")):
        o = empty(32, np.int32)
        with running(mode, order):
            semantics().get_function(name)((1,), (32,), (o,))
        np.testing.assert_array_equal(o, np.broadcast_to(WARP[name][1], 32).astype(np.int64).astype(np.int32))


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_values_of_intrinsics(mode: str) -> None:
    o = empty(len(SCALAR), np.int32)
    with running(mode):
        semantics().get_function("scalars")((1,), (1,), (o,))
    assert dict(zip(SCALAR, o.tolist(), strict=True)) == {name: value for name, (_, value) in SCALAR.items()}


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
