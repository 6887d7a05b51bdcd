"""Theoretical occupancy: how many warps of a multiprocessor's a kernel's registers, shared memory and blocks allow.

The arithmetic and its figures are those of NVIDIA's calculator, cuda_occupancy.h of CUDA 13.0, with all of the L1 that
can be shared memory being that; limits of a multiprocessor are from the table "Technical Specifications per Compute
Capability" of the CUDA C++ Programming Guide 13.0.
"""

from __future__ import annotations

from typing import NamedTuple

LANES = 32
#: Registers of a multiprocessor, which are four files of as many, and most registers of a block.
REGISTERS, FILES, BLOCK_REGISTERS = 65536, 4, 65536
#: A warp gets registers in multiples of this.
REGISTER_UNIT = 256
#: Most threads of a block.
MOST_THREADS = 1024


class Limits(NamedTuple):
    """What a multiprocessor has."""

    warps: int
    blocks: int
    shared: int  #: bytes of shared memory for all blocks
    block_shared: int  #: bytes that a block may ask for
    reserved: int  #: bytes that the system takes of every block
    shared_unit: int  #: a block gets shared memory in multiples of this


LIMITS = {
    75: Limits(32, 16, 64 << 10, 64 << 10, 0, 256),
    80: Limits(64, 32, 164 << 10, 163 << 10, 1024, 128),
    86: Limits(48, 16, 100 << 10, 99 << 10, 1024, 128),
    89: Limits(48, 24, 100 << 10, 99 << 10, 1024, 128),
    90: Limits(64, 32, 228 << 10, 227 << 10, 1024, 128),
    100: Limits(64, 32, 228 << 10, 227 << 10, 1024, 128),
    120: Limits(48, 24, 100 << 10, 99 << 10, 1024, 128),
}


class Occupancy(NamedTuple):
    """Blocks and warps that a multiprocessor holds at a time, what share of its warps that is, and what limits it."""

    blocks: int
    warps: int
    share: float
    limit: str  #: ``"warps"``, ``"registers"``, ``"shared memory"`` or ``"blocks"``, the first one of several


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def occupancy(architecture: int, *, registers: int, shared: int, threads: int) -> Occupancy:
    """Occupancy of blocks of `threads` threads with so many `registers` each and `shared` bytes, static and dynamic.

    No block is held where one asks for more than there is.
    """
    limits = LIMITS[architecture]
    block_warps = -(-threads // LANES)
    warp_registers = _round_up(registers * LANES, REGISTER_UNIT)
    block_shared = _round_up(shared + limits.reserved, limits.shared_unit)
    held = {
        "warps": limits.warps // block_warps,
        "registers": REGISTERS // FILES // warp_registers * FILES // block_warps,
        "shared memory": limits.shared // max(block_shared, 1),
        "blocks": limits.blocks,
    }
    if warp_registers * _round_up(block_warps, FILES) > BLOCK_REGISTERS:
        held["registers"] = 0
    if shared > limits.block_shared:
        held["shared memory"] = 0
    if threads > MOST_THREADS:
        held["warps"] = 0
    limit = min(held, key=lambda name: held[name])
    blocks = held[limit]
    return Occupancy(blocks, blocks * block_warps, blocks * block_warps / limits.warps, limit)
