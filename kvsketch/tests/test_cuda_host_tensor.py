"""Tensor cores, matrix loads and asynchronous copies of the harness, against NumPy, and their wrong uses."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch.tests.cuda_host import CudaHostError, HostModule, empty, running
from kvsketch.tests.cuda_host.fixtures import needs_harness

pytestmark = needs_harness

#: D (16, 8) = A (16, words) times B (8, words) transposed: copied to shared memory, read by ldmatrix.
PRODUCT = """#line 1 "product.cu"
#define MMA(Name, T, function) \\
  struct Name { \\
    typedef T Sum; \\
    static __device__ void of(T* d, const unsigned* a, const unsigned* b) { cuda_host::function(d, a, b); } \\
  };
MMA(F16, float, mma_f16)
MMA(BF16, float, mma_bf16)
MMA(S8, int, mma_s8)
MMA(U8, int, mma_u8)
MMA(U8S8, int, mma_u8_s8)
MMA(S8U8, int, mma_s8_u8)
MMA(AND, int, mma_b1_and)
MMA(XOR, int, mma_b1_xor)
template <class Mma> __global__ void product(const unsigned* a, const unsigned* b, typename Mma::Sum* d) {
  __shared__ __align__(16) unsigned as[16 * 8], bs[8 * 8];
  const int l = threadIdx.x, g = l >> 2, t = l & 3;
  cuda_host::cp_async(as + 4 * l, a + 4 * l, 16);
  if (l < 16) cuda_host::cp_async(bs + 4 * l, b + 4 * l, 16);
  cuda_host::cp_async_commit();
  cuda_host::cp_async_wait(0);  // WAIT
  __syncwarp();  // BARRIER
  unsigned ar[4], br[2] = {bs[g * 8 + t], bs[g * 8 + t + 4]};
  typename Mma::Sum sums[4] = {0, 0, 0, 0};
  cuda_host::ldmatrix_x4(ar, as + ((l & 7) + 8 * (l >> 3 & 1)) * 8 + 4 * (l >> 4));
  Mma::of(sums, ar, br);
  for (int j = 0; j < 4; ++j) d[(g + 8 * (j >> 1)) * 8 + 2 * t + (j & 1)] = sums[j];
}
"""
EIGHT_BITS = {
    "S8": (np.int8, np.int8),
    "U8": (np.uint8, np.uint8),
    "U8S8": (np.uint8, np.int8),
    "S8U8": (np.int8, np.uint8),
}
HALVES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
KINDS = (*EIGHT_BITS, *HALVES, "AND", "XOR")


@cache
def module(code: str) -> HostModule:
    return HostModule(code, name_expressions=tuple(f"product<{kind}>" for kind in KINDS))


def operands(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A and B as 32-bit words, and A B^T."""
    rng = np.random.default_rng(1)
    a: Any
    b: Any
    if kind in EIGHT_BITS:
        a, b = (
            rng.integers(np.iinfo(t).min, np.iinfo(t).max, (n, 32), dtype=t, endpoint=True)
            for n, t in zip((16, 8), EIGHT_BITS[kind], strict=True)
        )
        return a.view(np.uint32), b.view(np.uint32), a.astype(np.int64) @ b.astype(np.int64).T
    if kind in HALVES:
        a, b = (rng.standard_normal((n, 16)).astype(HALVES[kind]) for n in (16, 8))
        return a.view(np.uint32), b.view(np.uint32), a.astype(np.float64) @ b.astype(np.float64).T
    a, b = rng.integers(0, 2, (16, 256)), rng.integers(0, 2, (8, 256))
    words = [np.packbits(x.astype(np.uint8), axis=1, bitorder="little").view(np.uint32) for x in (a, b)]
    return words[0], words[1], a @ b.T if kind == "AND" else a @ (1 - b).T + (1 - a) @ b.T


def run(kind: str, code: str = PRODUCT) -> np.ndarray:
    a, b, _ = operands(kind)
    d = empty((16, 8), np.float32 if kind in HALVES else np.int32)
    module(code).get_function(f"product<{kind}>")((1,), (32,), (a, b, d))
    return d


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "order"), [("check", "round-robin"), ("fast", "reverse"), ("fast", "random")])
def test_products(kind: str, mode: str, order: str) -> None:
    with running(mode, order):
        np.testing.assert_allclose(run(kind), operands(kind)[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cuda_host::cp_async_wait(0);  // WAIT", "", r"RACE with cp\.async .* has not been waited for|UNINITIALISED"),
        ("cp_async_wait(0);", "cp_async_wait(1);", r"RACE with cp\.async"),
        ("cuda_host::cp_async_commit();", "", r"RACE with cp\.async"),
        ("__syncwarp();  // BARRIER", "", "RACE read-after-write|UNINITIALISED"),
        ("as + 4 * l, a + 4 * l, 16", "as + 4 * l, a + 4 * l + 1, 16", "MISALIGNED cp.async: it needs 16 bytes"),
        ("bs + 4 * l, b + 4 * l, 16", "bs + 4 * l, b + 4 * l + 4, 16", "OUT OF BOUNDS read of 16 bytes at product.cu"),
        ("if (l < 16) cuda", "cuda", "OUT OF BOUNDS (read|write) of 16 bytes at product.cu"),
        ("4 * (l >> 4));", "4 * (l >> 4) + 2);", r"MISALIGNED ldmatrix row at product\.cu:\d+: it needs 16 bytes"),
        ("8 * (l >> 3 & 1)) * 8", "8 * (l >> 3 & 1)) * 16", "OUT OF BOUNDS read of 16 bytes at product.cu"),
        ("Mma::of(sums", "if (l < 31) Mma::of(sums", "mma.sync needs all 32 lanes"),
    ],
)
def test_wrong_uses_are_caught(old: str, new: str, said: str) -> None:
    assert PRODUCT.count(old) == 1
    with running("check"), pytest.raises(CudaHostError, match=said):
        run("S8", PRODUCT.replace(old, new))


def test_a_missing_wait_shows_unchecked() -> None:
    with running("fast"):
        assert (run("S8", PRODUCT.replace("cuda_host::cp_async_wait(0);  // WAIT", "")) != operands("S8")[2]).any()


COPIES = """#line 1 "copies.cu"
// Two stages: the tile of the next round is on its way while this round's is summed.
__global__ void pipeline(const int* a, int* o, int tiles) {
  __shared__ __align__(16) int stage[2][128];
  const int l = threadIdx.x;
  cuda_host::cp_async(stage[0] + 4 * l, a + 4 * l, 16);
  cuda_host::cp_async_commit();
  int sum = 0;
  for (int i = 0; i < tiles; i++) {
    if (i + 1 < tiles) cuda_host::cp_async(stage[(i + 1) & 1] + 4 * l, a + 128 * (i + 1) + 4 * l, 16);
    cuda_host::cp_async_commit();
    cuda_host::cp_async_wait(1);
    __syncthreads();
    for (int j = 0; j < 4; j++) sum += stage[i & 1][127 - 4 * l - j];
    __syncthreads();  // USED UP
  }
  o[l] = sum;
}
__global__ void partial(const int* a, int* o) {
  __shared__ __align__(16) int s[4];
  cuda_host::cp_async(s, a, 16, 8);
  cuda_host::cp_async_commit();
  cuda_host::cp_async_wait(0);
  for (int i = 0; i < 4; i++) o[i] = s[i];
}
__global__ void transposed(const unsigned short* a, unsigned* o) {
  __shared__ __align__(16) unsigned short s[64];
  for (int i = threadIdx.x; i < 64; i += 32) s[i] = a[i];
  __syncwarp();
  unsigned r;
  cuda_host::ldmatrix_x1_trans(&r, s + 8 * (threadIdx.x & 7));
  o[threadIdx.x] = r;
}
"""


@cache
def copies(code: str) -> HostModule:
    return HostModule(code, name_expressions=("pipeline", "partial", "transposed"))


def run_pipeline(code: str, tiles: int) -> bool:
    a, o = np.arange(128 * tiles, dtype=np.int32), empty(32, np.int32)
    copies(code).get_function("pipeline")((1,), (32,), (a, o, np.int32(tiles)))
    return bool((o == a.reshape(tiles, 32, 4).sum((0, 2))[::-1]).all())


@pytest.mark.parametrize(("mode", "order"), [("check", "round-robin"), ("check", "random"), ("fast", "random")])
def test_copies_in_two_stages(mode: str, order: str) -> None:
    with running(mode, order, seed=4):
        assert all(run_pipeline(COPIES, tiles) for tiles in (1, 2, 5))


def test_a_copy_over_a_tile_in_use() -> None:
    """Without the second barrier a copy may land in a tile that other threads still read."""
    code = COPIES.replace("__syncthreads();  // USED UP", "")
    with running("check"), pytest.raises(CudaHostError, match=r"RACE (write-after-read|with cp\.async)"):
        run_pipeline(code, 5)
    with running("fast", "random"):
        assert not all(run_pipeline(code, 9) for _ in range(4))


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_partial_copies_end_in_zeros(mode: str) -> None:
    o = empty(4, np.int32)
    with running(mode):
        copies(COPIES).get_function("partial")((1,), (1,), (np.arange(5, 9, dtype=np.int32), o))
    assert o.tolist() == [5, 6, 0, 0]


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_transposed_matrix_load(mode: str) -> None:
    a, o = np.arange(64, dtype=np.uint16), empty(32, np.uint32)
    with running(mode):
        copies(COPIES).get_function("transposed")((1,), (32,), (a, o))
    np.testing.assert_array_equal(o.view(np.uint16).reshape(8, 8), a.reshape(8, 8).T)
