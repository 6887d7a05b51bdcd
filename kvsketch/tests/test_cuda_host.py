"""Warp operations and intrinsics of the harness that executes CUDA C++ on the CPU mean what CUDA's mean."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from kvsketch.tests.cuda_host import HostModule, empty, running
from kvsketch.tests.cuda_host.fixtures import needs_harness

pytestmark = needs_harness

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
    "syncwarp_halves": (
        "__shared__ int s[32]; s[lane] = lane; __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u); o[i] = s[lane ^ 8];",
        LANES ^ 8,
    ),
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
