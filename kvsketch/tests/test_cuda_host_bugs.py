"""Bugs planted in two real kernels, one at a time: the harness must say so of each. And switches for bugs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from kvsketch.tests.cuda_host import CudaHostError, HostModule, empty, running
from kvsketch.tests.cuda_host.fixtures import needs_harness
from kvsketch.tests.cuda_host.planted import planted, switched_on, with_switches

pytestmark = needs_harness

#: Signs of the products of tokens (n, D) with rows (M, D), and the tokens' norms. Blocks of 8 tokens, a warp each.
SIGNS = """#line 1 "signs.cu"
#include <cuda_fp16.h>
template <int D, int M>
__global__ void __launch_bounds__(256) signs(const half* __restrict__ k, const float* __restrict__ rows,
                                             unsigned* __restrict__ bits, half* __restrict__ norms, int n) {
  __shared__ float tokens[8][D];
  __shared__ float staged[32][D + 1];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * 8, t = first + warp;
  for (int i = threadIdx.x; i < 8 * D; i += blockDim.x)
    tokens[i / D][i % D] = first + i / D < n ? __half2float(k[size_t(first + i / D) * D + i % D]) : 0.f;
  __syncthreads();  // tokens are staged
  float sum = 0.f;
  for (int c = lane; c < D; c += 32) sum += tokens[warp][c] * tokens[warp][c];
  for (int apart = 16; apart; apart >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  if (lane == 0 && t < n) norms[t] = __float2half(sqrtf(sum));
  for (int row = 0; row < M; row += 32) {
    __syncthreads();  // rows are used up
    for (int i = threadIdx.x; i < 32 * D; i += blockDim.x) staged[i / D][i % D] = rows[size_t(row + i / D) * D + i % D];
    __syncthreads();  // rows are staged
    float dot = 0.f;
    for (int c = 0; c < D; ++c) dot += staged[lane][c] * tokens[warp][c];
    const unsigned word = __ballot_sync(0xffffffffu, dot > 0.f);
    if (lane == 0 && t < n) bits[size_t(t) * (M / 32) + row / 32] = word;
  }
}
"""
#: One query's attention over tokens of BITS-bit codes with a scale each, by warps that share their results.
MIX = """#line 1 "mix.cu"
template <int BITS, int D>
__global__ void __launch_bounds__(128) mix(const float* __restrict__ q, const unsigned* __restrict__ codes,
                                           const float* __restrict__ scales, float* __restrict__ out, int n) {
  extern __shared__ __align__(16) float merged[];
  constexpr int PER = 32 / BITS, WORDS = D / PER, C = D / 32;
  constexpr unsigned MASK = (1u << BITS) - 1u;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  float mine[C], most = -1e30f, total = 0.f;
  for (int c = 0; c < C; ++c) mine[c] = 0.f;
  for (int t = warp; t < n; t += warps) {
    float x[C], score = 0.f;
    for (int c = 0; c < C; ++c) {
      const int at = lane * C + c;
      x[c] = scales[t] * float(codes[size_t(t) * WORDS + at / PER] >> (BITS * (at % PER)) & MASK);
      score += q[at] * x[c];
    }
    for (int apart = 16; apart; apart >>= 1) score += __shfl_xor_sync(0xffffffffu, score, apart);
    const float larger = fmaxf(most, score), shrink = __expf(most - larger), weight = __expf(score - larger);
    total = total * shrink + weight;
    most = larger;
    for (int c = 0; c < C; ++c) mine[c] = mine[c] * shrink + weight * x[c];
  }
  float* own = merged + warp * (D + 2);
  for (int c = 0; c < C; ++c) own[lane * C + c] = mine[c];
  if (lane == 0) own[D] = most, own[D + 1] = total;
  __syncthreads();  // results are shared
  for (int w = 0; w < warps; ++w) most = fmaxf(most, merged[w * (D + 2) + D]);
  for (int c = threadIdx.x; c < D; c += blockDim.x) {
    float sum = 0.f, weight = 0.f;
    for (int w = 0; w < warps; ++w) {
      const float shrink = __expf(merged[w * (D + 2) + D] - most);
      sum += shrink * merged[w * (D + 2) + c];
      weight += shrink * merged[w * (D + 2) + D + 1];
    }
    out[c] = sum / weight;
  }
}
"""
STAGED = "__syncthreads();  // tokens are staged"
SHARED = "__syncthreads();  // results are shared"
#: What is changed (once) to what, and what is said of it; "wrong" where only the numbers tell.
BUGS = {
    "no barrier after staging tokens": (STAGED, "", "RACE|UNINITIALISED"),
    "no barrier before staging rows": ("__syncthreads();  // rows are used up", "", "RACE write-after-read"),
    "no barrier after staging rows": ("__syncthreads();  // rows are staged", "", "RACE|UNINITIALISED"),
    "no barrier before merging": (SHARED, "", "RACE|UNINITIALISED"),
    "a barrier of the warp for one of the block": (SHARED, "__syncwarp();", "RACE|UNINITIALISED"),
    "a token too many is read": ("first + i / D < n ?", "first + i / D <= n ?", "OUT OF BOUNDS read .* argument 0"),
    "a token too many is mixed": ("t < n; t += warps", "t <= n; t += warps", "OUT OF BOUNDS read .* argument 2"),
    "too far apart in shared memory": ("warp * (D + 2)", "warp * (D + 3)", "OUT OF BOUNDS write .* dynamic shared"),
    "a row of a static array too far": ("staged[lane][c]", "staged[lane + 1][c]", "index out of bounds|OUT OF BOUNDS"),
    "the last block writes all its tokens": ("t < n) bits", "t < n + 8) bits", "OUT OF BOUNDS write .* argument 2"),
    "a mask without the upper lanes": (
        "(0xffffffffu, score",
        "(0xffffu, score",
        "not in its own mask|does not take part",
    ),
    "a mask of each half": (
        "(0xffffffffu, score",
        "(lane < 16 ? 0xffffu : 0xffff0000u, score",
        "does not take part",
    ),
    "a shuffle that some lanes skip": (
        "sum += __shfl_xor_sync(0xffffffffu, sum, apart);",
        "if (lane < 20) sum += __shfl_xor_sync(0xffffffffu, sum, apart);",
        "DEADLOCK",
    ),
    "a barrier that some threads skip": (
        STAGED,
        "if (threadIdx.x < 100) __syncthreads();",
        "DIVERGENT|DEADLOCK|RACE|UNINITIALISED",
    ),
    "a slot that nobody wrote": (
        "w < warps; ++w) most",
        "w < warps + 1; ++w) most",
        "OUT OF BOUNDS read|UNINITIALISED",
    ),
    "a shift by 32": ("(BITS * (at % PER))", "(BITS * (at % PER + 1))", "shift out of bounds"),
    "a misaligned vector": (
        "float sum = 0.f;\n  for (int c = lane",
        "float sum = 0.f * (*(const float4*)(rows + 1 + lane)).x;\n  for (int c = lane",
        "misaligned|MISALIGNED",
    ),
    "all lanes write a norm": (
        "if (lane == 0 && t < n) norms",
        "if (t < n) norms",
        "RACE write-after-write .* argument 3",
    ),
    "a sum over half the warp": (
        "apart = 16; apart; apart >>= 1) score",
        "apart = 8; apart; apart >>= 1) score",
        "wrong",
    ),
    "no rescaling": ("mine[c] * shrink", "mine[c]", "wrong"),
    "a product of 32 bits": ("size_t(t) * WORDS", "t * (1 << 30) * WORDS / (1 << 30)", "multiplication overflows"),
}
D, M, N = 64, 64, 21


@cache
def module(code: str) -> HostModule:
    name = f"signs<{D}, {M}>" if "signs.cu" in code else f"mix<2, {D}>"
    return HostModule(code, name_expressions=(name,))


def run_signs(code: str) -> None:
    """Tokens that do not fill the last block, against NumPy."""
    rng = np.random.default_rng(0)
    k, rows = rng.standard_normal((N, D)).astype(np.float16), rng.standard_normal((M, D)).astype(np.float32)
    bits, norms = empty((N, M // 32), np.uint32), empty(N, np.float16)
    function = module(code).get_function(f"signs<{D}, {M}>")
    function((-(-N // 8),), (256,), (k, rows, bits, norms, np.int32(N)))
    products = k.astype(np.float64) @ rows.T
    got = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    assert ((got == (products > 0)) | (abs(products) < 1e-3)).all()
    np.testing.assert_allclose(norms, np.linalg.norm(k.astype(np.float64), axis=-1), rtol=1e-3)


def run_mix(code: str) -> None:
    """Tokens that do not divide among the warps, against NumPy."""
    rng = np.random.default_rng(0)
    q, scales = rng.standard_normal(D).astype(np.float32), rng.random(N).astype(np.float32)
    codes = rng.integers(0, 4, (N, D)).astype(np.uint32)
    words = np.bitwise_or.reduce(codes.reshape(N, D // 16, 16) << (2 * np.arange(16, dtype=np.uint32)), axis=-1)
    out = empty(D, np.float32)
    function = module(code).get_function(f"mix<2, {D}>")
    function((1,), (128,), (q, words, scales, out, np.int32(N)), shared_mem=4 * 4 * (D + 2))
    x = codes * scales[:, None].astype(np.float64)
    weights = np.exp(x @ q - (x @ q).max())
    np.testing.assert_allclose(out, weights @ x / weights.sum(), rtol=1e-5, atol=1e-6)


HOW = [
    ("check", "round-robin"),
    ("check", "random"),
    ("fast", "round-robin"),
    ("fast", "reverse"),
    ("fast", "random"),
]


@pytest.mark.parametrize(("mode", "order"), HOW)
def test_the_kernels_are_right(mode: str, order: str) -> None:
    with running(mode, order, seed=5, preempt_ppm=2000 if mode == "check" and order == "random" else 0):
        run_signs(SIGNS)
        run_mix(MIX)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name: str) -> None:
    old, new, said = BUGS[name]
    run, code = (run_signs, SIGNS) if old in SIGNS else (run_mix, MIX)
    assert code.count(old) == 1
    with running("check"):
        if said == "wrong":
            with pytest.raises(AssertionError, match="Not equal"):
                run(code.replace(old, new))
        else:
            with pytest.raises(CudaHostError, match=said):
                run(code.replace(old, new))


# ---------------------------------------------------------------------- switches
class Switched(NamedTuple):
    old: str
    new: str


SWITCHED = (
    Switched("__syncthreads();\n  out", ""),
    Switched("shared[t]", "shared[t ^ 1]"),
    Switched("t < n ?", "t < n - PLANTED ?"),
    Switched("in no source", ""),
)
DOUBLED = """
__global__ void doubled(const float* x, float* out, int n) {
  __shared__ float shared[64];
  const int t = threadIdx.x;
  shared[63 - t] = x[63 - t];
  __syncthreads();
  out[t] = t < n ? 2 * shared[t] : 0.f;
}
"""


def test_one_build_has_all_bugs_each_behind_its_switch() -> None:
    bugs = {bug.old: bug for bug in SWITCHED}
    module = HostModule(with_switches(DOUBLED, bugs), name_expressions=("doubled",))
    x, n = np.arange(64, dtype=np.float32), 40
    right = np.where(x < n, 2 * x, 0)

    def run() -> np.ndarray:
        out = empty(64, np.float32)
        module.get_function("doubled")((1,), (64,), (x, out, np.int32(n)))
        return out

    with running("check"):
        np.testing.assert_array_equal(run(), right)
        with switched_on(0), pytest.raises(CudaHostError, match=r"RACE|UNINITIALISED"):
            run()
        with switched_on(1):
            np.testing.assert_array_equal(run(), np.where(x < n, 2 * x.reshape(-1, 2)[:, ::-1].ravel(), 0))
        with switched_on(2):
            np.testing.assert_array_equal(run(), np.where(x == n - 1, 0, right))
        with switched_on(3):
            np.testing.assert_array_equal(run(), right)


def test_bugs_whose_texts_overlap_are_refused() -> None:
    bugs = {"first": Switched("t < n ?", "true || PLANTED ?"), "second": Switched("out[t] = t < n ?", "out[t] = ")}
    with pytest.raises(ValueError, match=r"bug 'second': an earlier bug changed its text 'out\[t\] = t < n \?'"):
        with_switches(DOUBLED, bugs)


def test_a_bug_that_is_in_no_source_is_named() -> None:
    with pytest.raises(AssertionError, match="no source has 'in no source'"), planted("gone", {"gone": SWITCHED[3]}):
        pass
