"""Encoding a prompt on the device: each side's codecs, against a copy of the same float16 numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.encode import SIDES
from benchmarks.gpu.clock import run_gpu_race
from benchmarks.gpu.decode import COPY
from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import Findings, said
from benchmarks.gpu.launches import recorded
from benchmarks.gpu.subjects import DTYPE
from benchmarks.rows import row_of
from benchmarks.subjects import DRAWN_TOKENS, Shape, make_tokens
from benchmarks.table import number_cell, rate_cell, ratio_cell
from benchmarks.timing import Entrant
from kvsketch.codecs import Codec, Side, TokenInts
from kvsketch.layout import SideLayout, side_layout
from kvsketch.pages import encode_keys, encode_values

#: The sides that are encoded on a CPU too, and latents.
ALL_SIDES: dict[str, tuple[Side, Codec]] = SIDES | {"latents, 3 bits": ("keys", TokenInts(3))}
SHAPE, DRY_SHAPE = Shape(32768, b=8), Shape(64, 64, 4, 2)
PAGE_TOKENS = 32
ROUNDS, DRY_ROUNDS = 15, 3
COLUMNS = ("what", "bits", "us (quartiles)", "GB/s of input", "times a copy's speed", "compile s", "reason")


def measure(findings: Findings, device: Device) -> None:
    """All sides in one race with the copy; a side that fails leaves the others."""
    shape = DRY_SHAPE if device.dry_run else SHAPE
    device.check_room(4 * shape.b * shape.h * shape.n * shape.d * DTYPE.itemsize)
    inputs = dict(zip(("keys", "values"), (_device_tokens(device, shape, x) for x in _drawn(shape)), strict=True))
    size = inputs["keys"].nbytes
    entrants = [Entrant(COPY, partial(inputs["values"].copy))]
    bits, compiled = {}, {COPY: 0.0}
    for name, (side, codec) in ALL_SIDES.items():
        layout = side_layout(side, codec, PAGE_TOKENS, shape.d)
        records = device.cupy.zeros((shape.b, shape.h, shape.n // PAGE_TOKENS, layout.nbytes), dtype="uint8")
        run = partial(_encode, inputs[side], layout, records)
        try:
            with recorded() as launches:
                device.first_call(run)
        except Exception as error:  # the others still race
            findings.failures.append(f"{name}: {said(error)}")
            continue
        bits[name], compiled[name] = 8 * records.nbytes * DTYPE.itemsize / size, launches.preparing_seconds
        entrants.append(Entrant(name, run))
    race = run_gpu_race(device.clock, entrants, rounds=DRY_ROUNDS if device.dry_run else ROUNDS, steady=COPY)
    lines = []
    for entrant in entrants:
        name, copy = entrant.name, entrant.name == COPY
        row = row_of(
            race, "memory" if copy else "kvsketch", name, shape, 0, nbytes=size, bits=bits.get(name),
            ratios={} if copy else {COPY: race.ratio(COPY, name)}, extra={"compile_s": compiled[name]},
        )  # fmt: skip
        findings.rows.append(row)
        low, median, high = (f"{1e3 * x:.1f}" for x in row.time)
        lines.append(
            (
                *(name, number_cell(row.bits), f"{median} ({low} - {high})", rate_cell(row)),
                *(ratio_cell(row.ratios.get(COPY)), number_cell(compiled[name], 1), row.contended),
            )
        )
    findings.table(f"Encoding {shape.b} rows of {shape}, float16", COLUMNS, lines)
    findings.notes.append("times a copy's speed: a copy of the input's time over this one's, within rounds.")


def _drawn(shape: Shape) -> Any:
    return make_tokens(shape._replace(n=min(shape.n, DRAWN_TOKENS), b=1))


def _device_tokens(device: Device, shape: Shape, x: Any) -> Any:
    """Tokens (1, h, drawn, d) on the device, repeated to (b, h, n, d)."""
    xp = device.cupy
    drawn = xp.asarray(x.astype(DTYPE))
    whole = xp.empty((shape.b, shape.h, shape.n, shape.d), dtype=DTYPE)
    for start in range(0, shape.n, drawn.shape[2]):
        whole[:, :, start : start + drawn.shape[2]] = drawn[:, :, : shape.n - start]
    return whole


def _encode(x: Any, layout: SideLayout, out: Any) -> None:
    if layout.side == "keys":
        encode_keys(x, layout, out=out)
    else:
        encode_values(x, layout, out=out)
