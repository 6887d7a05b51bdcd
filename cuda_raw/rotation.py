"""Walsh-Hadamard transform on a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.cuda_raw import _places
from kvsketch.cuda_raw._compile import launch
from kvsketch.cuda_raw._places import on_its_device
from kvsketch.layout import DTYPE_CODES
from kvsketch.rotation import hadamard_block

FILE = "rotation.cu"
#: Threads of a block, fewest and most, and numbers of a thread.
FEWEST_THREADS, MOST_THREADS, OCT = 128, 1024, 8


@on_its_device
def hadamard_transform(x: Any) -> Any:
    xp = namespace(x)
    block = hadamard_block(x.shape[-1])
    y = xp.empty(x.shape, x.dtype)
    if not x.size:
        return y
    x = xp.ascontiguousarray(x)
    scale, inside = np.float32(1 / math.sqrt(block)), min(block, MOST_THREADS * OCT)
    # Every round but the last, which also scales, gives float32.
    rounds = [inside << i for i in range((block // inside).bit_length() - 1)]
    out = xp.empty(x.shape, np.float32) if rounds else y
    threads = max(FEWEST_THREADS, inside // OCT)
    floats = threads * OCT if inside > 32 * OCT else 0
    args = (
        *(x, np.int32(_places.dtype_code(x)), out, np.int32(_places.dtype_code(out)), np.int64(x.size)),
        *(np.int32(inside), np.float32(1) if rounds else scale, np.int32(x.data.ptr % _places.VECTOR_BYTES == 0)),
    )
    grid = (_places.blocks_of(x.size, threads * OCT),)
    launch(FILE, "transform_blocks", grid, (threads,), args, shared=4 * floats)
    for apart in rounds:
        last = apart == rounds[-1]
        source, out = out, y if last else xp.empty(x.shape, np.float32)
        code = _places.dtype_code(out) if last else DTYPE_CODES["float32"]
        pairs = (source, out, np.int32(code), np.int64(x.size), np.int64(apart), scale if last else np.float32(1))
        grid = (_places.blocks_of(x.size // 2, MOST_THREADS),)
        launch(FILE, "transform_round", grid, (MOST_THREADS,), pairs)
    return y
