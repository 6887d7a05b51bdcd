"""The parts of ``make gpu`` in the order in which they run, each with the time that it may take."""

from __future__ import annotations

from typing import NamedTuple

#: Seconds of all parts together.
ALL_SECONDS = 480


class Part(NamedTuple):
    """A part: ``measure(findings, device)`` of the module ``benchmarks.gpu.<name>`` is what it does.

    One that does not need CuPy gets None for a device where there is none.
    """

    name: str
    title: str
    seconds: int
    needs_cupy: bool = True


PARTS = (
    Part("machine", "What is there", 25, needs_cupy=False),
    Part("parity", "The suite's CUDA tests on the device", 150),
    Part("sanitizer", "compute-sanitizer", 75),
    Part("decode", "A decode step's attention", 110),
    Part("encode", "Encoding a prompt", 30),
    Part("step", "The host's share of a decode step", 30),
    Part("generate", "Generation with a model", 60),
)
