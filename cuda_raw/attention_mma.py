"""Which kernel on tensor cores attends over the pages of a layout."""

from __future__ import annotations

from kvsketch.cuda_raw.attention_plan import PageKernel
from kvsketch.layout import PageLayout


def page_kernel(layout: PageLayout, queries: int, architecture: int, coefficients: str) -> PageKernel | str:
    """The kernel for `queries` rows of Q that rounds to `coefficients`, or the reason why there is none."""
    return "no kernel on tensor cores has been written yet"
