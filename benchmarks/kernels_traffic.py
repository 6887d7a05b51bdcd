"""Bytes that attention's kernels read of a cache's records, counted while they run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvsketch.methods import get_method

if TYPE_CHECKING:
    from kvsketch.attention import CacheView
    from kvsketch.codecs import Codec

#: Caches of which the bytes are counted, and queries of each key/value head.
CASES = (("kivi-2", 4), ("kivi-2", 8), ("kivi-4", 4), ("qjl-256", 4))
#: An architecture for which the kernels of a level are chosen.
LEVELS = {"simt": 75, "mma": 90}
#: One row of so many key/value heads, channels and pages: two runs of pages for each head.
HEADS, HEAD, PAGES = 2, 128, 16
#: One row of latents of 4 bits: heads that they stand for, of so many channels, queries of each, and their numbers.
LATENT_HEADS, LATENT_HEAD, LATENT_QUERIES, RANK, LATENT_BITS = 4, 64, 4, 128, 4
#: Fields of a view that lie on the device; counts stay on the host.
ON_DEVICE = ("pages", "sink_k", "sink_v", "window_k", "window_v")
#: A device so small that it takes a head's pages in two runs.
MULTIPROCESSORS = 1


class Bytes(NamedTuple):
    """Bytes for each token of a key/value head, or of a slice of latents."""

    record: float  #: of the record, so at least to be read
    asked: float  #: of records: by all threads, a byte as often as one of them asks for it
    read: float  #: of records: by blocks, a byte once for each block
    touched: float  #: of records: a byte once
    other: float  #: of queries, tables and counts, by blocks
    written: float  #: of sums for each run of pages


class Traffic(NamedTuple):
    """What a kernel reads and writes with `queries` queries of each key/value head."""

    subject: str
    level: str
    expression: str
    queries: int
    tokens: int  #: of all heads
    bytes: Bytes

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return self._asdict() | {"bytes": self.bytes._asdict()}


class Subject(NamedTuple):
    """Attention over a small cache, to be run under a stand-in for CuPy."""

    name: str
    queries: int
    tokens: int  #: of all heads
    record: int  #: bytes of the records of all heads' tokens
    records: tuple[int, ...]  #: shape of the array that the records lie in
    kernel: Callable[[int], tuple[str, str]]  #: file and name expression over the records, by architecture
    attend: Callable[[Any], Any]  #: given CuPy


def subjects() -> list[Subject]:
    """All caches."""
    return [*(_paged(*case) for case in CASES), _latents()]


def measure_all(files: Sequence[str], progress: Callable[[str, int, int | None], None]) -> list[Traffic]:
    """Traffic of each cache's kernel of each level, of those that are in `files`."""
    wanted = [
        (subject, level)
        for subject in subjects()
        for level, architecture in LEVELS.items()
        if subject.kernel(architecture)[0] in files
    ]
    found = []
    for done, (subject, level) in enumerate(wanted):
        progress(f"Counting bytes: {subject.name}, {level}", done, len(wanted))
        found.append(measure(subject, level))
    return found


def _paged(method: str, queries: int) -> Subject:
    from kvsketch.attention import attend
    from kvsketch.cuda_raw.attention import chosen_kernel

    settings = get_method(method).settings
    view, q = _inputs(settings.keys, settings.values, HEADS, HEAD, queries * HEADS, HEAD)

    def kernel(architecture: int) -> tuple[str, str]:
        chosen, _ = chosen_kernel(view.layout, queries, architecture)
        return chosen.file, chosen.expression

    def run(cupy: Any) -> Any:
        return attend(cupy.asarray(q), _moved(cupy, view), engine="cuda_raw")

    return _subject(method, queries, view, kernel, run)


def _latents() -> Subject:
    from kvsketch.codecs import TokenInts
    from kvsketch.cuda_raw import palu
    from kvsketch.cuda_raw.palu_plan import Keys, chosen_kernel
    from kvsketch.palu import Reconstruction, Rope

    codec, query_rows = TokenInts(LATENT_BITS), LATENT_HEADS * LATENT_QUERIES
    view, q = _inputs(codec, codec, 1, RANK, query_rows, LATENT_HEAD)
    rng = np.random.default_rng(0)
    matrices = rng.standard_normal((2, LATENT_HEADS * LATENT_HEAD, RANK)).astype(np.float32)
    angles = rng.uniform(0, 1, (PAGES * view.layout.page_tokens, LATENT_HEAD)).astype(np.float32)
    keys = Keys(LATENT_HEADS, LATENT_HEAD, rotary=LATENT_HEAD)

    def kernel(architecture: int) -> tuple[str, str]:
        chosen, _ = chosen_kernel(view.layout, keys, query_rows, architecture)
        return chosen.file, chosen.expression

    def run(cupy: Any) -> Any:
        up_k, up_v = map(cupy.asarray, matrices)
        rope = Rope(cupy.asarray(np.cos(angles)), cupy.asarray(np.sin(angles)))
        return palu.attend(
            cupy.asarray(q), _moved(cupy, view), Reconstruction(LATENT_HEADS, up_k, up_v),
            rope=rope, positions=None, key_norm=None, first=None, limits=None, bias=None,
            scale=LATENT_HEAD**-0.5, softcap=None, coefficients="int16",
        )  # fmt: skip

    return _subject(f"palu, {LATENT_BITS} bits", LATENT_QUERIES, view, kernel, run)


def _inputs(keys: Codec, values: Codec, h: int, width: int, hq: int, d: int) -> tuple[CacheView, Any]:
    """A cache of whole pages, and queries (1, hq, 1, d)."""
    from kvsketch.tests.page_cases import Row, make_view

    view, _ = make_view(keys, values, d=width, dv=width, h=h, rows=[Row(0, PAGES, 0)])
    return view, np.random.default_rng(1).standard_normal((1, hq, 1, d)).astype(np.float32)


def _moved(cupy: Any, view: CacheView) -> CacheView:
    """The view's arrays on the device."""
    return view._replace(**{name: cupy.asarray(getattr(view, name)) for name in ON_DEVICE})


def _subject(
    name: str,
    queries: int,
    view: CacheView,
    kernel: Callable[[int], tuple[str, str]],
    run: Callable[[Any], Any],
) -> Subject:
    count, layout = view.pages.shape[1] * PAGES, view.layout
    tokens, record = count * layout.page_tokens, count * layout.record_bytes
    return Subject(name, queries, tokens, record, view.pages.shape, kernel, run)


def measure(subject: Subject, level: str) -> Traffic:
    """Run the kernel of a level, checked, and count what it reads and writes."""
    from kvsketch.tests.cuda_host import running
    from kvsketch.tests.cuda_host.stand_in import standing_in
    from kvsketch.tests.cuda_host.traffic import counted

    architecture = LEVELS[level]
    _, expression = subject.kernel(architecture)
    device: AbstractContextManager[Any] = standing_in(
        compute_capability=str(architecture), multiprocessors=MULTIPROCESSORS
    )
    with device as cupy, running("check"), counted() as launches:
        subject.attend(cupy)
    [arrays] = [launch.arrays for launch in launches if launch.kernel == expression]
    held = [f"(uint8{list(subject.records)})" in array.name for array in arrays]
    records = [array.read for array, is_held in zip(arrays, held, strict=True) if is_held]
    others = [array.read for array, is_held in zip(arrays, held, strict=True) if not is_held]
    counts = (
        subject.record,
        *(sum(getattr(read, name) for read in records) for name in ("requested", "by_block", "distinct")),
        sum(read.by_block for read in others),
        sum(array.written.by_block for array in arrays),
    )
    found = Bytes(*(count / subject.tokens for count in counts))
    return Traffic(subject.name, level, expression, subject.queries, subject.tokens, found)
