"""The machine that figures were taken on: processor, tier of the kernels, caches, threads."""

from __future__ import annotations

import re
from pathlib import Path

from kvsketch.environment import describe_environment, set_threads
from kvsketch.numba_cpu._threads import core_count
from kvsketch.numba_cpu._tiers import TIER

__all__ = ["TIER", "core_count", "describe_machine", "flush_bytes", "last_cache_bytes", "set_threads"]

#: Bytes read between two timed calls at the least.
FLUSH_BYTES = 96 << 20


def processor() -> str:
    """Model of the processor, as the system names it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else "unknown processor"


def last_cache_bytes() -> int:
    """Bytes of the largest processor cache; 0 where the system does not tell."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]])
    return max(sizes)


def flush_bytes() -> int:
    """Bytes that are read between timed calls: twice the last cache, at least 96 MiB."""
    return max(FLUSH_BYTES, 2 * last_cache_bytes())


def describe_machine() -> dict[str, str]:
    """What a table says about where it was measured."""
    environment = describe_environment()
    versions = environment["versions"]
    return {
        "processor": f"{processor()}, {environment['devices']['cpu']}",
        "tier": TIER,
        "cores": str(core_count()),
        "last_cache_mib": f"{last_cache_bytes() / 2**20:g}",
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("kvsketch", "numpy", "numba", "torch")),
    }
