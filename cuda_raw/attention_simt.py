"""Which kernel without tensor cores attends over the pages of a layout: there is one for every layout.

What it costs, counted in the source, of instructions of one lane: 16 codes that four queries are multiplied with take 3
loads, 7 to cut them out, 16 for scales and zeros, 32 to make numbers of them and 17 a query, 126 in all; signs have no
scales, 107. A token of a head with 128 channels and 2-bit keys and values, 96 bytes, is 2016 and about 100 more for the
softmax of four queries. An H200 issues 3.1e13 of them a second, enough for 1.4 TB/s or 29 % of its memory; an RTX 4090
for 1.9 TB/s, twice its memory; a T4, whose float32 units are the limit, for 240 of 320 GB/s. One query takes 75 instead
of 126. More than four queries are taken in tiles of four, of which each reads the cache, in turn and so from the L2.
"""

from __future__ import annotations

from functools import lru_cache

from kvsketch.cuda_raw.attention_plan import PageKernel, shared_limit
from kvsketch.layout import KIND_EXACT, KIND_LATENTS, KIND_SKETCH, LANES, PageLayout, SideSpec

#: Rows of Q that a block takes; with more of them it would want more registers than leave room for other blocks.
TILES = (1, 4)
#: C++ types of numbers, by kvsketch.layout.DTYPE_CODES.
NUMBERS = ("float", "__half", "__nv_bfloat16")
#: Warps of a block: each mixes 32 channels of the values.
WARPS = (8, 16)


def key_codec(keys: SideSpec) -> str:
    """C++ name of a key side's codec, see keys_simt.cuh."""
    if keys.kind == KIND_EXACT:
        return f"ExactKeys<{NUMBERS[keys.dtype]}>"
    if keys.kind == KIND_SKETCH:
        return "SketchKeys"
    return f"{'TokenIntKeys' if keys.kind == KIND_LATENTS else 'IntKeys'}<{keys.bits}>"


def value_codec(values: SideSpec) -> str:
    """C++ name of a value side's codec, see values_simt.cuh."""
    return f"ExactValues<{NUMBERS[values.dtype]}>" if values.kind == KIND_EXACT else f"IntValues<{values.bits}>"


def key_pitch(keys: SideSpec, *, exact: bool = False) -> int:
    """Numbers of a query that scores are made from, padded as Key::pitch in keys_simt.cuh has it."""
    if exact or keys.kind == KIND_EXACT:
        return _round_up(keys.width, 4)
    if keys.kind == KIND_SKETCH:
        return _round_up(keys.m, 16)
    return _round_up(keys.width, LANES) if keys.kind == KIND_LATENTS else keys.rows


def sketch_widths(keys: SideSpec) -> tuple[int, int]:
    """Columns of S q and of the outlier channels' projection, padded with zeros; 0 for none."""
    if keys.kind != KIND_SKETCH:
        return 0, 0
    return _round_up(keys.m, 16), _round_up(keys.outlier_m, 16)


def block_shape(layout: PageLayout, queries: int, architecture: int, *, exact: bool = False) -> tuple[int, int, int]:
    """Rows of Q, warps and bytes of dynamic shared memory of a block of attend_run.

    ValueError where a head's numbers do not fit.
    """
    keys, dv = layout.keys.spec, layout.values.width
    warps = next((n for n in WARPS if dv <= LANES * n), None)
    if warps is None:
        raise ValueError(
            f"the values have {dv} channels, but the kernels take at most {LANES * WARPS[-1]}; "
            "give engine='reference', which takes any number"
        )
    room = 0 if exact or not keys.outliers else warps * max(sketch_widths(keys))
    numbers = key_pitch(keys, exact=exact) + 2 * LANES * warps + room
    fitting = [tile for tile in TILES if 4 * tile * numbers <= shared_limit(architecture)]
    if not fitting:
        raise ValueError(
            f"keys of {layout.keys.codec} with {keys.width} channels take {4 * numbers} bytes of shared memory a "
            f"query, but a block has {shared_limit(architecture)}; give engine='reference', which takes any number"
        )
    tile = next((n for n in fitting if n >= queries), fitting[-1])
    return tile, warps, 4 * tile * numbers


def page_kernel(layout: PageLayout, queries: int, architecture: int) -> PageKernel:
    """The kernel for `queries` rows of Q."""
    tile, warps, shared = block_shape(layout, queries, architecture)
    codecs = f"{key_codec(layout.keys.spec)}, {value_codec(layout.values.spec)}"
    expression = f"attend_pages_simt<{codecs}, {tile}, {warps}>"
    return PageKernel("simt", "attention_simt.cu", expression, tile, LANES * warps, shared, LANES * warps)


@lru_cache(maxsize=1024)
def exact_kernel(layout: PageLayout, queries: int, architecture: int) -> PageKernel:
    """The kernel over exact tokens, which has a signature of its own."""
    tile, warps, shared = block_shape(layout, queries, architecture, exact=True)
    numbers = f"{NUMBERS[layout.keys.spec.dtype]}, {NUMBERS[layout.values.spec.dtype]}"
    expression = f"attend_exact<{numbers}, {tile}, {warps}>"
    return PageKernel("simt", "attention_exact.cu", expression, tile, LANES * warps, shared, LANES * warps)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
