"""The CPU engine: the same operations in Numba, compiled for a tier that is settled before its modules are loaded."""

from kvsketch.numba_cpu import _tiers as _tiers
