"""The instantiations of the kernels over latents that tests execute and compile: (file, name expression).

All but three of the kernels on tensor cores; these are compiled when they are first used, and tested by the slow tests.
"""

from __future__ import annotations

from kvsketch.cuda_raw.palu_plan import FIRST_FILE, MMA_FILE, PREPARE_FILE, SIMT_FILE

#: Bytes that latents of keys, of values, and numbers of the matrix are on tensor cores: every two of them together, and
#: exact latents of both sides with each matrix.
MMA = ((1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 2), (2, 2, 1))

PALU = (
    *((MMA_FILE, f"attend_latents_mma<{keys}, {values}, {matrix}>") for keys, values, matrix in MMA),
    *((SIMT_FILE, f"attend_latents_simt<{rebuild}>") for rebuild in ("true", "false")),
    *((PREPARE_FILE, f"pack_matrix<{planes}>") for planes in (1, 2)),
    (PREPARE_FILE, "split_queries"),
    (FIRST_FILE, "join_first"),
)
