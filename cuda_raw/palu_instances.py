"""The instantiations of the kernels over latents, all that there are: (file, name expression)."""

from __future__ import annotations

from itertools import product

from kvsketch.cuda_raw.attention_simt import NUMBERS
from kvsketch.cuda_raw.palu_plan import FIRST_FILE, MMA_FILE, PREPARE_FILE, SIMT_FILE

#: Bytes that latents of keys, of values, and numbers of the matrix are on tensor cores.
MMA = tuple(product((1, 2), (1, 2), (2, 1)))

PALU = (
    *((MMA_FILE, f"attend_latents_mma<{keys}, {values}, {matrix}>") for keys, values, matrix in MMA),
    *((SIMT_FILE, f"attend_latents_simt<{rebuild}>") for rebuild in ("true", "false")),
    *((PREPARE_FILE, f"pack_matrix<{planes}>") for planes in (1, 2)),
    (PREPARE_FILE, "split_queries"),
    *((FIRST_FILE, f"join_first<{number}>") for number in NUMBERS),
)
