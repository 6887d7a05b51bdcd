"""Palu (arXiv 2407.21118): caches of latents, the low-rank halves of key and value projections.

A projection's weight is factored once (:func:`factorise`), cut to a rank (:func:`allocate_ranks`) and perhaps rotated
(:func:`draw_rotation`, :func:`rotate`); a cache then holds latents instead of keys and values.
"""

from __future__ import annotations

from kvsketch._palu_factors import Factors, factorise
from kvsketch._palu_ranks import allocate_ranks
from kvsketch._palu_rotations import draw_rotation, has_hadamard, rotate

__all__ = ["Factors", "allocate_ranks", "draw_rotation", "factorise", "has_hadamard", "rotate"]
