"""Which vector instructions the kernels are compiled for.

A tier fixes the width of a vector and the instructions that have no portable spelling; the kernels' source is the same
for all. ``KVSKETCH_CPU_TIER`` names a lower tier than the machine's, to test it or to compare; Numba then compiles for
an older processor, which it can only do before its first compilation in the process.
"""

from __future__ import annotations

import os
import platform

import llvmlite.binding as llvm
from numba.core import config
from numba.core.registry import cpu_target

VARIABLE = "KVSKETCH_CPU_TIER"
#: Bytes of a vector in each tier, best first.
TIERS = {"avx512-vnni": 64, "avx2": 32, "generic": 16}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
#: LLVM's names of what a tier needs.
_NEEDS = {"avx512-vnni": ("avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"), "avx2": ("avx2", "f16c", "fma")}
#: An x86-64 processor that has a tier's instructions and no more.
_OLDER_PROCESSOR = {"avx512-vnni": "cascadelake", "avx2": "haswell", "generic": "x86-64"}


def _compiled_for() -> tuple[str, str, str]:
    """Triple, processor and features that Numba compiles for; from now on it is settled."""
    triple, processor, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, processor, features


def _features() -> set[str]:
    """Those that Numba compiles for: NUMBA_CPU_FEATURES may have asked for fewer than the machine has."""
    return {name[1:] for name in _compiled_for()[2].split(",") if name.startswith("+")}


def best_tier(features: set[str]) -> str:
    """The best tier for a machine with these features, LLVM's names."""
    return next((tier for tier, needs in _NEEDS.items() if features.issuperset(needs)), "generic")


def _choose() -> str:
    """The tier of this process, after telling Numba to compile for it where it is not the machine's own."""
    machine = best_tier({name for name, has in llvm.get_host_cpu_features().items() if has})
    wanted = os.environ.get(VARIABLE) or None
    if wanted is None:
        return best_tier(_features())
    if wanted not in TIERS:
        raise ValueError(f"{VARIABLE} must be one of {list(TIERS)}, got {wanted!r}")
    order = list(TIERS)
    if order.index(wanted) < order.index(machine):
        raise ValueError(f"{VARIABLE}={wanted}, but the best that this machine can run is {machine}")
    if wanted != machine and IS_X86:
        config.CPU_NAME, config.CPU_FEATURES = _OLDER_PROCESSOR[wanted], ""
        if _compiled_for()[2]:
            raise RuntimeError(
                f"{VARIABLE}={wanted} comes too late: Numba has already compiled for this machine in this process; "
                "import kvsketch before whatever else uses Numba"
            )
    elif IS_X86 and best_tier(_features()) != wanted:
        raise RuntimeError(
            f"{VARIABLE}={wanted}, but NUMBA_CPU_NAME and NUMBA_CPU_FEATURES make Numba compile for less; unset them"
        )
    return wanted


#: The tier of this process.
TIER = _choose()
VECTOR_BYTES = TIERS[TIER]
#: Whether the processor compiled for converts float16 itself; LLVM calls a routine that Numba does not link elsewhere.
HAS_FLOAT16 = TIER != "generic" or not IS_X86
