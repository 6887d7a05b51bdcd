"""The instantiations of attention's kernels that tests execute and compile: (file, name expression).

Codecs of keys and of values do not depend on one another, nor on how many query rows and warps a block has, so each is
here in some combination rather than every one; any other is compiled when it is first used, and tested by the slow
tests.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsketch.cuda_raw.attention_simt import NUMBERS


class Simt(NamedTuple):
    """Arguments of attend_pages_simt."""

    keys: str
    values: str
    queries: int
    warps: int = 8


SIMT = (
    Simt("IntKeys<1>", "IntValues<8>", 4),
    Simt("IntKeys<2>", "IntValues<2>", 4),
    Simt("IntKeys<3>", "IntValues<3>", 1),
    Simt("IntKeys<4>", "IntValues<4>", 1),
    Simt("IntKeys<8>", "IntValues<1>", 4),
    Simt("TokenIntKeys<1>", "IntValues<1>", 1),
    Simt("TokenIntKeys<2>", "IntValues<2>", 4),
    Simt("TokenIntKeys<3>", "IntValues<3>", 4),
    Simt("TokenIntKeys<4>", "ExactValues<float>", 1),
    Simt("TokenIntKeys<8>", "IntValues<8>", 4),
    Simt("ExactKeys<float>", "IntValues<4>", 4),
    Simt("ExactKeys<__half>", "ExactValues<__half>", 4),
    Simt("ExactKeys<__nv_bfloat16>", "ExactValues<__nv_bfloat16>", 4),
    Simt("SketchKeys", "IntValues<2>", 4),
    Simt("SketchKeys", "IntValues<4>", 1, 16),
)
#: Number type of exact tokens, rows of queries and warps.
EXACT = (*((number, 4, 8) for number in NUMBERS), ("float", 1, 8), ("float", 1, 16))

ATTENTION = (
    *(("attention_simt.cu", f"attend_pages_simt<{', '.join(map(str, simt))}>") for simt in SIMT),
    *(("attention_exact.cu", f"attend_exact<{number}, {number}, {q}, {warps}>") for number, q, warps in EXACT),
    *(("attention_combine.cu", name) for name in ("prepare_queries", "sketch_queries", "combine_splits")),
)
