"""What is there: the card, its driver, CUDA, CuPy and torch as they say themselves, and ``kvsketch info``."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.card import PROGRAM, NoCard, find_card, run_program
from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import Findings
from kvsketch.environment import describe_environment

#: What nvidia-smi is asked for.
QUERIES = (
    *("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit"),
    *("ecc.mode.current", "utilization.gpu"),
)
#: Attributes of the device, as CuPy calls them.
ATTRIBUTES = ("MultiProcessorCount", "L2CacheSize", "MaxSharedMemoryPerBlockOptin", "ClockRate", "MemoryClockRate")


#: What CuPy is asked, by what it is called in the table.
CUPY_FACTS: dict[str, Callable[[Any], str]] = {
    "device": lambda cupy: str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()),
    "compute capability": lambda cupy: str(cupy.cuda.Device(0).compute_capability),
    "attributes": lambda cupy: _attributes(cupy.cuda.Device(0).attributes),
    "memory": lambda cupy: "{:.1f} GB free of {:.1f}".format(*(x / 1e9 for x in cupy.cuda.runtime.memGetInfo())),
    "CUDA of the driver": lambda cupy: _version(cupy.cuda.runtime.driverGetVersion()),
    "CUDA runtime of CuPy": lambda cupy: _version(cupy.cuda.runtime.runtimeGetVersion()),
    "NVRTC": lambda cupy: ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
    "CuPy": lambda cupy: str(cupy.__version__),
}


def measure(findings: Findings, device: Device | None) -> None:
    """Note it all; what cannot be told is said to be so, and harms nothing else."""
    facts = findings.facts
    facts["GPU"] = _told(_card_text)
    facts["nvidia-smi"] = _told(_smi_text)
    for name, ask in CUPY_FACTS.items():
        facts[name] = _told(partial(_ask_cupy, ask))
    facts["torch"] = _told(_torch_text)
    facts["cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    facts["commit"] = _told(_commit)
    findings.table("The machine", ("what", "told"), list(facts.items()))
    lines = []
    for heading, entries in describe_environment().items():
        for name, text in entries.items():
            facts[f"{heading}: {name}"] = text
            lines.append((f"{heading}: {name}", text))
    findings.table("kvsketch info", ("what", "told"), lines)


def _told(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:
        return f"not told ({type(error).__name__}: {error})"


def _ask_cupy(ask: Callable[[Any], str]) -> str:
    return ask(importlib.import_module("cupy"))


def _card_text() -> str:
    card = find_card()
    return f"{card.name}, {card.devices} of them, driver for CUDA {card.cuda[0]}.{card.cuda[1]} (by {card.told_by})"


def _smi_text() -> str:
    if shutil.which(PROGRAM) is None:
        raise NoCard(f"{PROGRAM} was not found")
    return run_program(f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader").strip()


def _attributes(attributes: Any) -> str:
    return ", ".join(f"{name} {attributes[name]}" for name in ATTRIBUTES if name in attributes)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _torch_text() -> str:
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{torch.__version__}, CUDA {torch.version.cuda}, {gpu}"


def _commit() -> str:
    """The commit that is measured, and whether files differ from it."""
    root = Path(__file__).parents[2]
    answers = [
        subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    return f"{answers[0]}{', with changes' if answers[1] else ''}"
