"""Which kernels attend over latents, and what they are launched with."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvsketch.cuda_raw.attention_plan import Splits, plan_splits, shared_limit
from kvsketch.layout import KIND_EXACT, LANES, PageLayout, SideSpec

#: struct Rebuild of palu.cuh.
REBUILD = np.dtype(
    [
        ("longest", np.int64),
        ("eps", np.float32),
        *((name, np.int32) for name in ("heads", "d", "blocks", "turned", "rotary", "interleaved")),
        *((name, np.int32) for name in ("has_bias", "has_norm", "whole", "skips", "exact", "groups")),
    ],
    align=True,
)
#: struct FirstTokens of palu_first.cu.
FIRST = np.dtype(
    [(name, np.int32) for name in ("room", "d", "dv", "heads", "key_dtype", "value_dtype", "out_dtype")], align=True
)

PREPARE_FILE, FIRST_FILE = "palu_prepare.cu", "palu_first.cu"
SIMT_FILE, SIMT_THREADS, SIMT_QUERIES = "palu_simt.cu", 128, 32
#: Channels of 32 latents that a block without tensor cores holds at most.
SIMT_CHANNELS = 256
MMA_FILE, MMA_THREADS, MMA_WARPS = "palu_mma.cu", 256, 8
#: The first architecture whose tensor cores multiply bfloat16 numbers and 32 bytes at a time.
MMA_ARCHITECTURE = 80
#: Bytes that a number of the matrix, or a softmax weight, is rounded to.
PLANES = {"int16": 2, "int8": 1}
#: Tokens of a tile, in 32s: the more, the fewer times the matrix is read. Warps that these leave over take other heads.
GROUPS = (8, 4, 2, 1)
SCORE_PAD = 4


class Keys(NamedTuple):
    """What latents are scored as, see struct Rebuild in palu.cuh: `heads` keys of `d` channels, or as they are.

    `whole` is the latter: there is one head then, and `d` counts the query rows.
    """

    heads: int
    d: int
    rotary: int = 0
    interleaved: bool = False
    whole: bool = False
    norm: bool = False

    @property
    def turned(self) -> int:
        """Blocks of 32 columns that RoPE turns."""
        return _divide(self.rotary, LANES)

    @property
    def blocks(self) -> int:
        """Blocks of 32 columns of a head."""
        return self.turned + _divide(self.d - self.rotary, LANES)


class LatentKernel(NamedTuple):
    """A kernel over latents, of pages or of exact tokens, and how it is launched."""

    level: str  #: ``"simt"``, or ``"mma"`` for tensor cores
    file: str
    expression: str
    threads: int
    heads: int  #: blocks that a split's heads are taken by
    tiles: int  #: blocks that a head's queries are taken by
    shared: int  #: bytes of dynamic shared memory
    groups: int  #: tokens that a block takes at a time, in 32s
    room: int  #: channels of them that it holds; 0: all
    planes: int  #: bytes of a number of the matrix; 0: float32

    @property
    def tokens(self) -> int:
        """Tokens that a block takes at a time: splits are multiples of it."""
        return LANES * self.groups


def _divide(n: int, step: int) -> int:
    return -(-n // step)


def _round_up(n: int, step: int) -> int:
    return _divide(n, step) * step


@lru_cache(maxsize=4096)
def chosen_kernel(
    layout: PageLayout,
    keys: Keys,
    queries: int,
    architecture: int,
    coefficients: str = "int16",
    *,
    exact: bool = False,
    most_groups: int = GROUPS[0],
) -> tuple[LatentKernel, str]:
    """The kernel over pages, or over `exact` latents, with `queries` rows of all heads; and why not on tensor cores.

    A tile of tokens has at most `most_groups` groups of 32.
    """
    kernel = mma_kernel(layout, keys, queries, architecture, coefficients, exact=exact, most_groups=most_groups)
    if isinstance(kernel, LatentKernel):
        return kernel, ""
    return simt_kernel(layout, keys, queries, architecture), kernel


def simt_kernel(layout: PageLayout, keys: Keys, queries: int, architecture: int) -> LatentKernel:
    """The kernel without tensor cores, which takes every shape."""
    width = max(layout.keys.width, layout.values.width)
    fixed = 4 * (SIMT_THREADS * SIMT_QUERIES)
    fitting = (shared_limit(architecture) - fixed) // (4 * (LANES + 1)) // LANES * LANES
    room = min(_round_up(width, LANES), SIMT_CHANNELS, fitting)
    name = f"attend_latents_simt<{'false' if keys.whole else 'true'}>"
    tiles = _divide(queries // keys.heads, SIMT_QUERIES)
    shared = fixed + 4 * (LANES + 1) * room
    return LatentKernel("simt", SIMT_FILE, name, SIMT_THREADS, keys.heads, tiles, shared, 1, room, 0)


def side_planes(spec: SideSpec, *, exact: bool = False) -> int:
    """Bytes that a latent is on tensor cores: codes of tokens with one group stay as they are."""
    return 2 if exact or spec.kind == KIND_EXACT or spec.groups > 1 else 1


def mma_kernel(
    layout: PageLayout,
    keys: Keys,
    queries: int,
    architecture: int,
    coefficients: str,
    *,
    exact: bool,
    most_groups: int = GROUPS[0],
) -> LatentKernel | str:
    """The kernel on tensor cores, or the reason why there is none."""
    if architecture < MMA_ARCHITECTURE:
        return f"compute capability {architecture / 10} has no tensor cores for bfloat16"
    of_keys, of_values = (side_planes(side.spec, exact=exact) for side in (layout.keys, layout.values))
    planes, limit = PLANES[coefficients], shared_limit(architecture)
    widths = max(of_keys * _round_up(layout.keys.width, LANES), of_values * _round_up(layout.values.width, LANES))
    norm_heads = keys.heads if keys.norm else 0
    # One plane of each side leaves registers for two blocks on a multiprocessor, which hide each other's waiting.
    limits = (limit // 2, limit) if of_keys + of_values == 2 else (limit,)
    for most_bytes in limits:
        for groups in GROUPS:
            shared = shared_bytes(groups, widths, queries, planes, norm_heads)
            if groups <= most_groups and shared <= most_bytes:
                name = f"attend_latents_mma<{of_keys}, {of_values}, {planes}>"
                return LatentKernel("mma", MMA_FILE, name, MMA_THREADS, 1, 1, shared, groups, 0, planes)
    return (
        f"32 latents of {layout.keys.width} and {layout.values.width} numbers and the scores of {queries} queries take "
        f"{shared} bytes of shared memory, a block has {limit}"
    )


def shared_bytes(groups: int, widths: int, queries: int, planes: int, norm_heads: int) -> int:
    """Bytes of struct Room in palu_mma.cu, whose latents are `widths` bytes a token."""
    tokens, columns = LANES * groups, _round_up(queries, 8)
    of_tokens = 5 + norm_heads
    return tokens * (4 * of_tokens + widths + planes * columns) + 4 * 5 * columns + 4 * queries * (tokens + SCORE_PAD)


def plan_kernels(
    layout: PageLayout,
    keys: Keys,
    queries: int,
    counts: Any,
    *,
    architecture: int,
    multiprocessors: int,
    coefficients: str,
) -> tuple[LatentKernel, LatentKernel, Splits]:
    """The kernels over pages and over exact latents, and how these are split.

    `counts` (4, b) are the rows' pages, first tokens, starts of windows and their tokens. Tiles shrink where there are
    not enough of them to fill the device.
    """
    counts = counts.astype(np.int64)
    kernels, parts, b = [], [], counts.shape[1]
    pages, sinks, _, window = counts.max(axis=1).tolist()
    for exact, tokens in ((False, layout.page_tokens * counts[0].sum()), (True, (counts[1] + counts[3]).sum())):
        share = int(tokens) // (LANES * max(1, multiprocessors))
        most_groups = max((groups for groups in GROUPS if groups <= share), default=1)
        kernel, _ = chosen_kernel(
            layout, keys, queries, architecture, coefficients, exact=exact, most_groups=most_groups
        )
        kernels.append(kernel)
        parts.append(
            plan_splits(
                layout, *((0, sinks, window) if exact else (pages, 0, 0)),
                held=0 if exact else int(counts[0].sum()) * kernel.heads,
                heads=b * kernel.heads, tiles=kernel.tiles, step=kernel.tokens, multiprocessors=multiprocessors,
            )
        )  # fmt: skip
    of_pages, of_exact = parts
    splits = of_pages._replace(
        splits=of_pages.splits + of_exact.splits,
        sink_splits=of_exact.sink_splits,
        exact_step=of_exact.exact_step,
    )
    return kernels[0], kernels[1], splits


@lru_cache(maxsize=4096)
def make_rebuild(keys: Keys, numbers: tuple[tuple[str, int | float], ...] = ()) -> Any:
    """A 0-d array of :data:`REBUILD`, not to be written to; `numbers` are the fields that `keys` does not give."""
    rebuild = np.zeros((), REBUILD)
    given = keys._asdict() | {"turned": keys.turned, "blocks": keys.blocks, "has_norm": keys.norm} | dict(numbers)
    for name, number in given.items():
        if name != "norm":
            rebuild[name] = number
    return rebuild
