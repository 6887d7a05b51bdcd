"""Which kernel on tensor cores attends over the pages of a layout, and what it costs.

A warp takes 32 tokens of a key/value head at a time. Instructions for 32 tokens of 128 channels are counted in the
machine code for sm_90. Beside them are the clocks that a quarter of a multiprocessor has, for one instruction each,
while the bytes come from memory at full speed (H200: 4.8 TB/s, 132 multiprocessors, 1.98 GHz; RTX 4090: 1.01 TB/s, 128
and 2.52 GHz). Nothing of this was measured on a GPU.

    pages                              query rows   bytes   instructions   clocks: H200   RTX 4090
    2-bit keys and values, g = 32            1..4    3072            626            669       3924
    2-bit keys and values, g = 32            5..8    3072            698            669       3924
    4-bit keys and values, g = 32            1..4    5120            692           1115       6541
    3-bit latents, one group a token         1..4    3328            875            725       4251
    sketch m = 256, 2-bit values             1..4    2624            564            572       3352
    the same and 8 outlier channels          1..4    3776           1067            822       4824

If three quarters of the clocks are used, which the 16 warps that registers leave room for (12 with outlier channels)
can be hoped to do, that is 80, 72, 100, 62, 76 and 58 % of the bandwidth of an H200 and all of an RTX 4090's, where
shared memory has room for 8 warps and the clocks are plenty.
Instructions of the integer units, every second clock at most, are below the clocks too, except for latents, which they
hold to 79 %, and outlier channels, to 95 %. Tensor cores have 42 or 84 steps in the first two lines.
``coefficients="int8"`` takes 517 instructions for 1..8 rows of 2-bit pages and 495 of sketches. Each outlier channel
that the page before did not have takes about 400 more.

More than eight query rows go to as many warps of a block as they need, which share pages in shared memory, so
that memory is read once for up to 128 rows (96 with outlier channels, 64 where values have more than 160 channels).

Relative L2 errors against float64 over the same pages, for data of ordinary kinds, as measured on a CPU:

- ``int16``: 5e-7 for integers, whose coefficients have 22 bits, and 6e-6 for sketches, whose S q has 16 bits;
- ``int8``: 4e-4 for integers (11 bits) and 4e-3 for sketches (8 bits).

Tensor cores cut sums off where the CPU rounds them. With that imitated (eight products at a time aligned to the largest
exponent and cut off one bit below float32's, as an A100 is reported to do), a query's error with int16 was up to 1e-6
for 1, 2 and 8 bits, 1e-5 for 4 bits, 4e-5 for 3 bits and 8e-6 for sketches.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsketch.cuda_raw.attention_plan import PageKernel, shared_limit
from kvsketch.layout import (
    KIND_EXACT,
    KIND_INTS,
    KIND_LATENTS,
    KIND_SKETCH,
    LANES,
    PageLayout,
    SideSpec,
    unit_bytes,
    unit_rows,
)

FILE = "attention_mma.cu"
#: What the kernels need, asynchronous copies and m16n8k16, came with 8.0.
FIRST_ARCHITECTURE = 80
#: Channels of keys and of values, rows of sketches and outlier channels that kernels have registers and columns for.
MOST_CHANNELS, MOST_SKETCH_ROWS, MOST_OUTLIERS = 256, 1024, 8
#: Columns of an operand: query rows, or twice as many as query rows where each has a second one for what is left of
#: rounding.
COLUMNS = 8
#: Warps of a block that take turns with pages.
WARPS = 4
#: A lane's 16 bytes, of a warp.
LANE_BYTES = 16 * LANES
#: struct Exchange of mma_exchange.cuh: sums of 32 tokens, padded, and one more number, in columns.
EXCHANGE_BYTES = 4 * COLUMNS * (LANES + 4 + 1)
#: struct QueryRow of mma_queries.cuh.
ROW_BYTES = 8
#: struct OutlierColumns of mma_outlier_keys.cuh.
OUTLIER_COLUMNS_BYTES = 160
#: Rows of a sketch in a chunk of SketchKeys, and its bytes; bytes of 32 norms, scales or zeros.
SKETCH_CHUNK, SKETCH_CHUNK_BYTES, HALVES_BYTES = 64, 256, 2 * LANES


class Keys(NamedTuple):
    """A key codec of the kernels, and bytes of shared memory."""

    name: str
    tile: int  #: of 32 tokens
    page: int  #: of what they have once a page
    team: int  #: of what is kept for all pages
    query: int  #: of an operand of coefficients, were each one part
    query_extra: int  #: and of what does not depend on their parts
    exchanges: int  #: how many numbers a warp exchanges


class Values(NamedTuple):
    """A value codec of the kernels."""

    name: str
    tile: int  #: bytes of shared memory of 32 tokens
    blocks: int  #: of 32 channels
    parts: int  #: with scales of their own


def _divide(n: int, step: int) -> int:
    return -(-n // step)


def _chunk_bytes(bits: int) -> int:
    """Bytes of 32 lanes by 32 rows of codes."""
    return LANES // unit_rows(bits) * unit_bytes(bits)


def key_codec(keys: SideSpec) -> Keys | str:
    """The codec of mma_*_keys.cuh for a key side, or the reason why there is none."""
    chunks = _divide(keys.width, LANES)
    codes, query = chunks * _chunk_bytes(keys.bits or 1), chunks * LANE_BYTES
    if keys.kind == KIND_EXACT:
        return "keys are exact"
    if keys.width > MOST_CHANNELS:
        return f"keys have {keys.width} channels, more than {MOST_CHANNELS}"
    if keys.kind == KIND_INTS:
        return Keys(f"IntKeys<{keys.bits}, {chunks}>", codes, 2 * chunks * HALVES_BYTES, 0, query, 0, 1)
    if keys.kind == KIND_LATENTS:
        if keys.groups > 1 and keys.group % LANES:
            return f"groups of {keys.group} channels of a token's keys are not whole blocks of {LANES}"
        name = f"LatentKeys<{keys.bits}, {chunks}>"
        return Keys(name, codes + 2 * chunks * HALVES_BYTES, 0, 0, query, 4 * COLUMNS * chunks, 1)
    assert keys.kind == KIND_SKETCH
    if max(keys.m, keys.outlier_m) > MOST_SKETCH_ROWS:
        return f"the sketch has {max(keys.m, keys.outlier_m)} rows, more than {MOST_SKETCH_ROWS}"
    if keys.outliers > MOST_OUTLIERS:
        return f"there are {keys.outliers} outlier channels, more than {MOST_OUTLIERS}"
    chunks, outer = _divide(keys.m, SKETCH_CHUNK), _divide(keys.outlier_m, SKETCH_CHUNK)
    tile, query = chunks * SKETCH_CHUNK_BYTES + HALVES_BYTES, chunks * LANE_BYTES
    if not keys.outliers:
        return Keys(f"SketchKeys<{chunks}>", tile, 0, 0, query, 0, 1)
    tile += outer * SKETCH_CHUNK_BYTES + HALVES_BYTES + 16
    kept = 2 * (chunks + outer) * LANE_BYTES + OUTLIER_COLUMNS_BYTES
    return Keys(f"OutlierSketchKeys<{chunks}, {outer}>", tile, 0, kept, query, 0, 2)


def value_codec(values: SideSpec) -> Values | str:
    """The codec of mma_int_values.cuh for a value side, or the reason why there is none."""
    if values.kind == KIND_EXACT:
        return "values are exact"
    if values.width > MOST_CHANNELS:
        return f"values have {values.width} channels, more than {MOST_CHANNELS}"
    blocks = _divide(values.width, LANES)
    whole = values.groups == 1 or values.group % LANES == 0
    parts = blocks if whole else 4 * blocks
    name = f"IntValues<{values.bits}, {blocks}, {'true' if whole else 'false'}, {values.tokens // LANES}>"
    return Values(name, blocks * _chunk_bytes(values.bits) + 2 * parts * HALVES_BYTES, blocks, parts)


def most_warps(keys: Keys, values: Values) -> int:
    """Warps that a block may have, as MOST_THREADS in attention_mma.cu."""
    if values.blocks + _divide(values.parts, 8) > 6:
        return 8
    return 12 if keys.exchanges > 1 else 16


def shared_bytes(keys: Keys, values: Values, rest: str, warps: int, *, block: bool) -> int:
    """Bytes of dynamic shared memory of a block of that many warps."""
    rows = COLUMNS // 2 if rest == "BY_COLUMN" else COLUMNS
    operands, teams = (warps, 1) if block else (1, warps)
    # A sketch's columns hold bytes, of which a second part of a coefficient takes as many only where it has none.
    second = rest == "BY_PRODUCT" if "Sketch" in keys.name else rest != "NONE"
    queries = operands * (keys.query * (2 if second else 1) + keys.query_extra + ROW_BYTES * rows)
    buffers = teams * (2 * (keys.tile + values.tile + keys.page) + keys.team)
    parts = warps * 4 * rows * (LANES * values.blocks + 8 * _divide(values.parts, 8) + 4 + 2)
    return queries + warps * keys.exchanges * EXCHANGE_BYTES + max(buffers, parts)


def page_kernel(layout: PageLayout, queries: int, architecture: int, coefficients: str) -> PageKernel | str:
    """The kernel for `queries` rows of Q that rounds to `coefficients`, or the reason why there is none."""
    if architecture < FIRST_ARCHITECTURE:
        return f"the architecture is {architecture}, the kernels on tensor cores are for {FIRST_ARCHITECTURE} and later"
    keys, values = key_codec(layout.keys.spec), value_codec(layout.values.spec)
    if isinstance(keys, str):
        return keys
    if isinstance(values, str):
        return values
    few = queries <= COLUMNS // 2
    rest = "NONE" if coefficients == "int8" else "BY_COLUMN" if few else "BY_PRODUCT"
    block = queries > COLUMNS
    warps = min(most_warps(keys, values), _divide(queries, COLUMNS)) if block else WARPS
    while shared_bytes(keys, values, rest, warps, block=block) > shared_limit(architecture):
        warps //= 2
        if not warps:
            least = shared_bytes(keys, values, rest, 1, block=block)
            return f"a block takes {least} bytes of shared memory, but has {shared_limit(architecture)}"
    tiles = layout.page_tokens // LANES
    expression = f"attend_pages_mma<{keys.name}, {values.name}, {tiles}, {rest}, {'true' if block else 'false'}>"
    rows = (COLUMNS // 2 if rest == "BY_COLUMN" else COLUMNS) * (warps if block else 1)
    step = layout.page_tokens * (1 if block else warps)
    shared = shared_bytes(keys, values, rest, warps, block=block)
    return PageKernel("mma", FILE, expression, rows, LANES * warps, shared, step)
