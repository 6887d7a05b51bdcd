"""The instantiations of attend_pages_mma that tests execute and compile, by what chooses them.

Every codec of keys and of values is here, and integers of channels and of tokens, sketches and these with outlier
channels with each way of keeping what rounding leaves, for one warp's query rows and for a block's. Any other
combination is compiled when it is first used, and tested by the slow tests.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsketch.codecs import Codec, GroupedInts, SignSketch, TokenInts
from kvsketch.cuda_raw.attention_mma import FILE, page_kernel
from kvsketch.cuda_raw.attention_plan import PageKernel
from kvsketch.layout import PageLayout, page_layout


class Mma(NamedTuple):
    """What page_kernel chooses by."""

    keys: Codec
    values: Codec
    d: int
    dv: int
    ratio: int
    s: int
    coefficients: str = "int16"

    @property
    def layout(self) -> PageLayout:
        return page_layout(self.keys, self.values, self.d, self.dv)

    def kernel(self, architecture: int) -> PageKernel:
        """The kernel of an architecture."""
        kernel = page_kernel(self.layout, self.ratio * self.s, architecture, self.coefficients)
        assert isinstance(kernel, PageKernel), kernel
        return kernel


KIVI = GroupedInts(2, 32)
SKETCH = SignSketch(m=256)
OUTLIERS = SignSketch(m=256, outliers=8, outlier_m=256)

MMA = (
    Mma(KIVI, KIVI, 128, 128, 4, 1),
    Mma(KIVI, KIVI, 128, 128, 4, 16),
    Mma(GroupedInts(1, 32), GroupedInts(1, 24), 80, 64, 4, 2, "int8"),
    Mma(GroupedInts(3, 32), GroupedInts(3, 32), 96, 80, 7, 1),
    Mma(GroupedInts(4, 128), GroupedInts(8, 8), 256, 256, 3, 3, "int8"),
    Mma(GroupedInts(8, 128), GroupedInts(8, 64), 64, 64, 1, 1),
    Mma(SKETCH, KIVI, 128, 128, 4, 1),
    Mma(SKETCH, KIVI, 128, 128, 8, 1, "int8"),
    Mma(SignSketch(m=100), GroupedInts(4, 32), 64, 8, 3, 5),
    Mma(OUTLIERS, KIVI, 128, 128, 4, 1),
    Mma(SignSketch(m=48, outliers=3, outlier_m=20), GroupedInts(3, 32), 80, 96, 4, 2),
    Mma(TokenInts(1), GroupedInts(3, 16), 8, 96, 1, 7, "int8"),
    Mma(TokenInts(2, 32), TokenInts(2), 80, 64, 8, 1),
    Mma(TokenInts(3), TokenInts(3), 128, 128, 4, 1),
    Mma(TokenInts(4, 64), GroupedInts(8, 32), 256, 64, 7, 2),
    Mma(TokenInts(8), TokenInts(4, 64), 64, 128, 1, 1),
)

ATTENTION_MMA = tuple((FILE, instance.kernel(90).expression) for instance in MMA)
