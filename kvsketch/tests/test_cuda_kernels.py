"""The declared kernels: that they are all there are, what they use, and the bytes that they are counted to read."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.kernels_occupancy import LIMITS, Occupancy, occupancy
from benchmarks.kernels_traffic import measure, subjects
from kvsketch import bitpack, kivi, pages, qjl, rotation
from kvsketch._checks import BITS
from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.cuda_raw import _compile, instances
from kvsketch.cuda_raw import bitpack as raw_bitpack
from kvsketch.cuda_raw import kivi as raw_kivi
from kvsketch.cuda_raw import pages as raw_pages
from kvsketch.cuda_raw import qjl as raw_qjl
from kvsketch.cuda_raw import rotation as raw_rotation
from kvsketch.cuda_raw.attention_instances import ATTENTION
from kvsketch.cuda_raw.attention_mma_instances import ATTENTION_MMA
from kvsketch.cuda_raw.encode_instances import ENCODE
from kvsketch.cuda_raw.instances import ARCHITECTURES, INSTANCES, Block, Instance
from kvsketch.cuda_raw.palu_instances import PALU
from kvsketch.layout import side_layout
from kvsketch.rotation import draw_projection
from kvsketch.tests.cuda_host import CudaHostError, HostModule, empty, nvrtc, running
from kvsketch.tests.cuda_host.devices import SHARED_KILOBYTES
from kvsketch.tests.cuda_host.fixtures import needs_harness
from kvsketch.tests.cuda_host.toolchain import built, compiler, include_folders, run
from kvsketch.tests.cuda_host.traffic import Bytes, counted

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
ENGINE: dict[str, Any] = {"engine": "cuda_raw"}


# ---------------------------------------------------------------------- the list
def declared_kernels() -> set[tuple[str, str]]:
    """File and name of every kernel in the sources."""
    bounds = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
    kernel = re.compile(rf"__global__\s+{bounds}void\s+{bounds}(\w+)\s*\(")
    found = set()
    for path in files("kvsketch.cuda_raw").iterdir():
        if path.name.endswith(".cu"):
            text = re.sub(r"//.*", "", path.read_text())
            names = kernel.findall(text)
            assert len(names) == text.count("__global__"), path.name
            found |= {(path.name, name) for name in names}
    return found


def test_all_kernels_are_in_the_list_and_nothing_is_twice() -> None:
    named = [(instance.file, instance.expression) for instance in INSTANCES]
    assert len(set(named)) == len(named)
    assert {(instance.file, instance.kernel) for instance in INSTANCES} == declared_kernels()
    assert set(named) >= {*ATTENTION, *ATTENTION_MMA, *PALU, *((kernel.file, kernel.expression) for kernel in ENCODE)}


def test_architectures_of_kernels() -> None:
    assert ARCHITECTURES == nvrtc.ARCHITECTURES
    for instance in INSTANCES:
        first = 80 if "_mma" in instance.file or instance.file == "palu_prepare.cu" else 75
        assert tuple(instance.blocks) == tuple(a for a in ARCHITECTURES if a >= first), instance


class Launches:
    """Stands for ``_compile.launch``: notes launches and runs nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[tuple[str, str], Block] = {}
        for module in (raw_bitpack, raw_kivi, raw_pages, raw_qjl, raw_rotation):
            monkeypatch.setattr(module, "launch", self)

    def __call__(self, file: str, expression: str, grid: Any, block: Any, args: Any, *, shared: int = 0) -> None:
        before = self.found.get((file, expression), Block(0, 0))
        here = Block(int(np.prod(block)), shared)
        self.found[file, expression] = Block(*map(max, before, here))


def test_launchers_launch_what_is_declared_and_nothing_else(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    """All operations but attention, in every dtype and number of bits, with heads of 128 channels and long rows."""
    launches = Launches(monkeypatch)

    def zeros(*shape: int, dtype: Any = np.float32) -> Any:
        return cupy.zeros(shape, dtype)

    for dtype in (np.int8, np.float16, np.float32, np.float64):
        bitpack.pack_signs(zeros(3, 40, dtype=dtype), **ENGINE)
    bitpack.unpack_codes(bitpack.pack_codes(zeros(3, 40, dtype=np.uint8), bits=2, **ENGINE), 40, bits=2, **ENGINE)
    rotation.hadamard_transform(zeros(2, 1 << 14), **ENGINE)
    x, q = zeros(1, 2, 64, 128), zeros(1, 4, 1, 128)
    keys = kivi.quantize_groups(x, bits=2, group=32, axis="tokens", **ENGINE)
    values = kivi.quantize_groups(x, bits=2, group=32, axis="channels", **ENGINE)
    kivi.dequantize_groups(keys, **ENGINE)
    kivi.key_scores(q, keys, **ENGINE)
    kivi.weighted_values(zeros(1, 4, 1, 64), values, **ENGINE)
    projection, outlier_projection = draw_projection(256, 128), draw_projection(64, 128, stream=1)
    options = {"outliers": 4, "outlier_projection": outlier_projection, "page": 32, **ENGINE}
    sketched = qjl.sketch_keys(x, projection, **options)
    qjl.sketch_scores(q, sketched, projection, outlier_projection=outlier_projection, **ENGINE)
    for dtype in (np.float16, np.float32):
        raw_qjl.split_outliers(x.astype(dtype), sketched.channels, 32)
    raw_qjl.round_norms(zeros(64))
    codecs: list[Codec] = [Exact(), SignSketch(256, outliers=4, outlier_m=64), *map(GroupedInts, BITS)]
    for codec in [*codecs, *map(TokenInts, BITS)]:
        side = side_layout("keys", codec, 32, 128)
        records = zeros(1, 2, 2, side.nbytes, dtype=np.uint8)
        pages.encode_keys(x, side, out=records, **ENGINE)
        pages.decode_keys(records, side, **ENGINE)
    assert launches.found == {(k.file, k.expression): Block(k.threads, k.shared) for k in ENCODE}


# ---------------------------------------------------------------------- occupancy
CALCULATOR = """
#include <cuda_occupancy.h>
extern "C" int blocks(int sm, int warps, int shared, int block_shared, int reserved, int registers, int threads,
                      int dynamic, int* limits) {
  cudaOccDeviceProp device;
  device.computeMajor = sm / 10, device.computeMinor = sm % 10;
  device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = 32 * warps, device.warpSize = 32;
  device.regsPerBlock = device.regsPerMultiprocessor = 65536, device.numSms = 1;
  device.sharedMemPerBlock = 48 << 10, device.sharedMemPerMultiprocessor = shared;
  device.sharedMemPerBlockOptin = block_shared, device.reservedSharedMemPerBlock = reserved;
  cudaOccFuncAttributes kernel;
  kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.numBlockBarriers = 1;
  kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = dynamic;
  cudaOccDeviceState state;
  state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
  cudaOccResult result;
  if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, dynamic)) return -1;
  *limits = result.limitingFactors;
  return result.activeBlocksPerMultiprocessor;
}
"""
#: enum cudaOccLimitingFactor of NVIDIA's header.
FACTORS = {"warps": 1, "registers": 2, "shared memory": 4, "blocks": 8}


def nvidias_calculator() -> Callable[..., int]:
    """The function of :data:`CALCULATOR`, around the header of CUDA."""

    def build(folder: Path, target: Path) -> None:
        text = folder / "occupancy.cpp"
        text.write_text(CALCULATOR)
        includes = [f"-I{path}" for path in include_folders()]
        run([compiler(), "-shared", "-fPIC", "-w", *includes, text, "-o", target])

    return ctypes.CDLL(str(built("occupancy", [CALCULATOR], build))).blocks


@needs_harness
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_occupancy_is_that_of_nvidias_calculator(architecture: int) -> None:
    calculator, limits = nvidias_calculator(), LIMITS[architecture]
    assert limits.block_shared == SHARED_KILOBYTES[str(architecture)] << 10
    rng, factors, seen = np.random.default_rng(architecture), ctypes.c_int(), set()
    sizes = itertools.product(range(1, 256, 7), (32, 64, 100, 128, 256, 384, 512, 1024))
    for registers, threads in sizes:
        for shared in (0, *rng.integers(1, limits.block_shared + 200, 4).tolist(), limits.block_shared):
            here = occupancy(architecture, registers=registers, shared=shared, threads=threads)
            given = (architecture, limits.warps, limits.shared, limits.block_shared, limits.reserved)
            blocks = calculator(*given, registers, threads, shared, ctypes.byref(factors))
            assert (here.blocks, here.warps) == (blocks, blocks * -(-threads // 32)), (registers, threads, shared)
            assert here.share == here.warps / limits.warps
            assert FACTORS[here.limit] & factors.value or not blocks
            seen.add(here.limit)
    assert seen == set(FACTORS)


def test_occupancy_of_nvidias_examples() -> None:
    """CUDA C++ Best Practices Guide, "Occupancy": 37 registers, blocks of 128 and of 320 threads, 64 warps."""
    assert occupancy(80, registers=37, shared=0, threads=128) == Occupancy(12, 48, 0.75, "registers")
    assert occupancy(80, registers=37, shared=0, threads=320) == Occupancy(4, 40, 0.625, "registers")


# ---------------------------------------------------------------------- the command
def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["kernels", *arguments])


@needs_nvrtc
def test_command_compiles_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    result = invoke("--files", "bitpack.cu", "--architectures", "75,90", "--all", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "(3, 3) kernels and instantiations compiled for 2 architectures: 6 in all, of which 0 spill" in result.output
    found = json.loads(path.read_text())
    assert found["traffic"] == []
    assert {(entry["kernel"], entry["architecture"]) for entry in found["kernels"]} == {
        (kernel.expression, architecture)
        for kernel in ENCODE
        for architecture in (75, 90)
        if kernel.file == "bitpack.cu"
    }
    for entry in found["kernels"]:
        assert (entry["failure"], entry["spill_bytes"], entry["threads"]) == (None, 0, raw_bitpack.THREADS)
        assert 8 <= entry["registers"] <= 64
        line = (
            rf"\| {re.escape(entry['kernel'])} +\| +{entry['architecture']} \| +{entry['registers']} \| +0 \| +128 \|"
        )
        assert re.search(line, result.output)


BAD = """
// 64 numbers of which each needs all others, in 32 registers.
__global__ void __launch_bounds__(1024, 2) spills(float* x, int turns) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
  for (int turn = 0; turn < turns; ++turn)
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] += v[(i * 7 + 1) % 64] * v[(i * 11 + 3) % 64];
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i];
}
template <int BITS>
__global__ void broken(float* x) {
  static_assert(BITS == 1, "one bit alone");
}
"""


@needs_nvrtc
def test_command_fails_with_a_list_of_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocks = {75: Block(1024, 0), 90: Block(1024, 0)}
    names = ("spills", "broken<1>", "broken<2>")
    monkeypatch.setattr(instances, "INSTANCES", tuple(Instance("bad.cu", name, blocks) for name in names))
    monkeypatch.setattr(_compile, "source", lambda _: BAD)
    path = tmp_path / "kernels.json"
    result = invoke("--architectures", "90", "--json", str(path))
    assert result.exit_code == 1
    assert re.search(r"bad.cu spills on 90 spills \d+ bytes", result.output)
    assert re.search(r"bad.cu broken<2> on 90 does not compile: [^$]*one bit alone", result.output)
    assert "broken<1> on" not in result.output
    assert "(2, 3) kernels and instantiations compiled for 1 architectures: 3 in all, of which 2 " in result.output
    assert [entry["failure"] is None for entry in json.loads(path.read_text())["kernels"]] == [False, True, False]


@pytest.mark.parametrize(("option", "value"), [("--architectures", "75,91"), ("--files", "bitpack.cu,none.cu")])
def test_command_names_what_it_does_not_know(option: str, value: str) -> None:
    result = invoke(option, value)
    assert result.exit_code == 2
    assert f"{option} must be" in result.output
    assert repr(value.split(",")[1]) in result.output


# ---------------------------------------------------------------------- bytes
TRAFFIC = """
#include <cuda_fp16.h>
__device__ float sum(float4 of) { return of.x + of.y + of.z + of.w; }
__global__ void traffic(const float* once, const __half* half_number, const float4* by_all, const uint4* copied,
                        const float2* apart, float* out, unsigned* total, int n) {
  __shared__ uint4 room[64];
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef CUDA_HOST
  cuda_host::cp_async(&room[threadIdx.x], &copied[threadIdx.x], 16);
  cuda_host::cp_async_commit();
  cuda_host::cp_async_wait(0);
#endif
  __syncthreads();
  if (at < n) {
    out[at] = once[at] + __half2float(half_number[at]) + sum(by_all[0]) + apart[at].x + room[threadIdx.x ^ 1].x;
    atomicAdd(total, 1u);
  }
}
"""
N = 150


def run_traffic(half_numbers: int = N) -> None:
    """Three blocks of 64 threads for 150 numbers."""
    arrays = (
        *(np.ones(N, np.float32), np.ones(half_numbers, np.float16), np.ones(8, np.float32)),
        *(np.ones((64, 4), np.uint32), np.ones((N, 2), np.float32), empty(N), np.zeros(1, np.uint32)),
    )
    module = HostModule(code=TRAFFIC, name_expressions=("traffic",))
    module.get_function("traffic")((3,), (64,), (*arrays, np.int32(N)))


@needs_harness
def test_bytes_are_counted_exactly() -> None:
    with running("check"), counted() as launches:
        run_traffic()
        run_traffic()
    assert [launch.kernel for launch in launches] == ["traffic", "traffic"]
    assert launches[0] == launches[1]
    once, half, by_all, copied, apart, out, total = launches[0].arrays
    none = Bytes(0, 0, 0)
    assert (once.read, once.written) == (Bytes(4 * N, 4 * N, 4 * N), none)
    assert half.read == Bytes(2 * N, 2 * N, 2 * N)
    assert by_all.read == Bytes(16 * N, 3 * 16, 16)
    assert copied.read == Bytes(3 * 1024, 3 * 1024, 1024)
    assert apart.read == Bytes(4 * N, 4 * N, 4 * N)
    assert (out.read, out.written) == (none, Bytes(4 * N, 4 * N, 4 * N))
    assert total.read == total.written == Bytes(4 * N, 3 * 4, 4)
    assert (half.position, half.name) == (1, "argument 1 (float16[150])")


@needs_harness
def test_bytes_are_not_counted_where_accesses_are_not_checked() -> None:
    with counted() as launches, running("fast"), pytest.raises(CudaHostError, match=r'use running\("check"\)'):
        run_traffic()
    assert not launches


@needs_harness
def test_numbers_passed_by_value_are_checked() -> None:
    """g++ alone would not report that they are read."""
    with running("check"), pytest.raises(CudaHostError, match=r"OUT OF BOUNDS read of 2 bytes at .*: byte 298 of"):
        run_traffic(half_numbers=N - 1)


@needs_harness
@pytest.mark.parametrize("level", ["simt", "mma"])
def test_every_byte_of_a_record_is_read_once(level: str) -> None:
    subject = subjects()[0]
    found = measure(subject, level).bytes
    assert found.read == found.touched == found.record == 96
    assert found.asked == (96 if level == "mma" else found.asked)
    assert 0 < found.written < found.record
