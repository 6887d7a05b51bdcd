"""Walsh-Hadamard transform in plain array calls."""

from __future__ import annotations

import math
from typing import Any

from kvsketch._dispatch import namespace
from kvsketch.rotation import hadamard_block


def hadamard_transform(x: Any) -> Any:
    xp = namespace(x)
    *lead, d = x.shape
    block = hadamard_block(d)
    y = x.astype(xp.float32)
    half = 1
    while half < block:
        pairs = y.reshape(*lead, d // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = xp.stack([first + second, first - second], axis=-2)
        half *= 2
    return (y.reshape(x.shape) * xp.float32(1 / math.sqrt(block))).astype(x.dtype)
