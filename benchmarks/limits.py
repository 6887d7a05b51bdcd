"""What bounds a decode step: dot products, the loops around them, caches, memory.

All figures are nanoseconds a page and key/value head, for the query heads that share it: ``dots`` the dot products
that it needs at the rate at which this processor does nothing else, ``loops`` the innermost loops on a page in the
nearest cache, with the loads and masks of codes, ``near`` the whole of attention on pages in a near cache (the slope
between two lengths, so that what a call costs once is not in it), ``far`` the whole of it at the shape asked for, from
memory. Beside them a plain read of the page's bytes, and the dense bf16 kernel on the tokens of a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bandwidth import random_bytes, read_all
from benchmarks.dense_flash import dense_flash
from benchmarks.dot_loops import CHAINS, count_dots, make_issue, make_loops
from benchmarks.machine import set_threads
from benchmarks.subjects import (
    Shape,
    Stored,
    Subject,
    attend_stored,
    make_queries,
    make_tokens,
    repeat_tokens,
    store,
    to_bfloat16,
)
from benchmarks.timing import Entrant, Race, Ratio, quartiles, run_race
from kvsketch._progress import Progress, no_progress
from kvsketch.layout import KIND_INTS, KIND_SKETCH

#: Runs under one clock: of loops on one page, of attention over few pages, of dot products.
LOOPS, CALLS, ISSUES = 2000, 100, 50_000
#: Pages a head whose times give the cost of a page in a near cache.
NEAR = (4, 12)


class Limits(NamedTuple):
    """What bounds one subject: nanoseconds a page and key/value head, each a median with quartiles."""

    subject: Subject
    dots: Ratio
    loops: Ratio
    near: Ratio
    far: Ratio
    read: Ratio
    dense: Ratio
    contended: str

    def to_json(self) -> dict[str, Any]:
        """The limits as JSON has them."""
        numbers = {name: getattr(self, name)._asdict() for name in self._fields[1:-1]}
        return {"name": self.subject.name, "contended": self.contended, **numbers}


def measure_limits(
    shape: Shape, subjects: Sequence[Subject], *, rounds: int, progress: Progress = no_progress
) -> list[Limits]:
    """Limits of each of `subjects` on one thread.

    ValueError for one whose keys or values are not coded, or whose sketch has outlier channels: there is more to it
    than dot products.
    """
    set_threads(1)
    stored = {s.method: store(s.method, shape) for s in subjects}
    for method, held in stored.items():
        keys, values = held.view.layout.keys.spec, held.view.layout.values.spec
        if keys.kind not in (KIND_INTS, KIND_SKETCH) or values.kind != KIND_INTS or keys.outliers:
            raise ValueError(f"{method} is not made of codes alone; name methods of integers or plain sketches")
    q = make_queries(shape)
    drawn = make_tokens(shape._replace(n=min(shape.n, 4096)))
    k, v = (to_bfloat16(repeat_tokens(x, shape.n)) for x in drawn)
    room = random_bytes(max(s.nbytes for s in stored.values()))
    entrants = [Entrant("dense", partial(dense_flash, q[0, :, 0], k[0], v[0], threads=1))]
    for method, held in stored.items():
        entrants.append(Entrant(f"read {method}", partial(read_all, room[: held.nbytes], threads=1)))
    entrants += [Entrant(s.name, partial(attend_stored, q, stored[s.method], s)) for s in subjects]
    far = run_race(entrants, rounds=rounds, progress=progress, title=f"Decode at {shape}")

    entrants = [
        Entrant(f"dots {coefficients}", partial(make_issue(coefficients), ISSUES))
        for coefficients in sorted({s.coefficients for s in subjects})
    ]
    for subject in subjects:
        held = stored[subject.method]
        loops = make_loops(held.view.layout, subject.coefficients, shape.gqa)
        entrants.append(Entrant(f"loops {subject.name}", partial(loops, LOOPS)))
        for pages in NEAR:
            run = partial(attend_stored, q, _shorten(held, pages), subject)
            entrants.append(Entrant(f"{pages} pages {subject.name}", partial(_repeat, run)))
    near = run_race(entrants, rounds=rounds, warm_up=2, flush=False, progress=progress, title="Pages in caches")
    return [_limits(subject, stored[subject.method], shape, far, near) for subject in subjects]


def _limits(subject: Subject, held: Stored, shape: Shape, far: Race, near: Race) -> Limits:
    pages = shape.h * int(held.view.page_counts[0])
    few, more = (near.seconds[f"{count} pages {subject.name}"] for count in NEAR)
    dots = count_dots(held.view.layout, subject.coefficients, shape.gqa)
    return Limits(
        subject,
        _nanoseconds(near.seconds[f"dots {subject.coefficients}"], ISSUES * CHAINS / dots),
        _nanoseconds(near.seconds[f"loops {subject.name}"], LOOPS),
        _nanoseconds([y - x for x, y in zip(few, more, strict=True)], CALLS * shape.h * (NEAR[1] - NEAR[0])),
        _nanoseconds(far.seconds[subject.name], pages),
        _nanoseconds(far.seconds[f"read {subject.method}"], pages),
        _nanoseconds(far.seconds["dense"], pages),
        ", ".join(filter(None, (far.contended, near.contended))),
    )


def _nanoseconds(seconds: Sequence[float], pages: float) -> Ratio:
    return Ratio(*(1e9 * x / pages for x in quartiles(seconds)))


def _repeat(run: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        run()


def _shorten(held: Stored, pages: int) -> Stored:
    """The first `pages` pages of each head, and nothing else."""
    view = held.view
    none = {name: getattr(view, name)[:, :, :0] for name in ("sink_k", "sink_v", "window_k", "window_v")}
    zero = np.zeros_like(view.page_counts)
    return held._replace(
        view=view._replace(
            **none,
            pages=np.ascontiguousarray(view.pages[:, :, :pages]),
            page_counts=np.full_like(view.page_counts, pages),
            **dict.fromkeys(("sink_counts", "window_starts", "window_counts"), zero),
        )
    )
