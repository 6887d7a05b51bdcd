"""NVRTC as the tests use it: what kernels take on real architectures, and errors that say where."""

from __future__ import annotations

import pytest

from kvsketch.tests.cuda_host import CompileError
from kvsketch.tests.cuda_host.nvrtc import ARCHITECTURES, Compiled, compile_for, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

CODE = """#line 1 "sum.cu"
#include <cuda_fp16.h>
#ifndef KV_SM
#error "KV_SM is not given"
#endif
template <class T, int N> __global__ void sum(const T* a, float* o) {
  __shared__ float s[N];
  s[threadIdx.x] = float(a[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x) return;
  float x = 0;
  for (int i = 0; i < N; i++) x += s[i];
  *o = x * (KV_SM >= 80 ? 2 : 1);
}
template <int N> __global__ void __launch_bounds__(1024, 2) crowded(const float* a, float* o) {
  float x[N];
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = a[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++) o[threadIdx.x + 1024 * (N - 1 - i)] = x[i] * x[N - 1 - i];
}
"""
NAMES = ("sum<half, 128>", "sum<float, 256>", "crowded<200>")


def options(architecture: int) -> tuple[str, ...]:
    return (f"-DKV_SM={architecture}",)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_kernels_use(architecture: int) -> None:
    found = compile_for(CODE, NAMES, [architecture], options)
    assert set(found) == {(architecture, name) for name in NAMES}
    for name, shared in zip(NAMES, (512, 1024, 0), strict=True):
        compiled = found[architecture, name]
        assert isinstance(compiled, Compiled)
        assert (compiled.static_shared_bytes, 8 <= compiled.registers <= 255) == (shared, True)
        assert compiled.cubin_bytes > 1000
        # 200 numbers do not fit the 32 registers that two blocks of 1024 threads leave.
        assert (compiled.spill_bytes > 0) == (compiled.stack_bytes > 0) == (name == "crowded<200>")


def test_errors_name_the_line() -> None:
    with pytest.raises(CompileError, match=r"NVRTC for sm_80:\nsum\.cu:3: .*KV_SM is not given"):
        compile_for(CODE, NAMES, [80])
    with pytest.raises(CompileError, match=r"sum\.cu:10: error: identifier \"y\" is undefined"):
        compile_for(CODE.replace("float x = 0;", "float x = y;"), NAMES[:1], [75], ("-DKV_SM=75",))
    with pytest.raises(CompileError, match="no_such_kernel"):
        compile_for(CODE, ["no_such_kernel<3>"], [90], options)
