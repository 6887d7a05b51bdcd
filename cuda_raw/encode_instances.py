"""The instantiations of all kernels but attention's: (file, name expression), threads and dynamic shared memory.

These are all that there are: launchers name no others. Where blocks differ in size, that of the largest one is here.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsketch._checks import BITS
from kvsketch.cuda_raw import bitpack, kivi, pages, qjl, rotation


class Launched(NamedTuple):
    """A kernel and its largest block."""

    file: str
    expression: str
    threads: int
    shared: int = 0  #: bytes of dynamic shared memory


ENCODE = (
    *(Launched(bitpack.FILE, name, bitpack.THREADS) for name in ("pack_signs", "pack_codes", "unpack_codes")),
    *(Launched(kivi.FILE, f, kivi.THREADS) for f in ("scale_tokens", "scale_channels", "quantize", "dequantize")),
    *(Launched(kivi.PRODUCTS, name, kivi.THREADS) for name in ("key_scores", "weighted_values", "join_splits")),
    *(Launched(pages.ENCODE, f"encode_by_{by}<{bits}>", pages.THREADS) for by in ("channel", "token") for bits in BITS),
    *(Launched(pages.DECODE, name, pages.THREADS) for name in ("decode_by_channel", "decode_by_token")),
    *(Launched(pages.EXACT, name, pages.THREADS) for name in ("encode_exact", "decode_exact")),
    Launched("pages_sketch.cu", "decode_sketch", qjl.THREADS),
    *(Launched("qjl.cu", name, qjl.TILE_ROWS) for name in ("sketch_pages", "sketch_vectors", "project_vectors")),
    Launched("qjl.cu", "round_norms", qjl.THREADS),
    Launched("qjl_scores.cu", "sketch_scores", qjl.THREADS),
    *(Launched("outliers.cu", name, qjl.THREADS) for name in ("sum_squares", "largest_channels", "split_outliers")),
    Launched(rotation.FILE, "transform_blocks", rotation.MOST_THREADS, 4 * rotation.MOST_THREADS * rotation.OCT),
    Launched(rotation.FILE, "transform_round", rotation.MOST_THREADS),
)
