"""The vector instructions that kernels are compiled for: which are chosen, and that lower ones give the same."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvsketch.numba_cpu import _tiers
from kvsketch.numba_cpu._compile import compile_address, inner
from kvsketch.numba_cpu._tiers import TIER, TIERS, VARIABLE, best_tier
from kvsketch.numba_cpu.simd import stay_apart, store_word

#: Tiers that this process could have been told to use.
LOWER = list(TIERS)[list(TIERS).index(TIER) + 1 :]
AVX2 = {"avx2", "f16c", "fma"}
AVX512 = {"avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"}


@pytest.mark.parametrize(
    ("features", "tier"),
    [
        (set(), "generic"),
        ({"sse2", "neon", "sve"}, "generic"),
        (AVX2, "avx2"),
        (AVX2 | {"avx512f", "avxvnni"}, "avx2"),
        (AVX2 - {"fma"}, "generic"),
        (AVX2 - {"f16c"}, "generic"),
        (AVX512, "avx512-vnni"),
        (AVX512 | AVX2 | {"avx512f"}, "avx512-vnni"),
        *(((AVX512 | AVX2) - {need}, "avx2") for need in ("avx512bw", "avx512vl", "avx512vnni")),
        ((AVX512 | AVX2) - {"fma"}, "generic"),
    ],
)
def test_a_machine_gets_the_best_tier_that_it_has_all_instructions_of(features, tier):
    assert best_tier(features) == tier


def test_this_process_has_a_tier():
    assert TIER in TIERS
    assert TIERS[TIER] == _tiers.VECTOR_BYTES
    assert list(TIERS.values()) == sorted(TIERS.values(), reverse=True)
    if wanted := os.environ.get(VARIABLE):
        assert wanted == TIER


def test_an_unknown_tier_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "avx1024")
    with pytest.raises(ValueError, match=r"KVSKETCH_CPU_TIER must be one of \['avx512-vnni', .*got 'avx1024'"):
        _tiers._choose()


@pytest.mark.parametrize(("tier", "features", "best"), [("avx512-vnni", AVX2, "avx2"), ("avx2", set(), "generic")])
def test_a_tier_above_the_machine_s_is_refused(tier, features, best, monkeypatch):
    monkeypatch.setattr(_tiers.llvm, "get_host_cpu_features", lambda: dict.fromkeys(features, True) | {"sse9": False})
    monkeypatch.setenv(VARIABLE, tier)
    with pytest.raises(ValueError, match=f"KVSKETCH_CPU_TIER={tier}, but the best that this machine can run is {best}"):
        _tiers._choose()


@pytest.mark.skipif(bool(os.environ.get(VARIABLE)), reason="a lower tier is asked for")
def test_an_empty_variable_asks_for_nothing(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    assert _tiers._choose() == TIER


def run(code, **variables):
    """Run Python code in a process of its own, with environment variables; what it printed, or its error."""
    environment = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment | variables, capture_output=True, text=True
    )
    return done.stdout if done.returncode == 0 else done.stderr


LATE = """
import numba
numba.njit(lambda x: x + 1)(1)
import kvsketch.numba_cpu._tiers
"""


@pytest.mark.skipif("generic" not in LOWER, reason="this machine has no lower tier")
def test_a_tier_that_comes_too_late_is_refused():
    """Numba has made its code generator for the machine's own processor by then."""
    assert "RuntimeError: KVSKETCH_CPU_TIER=generic comes too late" in run(LATE, KVSKETCH_CPU_TIER="generic")


SMOKE = """
import numpy as np
from kvsketch import GroupedInts, SignSketch
from kvsketch.attention import attend
from kvsketch.environment import describe_environment
from kvsketch.numba_cpu import _tiers, simd
from kvsketch.tests.page_cases import Row, assert_rounded, attend_exactly, make_view

values = GroupedInts(2, 32)
for keys in (GroupedInts(2, 32), SignSketch(m=48, outliers=2, outlier_m=16)):
    view, tokens = make_view(keys, values, d=40, dv=48, h=2, rows=[Row(4, 5, 9), Row(0, 2, 1)])
    q = np.random.default_rng(0).standard_normal((2, 6, 1, 40)).astype(np.float32)
    exact, size = attend_exactly(q, tokens)
    assert_rounded(attend(q, view, engine="numba_cpu"), exact, "int16")
print(_tiers.TIER, simd.VECTOR_BYTES, _tiers._compiled_for()[1])
print(describe_environment())
"""


@pytest.mark.parametrize("tier", LOWER)
def test_attention_in_a_lower_tier(tier):
    """KIVI and a sketch against float64, in a process that compiles for an older processor."""
    printed = run(SMOKE, **{VARIABLE: tier})
    first, _, environment = printed.partition("\n")
    processor = _tiers._OLDER_PROCESSOR[tier] if _tiers.IS_X86 else ""
    assert first.startswith(f"{tier} {TIERS[tier]} {processor}"), printed
    assert f"'numba_cpu': '{tier} kernels" in environment


@pytest.mark.parametrize("module", ["attention", "bitpack", "kivi", "pages", "palu", "qjl", "rotation"])
@pytest.mark.skipif("generic" not in LOWER, reason="this machine has no lower tier")
def test_any_module_may_be_the_first_to_be_loaded(module):
    """The tier is settled before a module could make Numba's code generator."""
    assert run(f"import kvsketch.numba_cpu.{module}; print('loaded')", **{VARIABLE: "generic"}) == "loaded\n"


def numbered_kernel(number):
    """A kernel that writes a number by way of a function of its own, made as those of all codecs are."""

    @inner
    def write(target):
        stay_apart()
        store_word(target, number)

    def kernel(target):
        write(target)

    return compile_address(kernel, str(number))


NUMBERS = """
import ctypes
import numpy as np
from kvsketch.tests.test_tiers import numbered_kernel

for number in {numbers}:
    target = np.zeros(1, np.uint16)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(numbered_kernel(number))(target.ctypes.data)
    print(target[0])
"""


def test_kernels_that_different_processes_compiled_do_not_disturb_one_another(tmp_path):
    """Functions inside them may have been given the same name; what a kernel calls must be its own."""
    for numbers in ([1], [2], [1, 2], [2, 1]):
        printed = run(NUMBERS.format(numbers=numbers), NUMBA_CACHE_DIR=str(tmp_path))
        assert printed.split() == [str(number) for number in numbers], printed
