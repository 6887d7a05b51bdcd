"""What the checked mode of the harness catches: each kind of wrong access once, and bugs planted in a real kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from kvsketch.tests.cuda_host import CudaHostError, HostModule, empty, running
from kvsketch.tests.cuda_host.fixtures import needs_harness

pytestmark = needs_harness

#: Bodies of a kernel over 33 numbers `in` and `o` with one block of 32 threads, and what is said of each.
WRONG: dict[str, tuple[str, str]] = {
    "read_one_past": (
        "o[i] = in[i + 2];",
        r"thread \(31,0,0\)\] OUT OF BOUNDS read of 4 bytes at wrong.cu:\d+: "
        r"byte 132 of argument 1 \(int32\[33\]\) \(132 bytes\)",
    ),
    "read_before": ("o[i] = in[i - 1];", "OUT OF BOUNDS read of 4 bytes .* byte -4 of argument 1"),
    "write_past": ("if (i == 5) o[33] = 1;", r"thread \(5,0,0\)\] OUT OF BOUNDS write .* byte 132 of argument 0"),
    "atomic_past": (
        "atomicAdd(o + 33 + i, 1);",
        r"OUT OF BOUNDS atomic of 4 bytes at wrong.cu:\d+: byte 132 of argument 0",
    ),
    "vector_past": ("uint4 v = *(const uint4*)(in + 4 * i); o[i] = (int)v.w;", "OUT OF BOUNDS read of (4|16)"),
    "struct_past": (
        "struct S { int a[12]; }; S s = *(const S*)(in + i); o[i] = s.a[threadIdx.x % 12];",
        "OUT OF BOUNDS read",
    ),
    "memcpy_past": ("int v[8]; memcpy(v, in + i, 32); o[i] = v[threadIdx.x % 8];", "OUT OF BOUNDS read of 32"),
    "memset_past": ("memset(o + 30, 0, 16);", "OUT OF BOUNDS write of 16"),
    "ldg_past": ("o[i] = __ldg(in + 40);", "OUT OF BOUNDS read"),
    "null": ("*(volatile int*)nullptr = 1;", "UNDEFINED BEHAVIOUR .null or misaligned|OUT OF BOUNDS"),
    "write_const": ("const_cast<int*>(in)[i] = 1;", "WRITE to read-only argument 1"),
    "shared_past": (
        "__shared__ int s[64]; extern __shared__ int d[]; s[i] = i; d[i + 1] = s[i]; o[i] = 0;",
        "OUT OF BOUNDS write .* byte 128 of dynamic shared memory",
    ),
    "misaligned": (
        "o[i] = (int)(*(const long long*)(in + 1) >> 32);",
        "UNDEFINED BEHAVIOUR .null or misaligned|MISALIGNED",
    ),
    "misaligned_half2": (
        "half2 h = *(const half2*)((const half*)in + 2 * i + 1); o[i] = (int)float(h.x);",
        "UNDEFINED BEHAVIOUR .null or misaligned|MISALIGNED",
    ),
    "unwritten_shared": (
        "__shared__ int s[33]; s[i] = i; __syncthreads(); o[i] = s[i + 1];",
        r"UNINITIALISED read at wrong.cu:\d+: byte 128 of __shared__ unwritten_shared\(.*\)::s",
    ),
    "unwritten_output": ("if (i) o[i] = 1; __syncthreads(); o[i] += 1;", "UNINITIALISED read .* byte 0 of argument 0"),
    "unwritten_atomic": ("atomicAdd(o + i, 1);", "UNINITIALISED atomic"),
    "array_index": (
        "int a[4]; for (int j = 0; j < 4; j++) a[j] = j; o[i] = a[threadIdx.x];",
        "array index out of bounds",
    ),
    "shift": ("o[i] = 1 << (i + 8);", "shift out of bounds.*wrong.cu"),
    "division": ("o[i] = 7 / (i - 3);", r"thread \(3,0,0\)\] UNDEFINED BEHAVIOUR \(division by zero"),
    "overflow": ("o[i] = 0x7fffffff - 30 + i;", "signed addition overflows"),
    "float_cast": ("o[i] = (int)(1e10f * (i + 1));", "does not fit the integer"),
    "assertion": ("o[i] = 0; assert(i < 7);", r"thread \(7,0,0\)\] assert\(i < 7\) does not hold at wrong.cu"),
    "trap": ("__trap();", r"__trap\(\)"),
    "active_mask": ("o[i] = __activemask();", "pass masks explicitly"),
    "same_place": ("o[0] = i;", "RACE write-after-write on argument 0"),
    "neighbour": (
        "__shared__ int s[32]; s[i] = i; o[i] = s[i ^ 1];",
        "RACE read-after-write on __shared__|UNINITIALISED",
    ),
    "write_after_read": (
        "__shared__ int s[32]; s[i] = i; __syncthreads(); o[i] = s[31 - i]; s[i] = 0;",
        "RACE (write-after-read|read-after-write) on __shared__",
    ),
    "shuffle_no_barrier": (
        "__shared__ int s[32]; s[i] = i; __shfl_sync(~0u, 1, 0); o[i] = s[i ^ 1];",
        "RACE read-after-write",
    ),
    "half_that_did_not_meet": (
        "__shared__ int s[32]; s[i] = 0; __syncwarp();\n"
        "s[i] = i; __syncwarp(i < 16 ? 0xffffu : 0xffff0000u); o[i] = s[i ^ 16];",
        "RACE (read-after-write|write-after-read)",
    ),
    "atomic_then_read": ("__shared__ int s; if (!i) s = 0; __syncthreads(); atomicAdd(&s, 1); o[i] = s;", "RACE"),
    "not_in_mask": ("o[i] = __shfl_sync(0xffu, 1, 0);", "calling lane 8 is not in its own mask 0x000000ff"),
    "wrong_half": ("o[i] = __shfl_xor_sync(i < 16 ? 0xffffu : 0xffff0000u, i, 16);", "does not take part"),
    "different_barriers": (
        "o[i] = 0; if (i < 16) __syncthreads();\nelse __syncthreads_count(1);",
        r"DIVERGENT __syncthreads: this thread is at wrong.cu:\d+ but thread 0 waits at wrong.cu",
    ),
    "returned_lane": (
        "if (i == 4) return; o[i] = __shfl_sync(~0u, 1, 0) + __shfl_sync(~0u, i, 4);",
        "does not take part",
    ),
}


@cache
def wrong() -> HostModule:
    kernels = "".join(
        f"__global__ void {name}(int* o, const int* in) {{ const int i = threadIdx.x; (void)i;\n{body} }}\n"
        for name, (body, _) in WRONG.items()
    )
    return HostModule('#line 1 "wrong.cu"\n' + kernels, name_expressions=tuple(WRONG))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_accesses_are_caught(name: str) -> None:
    """The memory behind both views is there, so only exact bounds tell."""
    a, o = np.zeros(64, np.int32)[8:41], empty(64, np.int32)[8:41]
    with running("check"), pytest.raises(CudaHostError, match=WRONG[name][1]):
        wrong().get_function(name)((1,), (32,), (o, a), shared_mem=128)


MORE = """#line 1 "more.cu"
__global__ void across_blocks(int* o) { o[threadIdx.x] = 1; }
__global__ void copy_all(const int* a, int* o, int n, int step) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) o[i] = a[i * step];
}
__global__ void add_one(int* a, const int* b, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) a[i] = b[i] + 1;
}
__global__ void shifted(int* a, const int* b, int n) { a[threadIdx.x + 1] = b[threadIdx.x]; }
__global__ void stuck(int* o) {
  if (threadIdx.x < 32 || threadIdx.x >= 48) __syncthreads();
  o[threadIdx.x] = __ballot_sync(~0u, 1);
}
__global__ void exits(int* o) {
  if (threadIdx.x == 4) return;
  o[threadIdx.x] = __ballot_sync(~0u, 1);
}
__global__ void neighbours(int* o) {
  __shared__ int s[64];
  int i = threadIdx.x;
  s[i] = i;
  o[i] = s[i ? i - 1 : 0];
}
__global__ void last_block(int* parts, int* done, int* o) {
  __shared__ int last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    last = atomicAdd(done, 1) == (int)gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    int sum = 0;
    for (int i = 0; i < (int)gridDim.x; i++) sum += parts[i];
    *o = sum;
  }
}
__global__ void three_readers(int* o) {
  __shared__ int s;
  if (threadIdx.x == 0) s = 7;
  __syncthreads();
  if (threadIdx.x != 1) o[threadIdx.x] = s;
  __syncwarp();
  if (threadIdx.x == 1) s = 8;
}
"""
MORE_NAMES = (
    "across_blocks",
    "copy_all",
    "add_one",
    "shifted",
    "stuck",
    "exits",
    "neighbours",
    "last_block",
    "three_readers",
)


@cache
def more() -> HostModule:
    return HostModule(MORE, name_expressions=MORE_NAMES)


def launch(name: str, threads: int, *args: Any, blocks: int = 1) -> None:
    more().get_function(name)((blocks,), (threads,), args)


def test_blocks_race_with_one_another() -> None:
    with (
        running("check"),
        pytest.raises(CudaHostError, match=r"RACE write-after-write .* by block 0 thread 0 at more\.cu:1"),
    ):
        launch("across_blocks", 32, np.zeros(32, np.int32), blocks=2)


def test_blocks_that_wait_for_one_another() -> None:
    def run(**options: Any) -> int:
        o, done = empty(1, np.int32), np.zeros(1, np.int32)
        with running("check", **options):
            launch("last_block", 32, empty(5, np.int32), done, o, blocks=5)
        return int(o[0])

    assert run(blocks_race=False) == 15
    assert run(blocks_race=False, order="random", seed=2) == 15
    with pytest.raises(CudaHostError, match="RACE read-after-write on argument 0"):
        run()


def test_strided_arrays_hold_only_their_elements() -> None:
    a = np.arange(64, dtype=np.int32).reshape(16, 4)[:, 1]
    o = empty(16, np.int32)
    with running("check"):
        launch("copy_all", 32, a, o, np.int32(16), np.int32(4))
        np.testing.assert_array_equal(o, a)
        with pytest.raises(CudaHostError, match=r"byte 4 of argument 0 \(int32\[16\]\) lies between its elements"):
            launch("copy_all", 32, a, o, np.int32(16), np.int32(1))


def test_what_one_kernel_left_unwritten_the_next_may_not_read() -> None:
    a, o = empty(16, np.int32), empty(16, np.int32)
    with running("check"):
        launch("copy_all", 32, np.arange(16, dtype=np.int32), a, np.int32(10), np.int32(1))
        launch("copy_all", 32, a, o, np.int32(10), np.int32(1))
        np.testing.assert_array_equal(o[:10], np.arange(10))
        with pytest.raises(CudaHostError, match=r"UNINITIALISED read .* byte 40 of argument 0"):
            launch("copy_all", 32, a, o, np.int32(11), np.int32(1))
        with pytest.raises(CudaHostError, match=r"UNINITIALISED read .* byte 0 of argument 0 \(int32\[4\]\)"):
            launch("copy_all", 32, a[10:14], o, np.int32(4), np.int32(1))


def test_one_memory_under_two_arguments() -> None:
    a = np.arange(16, dtype=np.int32)
    with running("check"):
        launch("add_one", 32, a, a, np.int32(16))
        np.testing.assert_array_equal(a, np.arange(16) + 1)
        with pytest.raises(CudaHostError, match="RACE"):
            launch("shifted", 15, a, a, np.int32(16))


def test_readers_of_a_third_warp_count() -> None:
    """A write races with a read long ago, though its own warp has read since and been synchronised."""
    with running("check"):
        launch("three_readers", 32, empty(32, np.int32))
        with pytest.raises(CudaHostError, match="RACE"):
            launch("three_readers", 96, empty(96, np.int32))


def test_deadlock_report() -> None:
    report = (
        r"DEADLOCK:\s+threads 0\.\.31: waiting at __syncthreads  more\.cu:10\s+threads 32\.\.47: waiting at "
        r"__ballot_sync mask 0xffffffff  more\.cu:11\s+threads 48\.\.63: waiting at __syncthreads  more\.cu:10"
    )
    for mode in ("fast", "check"):
        with running(mode), pytest.raises(CudaHostError, match=report):
            launch("stuck", 64, np.zeros(64, np.int32))


def test_masks_that_name_lanes_gone() -> None:
    with running("check"):
        launch("exits", 32, empty(32, np.int32))
    with running("check", strict_exit=True), pytest.raises(CudaHostError, match="names lanes that have returned"):
        launch("exits", 32, empty(32, np.int32))


def test_a_race_that_luck_hides() -> None:
    """Thread i reads what thread i - 1 wrote, with no barrier: right in the order of threads, and only in that."""

    def right(*how: Any, **options: Any) -> bool:
        o = empty(64, np.int32)
        with running(*how, **options):
            launch("neighbours", 64, o)
        return bool((o == np.maximum(np.arange(64) - 1, 0)).all())

    assert right("fast")
    assert not right("fast", "reverse")
    assert not any(right("fast", "random", seed=seed) for seed in range(8))
    with pytest.raises(
        CudaHostError, match=r"RACE read-after-write on __shared__ .* at more\.cu:21, .* at more\.cu:20"
    ):
        right("check")


def test_a_failed_launch_leaves_nothing_behind() -> None:
    o = empty(16, np.int32)
    with running("check"):
        with pytest.raises(CudaHostError, match="OUT OF BOUNDS"):
            launch("copy_all", 32, np.arange(15, dtype=np.int32), o, np.int32(16), np.int32(1))
        launch("copy_all", 32, np.arange(16, dtype=np.int32), o, np.int32(16), np.int32(1))
    np.testing.assert_array_equal(o, np.arange(16))
