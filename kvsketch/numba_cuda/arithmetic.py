"""Numbers in kernels: products that are rounded, and 16-bit floats as the bits that they are stored as.

A compiler fuses a product and a sum into one instruction that rounds once, and ``cuda.jit`` has no option against it.
Where bits must be those of other engines, kernels call :func:`product`, which is always rounded on its own. Sums,
quotients and square roots are rounded as IEEE 754 says, because nothing here is compiled with ``fastmath``.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import libdevice

from kvsketch.numba_cuda._launch import SIMULATED

LARGEST_HALF = np.float32(65504)
LARGEST_FLOAT = np.finfo(np.float32).max
INFINITY = np.float32(np.inf)
#: Bits of the NaN that is stored: the one that NumPy makes.
HALF_NAN, BFLOAT_NAN = 0x7E00, 0x7FC0

if SIMULATED:

    def product(a, b):
        """``a * b``, rounded."""
        return a * b

    def nearest(x):
        """The integer nearest to `x`, halves to even."""
        return np.rint(x)

    def read_half(bits):
        """The float16 of these bits, in float32."""
        return np.float32(np.uint16(bits).view(np.float16))

    def _round_to_half(x):
        return np.float16(x).view(np.uint16)

else:

    @cuda.jit(device=True)
    def product(a, b):
        """``a * b``, rounded."""
        return libdevice.fmul_rn(a, b)

    @cuda.jit(device=True)
    def nearest(x):
        """The integer nearest to `x`, halves to even."""
        return libdevice.rintf(x)

    @cuda.jit(device=True)
    def read_half(bits):
        """The float16 of these bits, in float32."""
        return libdevice.half2float(np.int16(bits))

    @cuda.jit(device=True)
    def _round_to_half(x):
        return np.uint16(libdevice.float2half_rn(x))


@cuda.jit(device=True)
def write_half(x):
    """Bits of `x` rounded to float16."""
    return np.uint16(HALF_NAN) if x != x else _round_to_half(x)


@cuda.jit(device=True)
def read_bfloat(bits):
    """The bfloat16 of these bits, in float32, whose upper half it is."""
    return np.uint32(np.int64(bits) << 16).view(np.float32)


@cuda.jit(device=True)
def write_bfloat(x):
    """Bits of `x` rounded to bfloat16, halves to even."""
    if x != x:
        return np.uint16(BFLOAT_NAN)
    bits = np.int64(np.float32(x).view(np.uint32))
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@cuda.jit(device=True)
def same(x):
    """A float32, to be read or written as it is."""
    return x


#: How kernels read a number of an array of each dtype as float32, and round a float32 to write it.
READ = {"float32": same, "float16": read_half, "bfloat16": read_bfloat}
WRITE = {"float32": same, "float16": write_half, "bfloat16": write_bfloat}
