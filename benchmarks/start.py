"""What the first use of a kernel costs: in a process that compiles it, and in one that finds it on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

#: Imports, then appends, encodes and attends once with each method given; prints seconds of both as JSON.
_PROGRAM = """
import json, sys, time
start = time.perf_counter()
import numpy as np
from kvsketch.methods import get_method
from kvsketch import Cache
import kvsketch.numba_cpu.attention
imported = time.perf_counter()
x = np.ones((1, 2, 128, 64), np.float32)
for name in sys.argv[1:]:
    settings = get_method(name).for_layer(31, 32)
    cache = Cache(settings.keys, settings.values, residual_length=32, sink_tokens=4)
    cache.append(x, x)
    cache.flush()
    cache.attend(x[:, :, :1])
print(json.dumps({"imports": imported - start, "first_use": time.perf_counter() - imported}))
"""


class Start(NamedTuple):
    """Seconds of one process: all of it, of that imports, and append, encode and attend for the first time."""

    process: int
    methods: str
    total: float
    imports: float
    first_use: float


def measure_start(methods: tuple[str, ...] = ("kivi-2",), *, processes: int = 3) -> list[Start]:
    """The first process compiles into an empty folder, the later ones load what it left there."""
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        for process in range(1, processes + 1):
            begin = time.perf_counter()
            command = [sys.executable, "-c", _PROGRAM, *methods]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
            total = time.perf_counter() - begin
            if ended.returncode:
                raise RuntimeError(f"a process that uses {methods} for the first time failed:\n{ended.stderr}")
            starts.append(Start(process, ", ".join(methods), total, **json.loads(ended.stdout)))
    return starts


def measure_import(module: str = "kvsketch") -> float:
    """Seconds that a new process takes to import a module."""
    program = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    return float(ended.stdout)
