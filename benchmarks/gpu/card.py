"""The GPU and its driver, asked for with nothing but Python: what ``make gpu`` looks at before it installs anything.

``python -m benchmarks.gpu.card`` prints the extra of kvsketch that fits the driver, ``cuda13`` or ``cuda12``.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

LIBRARY = "libcuda.so.1"
PROGRAM = "nvidia-smi"
#: Extras of kvsketch, by the CUDA version that they are for, newest first.
EXTRAS = {13: "cuda13", 12: "cuda12"}
#: ``CUDA Version: 13.0`` of nvidia-smi's heading, which newer ones word ``CUDA UMD Version``.
_VERSION = re.compile(r"CUDA (?:\w+ )?Version\s*:\s*(\d+)\.(\d+)")


class NoCard(Exception):
    """Why no GPU can be used."""


class Card(NamedTuple):
    """The first GPU, how many there are, and the newest CUDA that the driver runs."""

    name: str
    devices: int
    cuda: tuple[int, int]
    told_by: str

    @property
    def extra(self) -> str:
        """The extra of kvsketch to install; NoCard when the driver is too old for all of them."""
        for version, extra in EXTRAS.items():
            if self.cuda[0] >= version:
                return extra
        raise NoCard(
            f"the driver of {self.name} runs CUDA {self.cuda[0]}.{self.cuda[1]} at most, kvsketch needs "
            f"{min(EXTRAS)} or newer: install a newer driver"
        )


def find_card() -> Card:
    """The GPU that the driver's library tells of, or nvidia-smi where the library is not found; else NoCard."""
    reasons = []
    for ask in (_ask_library, _ask_program):
        try:
            return ask()
        except NoCard as reason:
            reasons.append(str(reason))
    raise NoCard("; ".join(reasons))


def _ask_library() -> Card:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        raise NoCard(f"the driver's library {LIBRARY} was not found") from None
    count, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("cuInit", (0,)),
        ("cuDriverGetVersion", (ctypes.byref(version),)),
        ("cuDeviceGetCount", (ctypes.byref(count),)),
    )
    for call, arguments in calls:
        status = getattr(library, call)(*arguments)
        if status:
            raise NoCard(f"{call} of {LIBRARY} failed with error {status}")
    if not count.value:
        raise NoCard(f"{LIBRARY} finds no device")
    library.cuDeviceGetName(name, len(name), 0)
    return Card(name.value.decode(), count.value, (version.value // 1000, version.value % 1000 // 10), LIBRARY)


def _ask_program() -> Card:
    if shutil.which(PROGRAM) is None:
        raise NoCard(f"{PROGRAM} was not found")
    names = run_program("--query-gpu=name", "--format=csv,noheader").splitlines()
    version = _VERSION.search(run_program())
    if not names or version is None:
        raise NoCard(f"{PROGRAM} names {len(names)} GPUs and no version of CUDA")
    return Card(names[0].strip(), len(names), (int(version[1]), int(version[2])), PROGRAM)


def run_program(*arguments: str) -> str:
    """What nvidia-smi prints; NoCard when it fails."""
    try:
        ended = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCard(f"{PROGRAM} does not answer ({error})") from None
    if ended.returncode:
        said = (ended.stdout + ended.stderr).strip().splitlines() or [f"exit code {ended.returncode}"]
        raise NoCard(f"{PROGRAM} failed: {said[0]}")
    return ended.stdout


def main() -> int:
    """Print the extra to install, and what was found to stderr; 1 when there is no GPU to use."""
    try:
        card = find_card()
        extra = card.extra
    except NoCard as reason:
        print(f"make gpu needs a machine with a CUDA GPU, and there is none here: {reason}.", file=sys.stderr)
        print("Nothing was installed. Without a GPU: python -m benchmarks gpu --dry-run", file=sys.stderr)
        return 1
    print(f"== {card.name}, driver for CUDA {card.cuda[0]}.{card.cuda[1]}: kvsketch[{extra}]", file=sys.stderr)
    print(extra)
    return 0


if __name__ == "__main__":
    sys.exit(main())
