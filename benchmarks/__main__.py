"""``python -m benchmarks``: measure, print tables that can be pasted, and judge them by their bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu.command import gpu
from benchmarks.kernels import kernels
from benchmarks.machine import core_count, describe_machine, set_threads
from benchmarks.show import shows
from benchmarks.subjects import ANCHOR, SUBJECTS, Shape, parse_subject
from benchmarks.table import (
    document,
    extra_cell,
    number_cell,
    print_heading,
    print_notes,
    print_rows,
    print_table,
    rate_cell,
    ratio_cell,
)
from kvsketch.console import fail, progress_bar, user_errors, writable

app = typer.Typer(
    help="Benchmarks of kvsketch against its rivals.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

#: Subjects of a short run: those that have bars.
QUICK = "kivi-2,kivi-2 int8,kivi-4,kivi-4 int8,qjl-256,qjl-256 int8"
ROUNDS, QUICK_ROUNDS = 21, 11

QuickOption = Annotated[bool, typer.Option("--quick", help="A short run: fewer shapes, subjects and rounds.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
RoundsOption = Annotated[int | None, typer.Option(help=f"Rounds. [default: {ROUNDS}, {QUICK_ROUNDS} with --quick]")]
ThreadsOption = Annotated[int, typer.Option(help="Threads of all that computes.")]
SubjectsOption = Annotated[
    str | None, typer.Option(help="Methods, with commas; ' int8' behind one: 8-bit coefficients.")
]


def numbers(option: str, text: str) -> list[int]:
    """Positive integers with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        fail(f"{option} must be positive integers with commas between, got {text!r}")
    return [int(part) for part in parts]


def chosen_subjects(text: str | None, quick: bool) -> list[Any]:
    """The subjects asked for; without a wish all of them, or the ones with bars."""
    if text is None:
        return [parse_subject(name) for name in QUICK.split(",")] if quick else list(SUBJECTS)
    from kvsketch.methods import get_method

    found = [parse_subject(name.strip()) for name in text.split(",")]
    for subject in found:
        with user_errors("--subjects"):
            get_method(subject.method)
    return found


def finish(path: Path | None, contents: dict[str, Any]) -> None:
    """Write what was measured where that was asked for."""
    if path is not None:
        path.write_text(json.dumps(contents, indent=1) + "\n")
        print_notes(f"Wrote {path}")


@app.command()
def decode(
    tokens: Annotated[str, typer.Option(help="Cached tokens.")] = "",
    sizes: Annotated[str, typer.Option("--d", help="Head sizes: multiples of 64.")] = "",
    gqa: Annotated[str, typer.Option(help="Query heads of each of 8 key/value heads.")] = "",
    subjects: SubjectsOption = None,
    threads: ThreadsOption = 1,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Time one decode step's attention of each codec against torch, a dense flash decode and plain reads."""
    writable("--json", json_file)
    from benchmarks.decode import measure_decode, measure_errors

    chosen = chosen_subjects(subjects, quick)
    shapes = [
        Shape(n, d, 8 * ratio)
        for n in numbers("--tokens", tokens or ("4096,32768" if quick else "4096,32768,131072"))
        for d in numbers("--d", sizes or ("128" if quick else "64,128"))
        for ratio in numbers("--gqa", gqa or ("4" if quick else "1,4,8"))
    ]
    machine, rows = describe_machine(), []
    with progress_bar() as progress:
        for shape in shapes:
            count = rounds or (QUICK_ROUNDS if quick else ROUNDS)
            rows += measure_decode(shape, chosen, rounds=count, threads=threads, progress=progress)
    print_heading("One decode step's attention, caches flushed", machine)
    print_rows(
        [row for row in rows if row.kind != "memory"],
        {name: name for name in ("best torch", "dense bf16", "dense fp32", "read")},
        {"fastest torch": lambda row: row.rivals.get("best torch", "").removeprefix("torch ")},
    )
    print_notes(
        "best torch, dense: how many times faster than torch's fastest way (named) and our dense Numba kernel; read: "
        "its time over that of a plain read of its bytes. Ratios are taken within rounds: median (quartiles)."
    )
    print_heading("Plain reads and a copy", machine)
    print_rows([row for row in rows if row.kind == "memory"], {}, {"GB/s": rate_cell})
    errors = measure_errors(chosen)
    print_heading("Relative L2 error against float64 attention over the decoded cache, 4096 tokens", machine)
    kinds = list(dict.fromkeys(entry["data"] for entry in errors))
    found = {(entry["name"], entry["data"]): entry["error"] for entry in errors}
    print_table(("what", *kinds), [(s.name, *(f"{found[s.name, kind]:.1e}" for kind in kinds)) for s in chosen])
    finish(json_file, document("decode", machine, rows=rows, errors=errors))


@app.command()
def palu(
    tokens: Annotated[str, typer.Option(help="Cached tokens.")] = "4096,8192,16384,32768,65536",
    d: Annotated[int, typer.Option("--d", help="Head size: a multiple of 64.")] = 64,
    heads: Annotated[str, typer.Option(help="Query and key/value heads.")] = "9,3",
    slice_heads: Annotated[int, typer.Option(help="Key/value heads of a slice.")] = 3,
    keep: Annotated[float, typer.Option(help="Share of the numbers that latents keep.")] = 0.5,
    threads: ThreadsOption = 1,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Time a decode step's attention over latents, with and without RoPE, against dense keys and kivi-2."""
    writable("--json", json_file)
    from benchmarks.palu import RIVAL, Latents, break_even, measure_palu

    counts = numbers("--heads", heads)
    if len(counts) != 2 or counts[0] % counts[1] or counts[1] % slice_heads or not 0 < keep <= 1:
        fail(f"--heads, --slice-heads and --keep do not fit together: {heads}, {slice_heads}, {keep}")
    kinds = [Latents(keep, slice_heads, bits) for bits in ((3,) if quick else (3, None))]
    lengths = numbers("--tokens", "4096,32768" if quick else tokens)
    machine, rows = describe_machine(), []
    with progress_bar() as progress:
        for n in lengths:
            count = rounds or (QUICK_ROUNDS // 2 if quick else QUICK_ROUNDS)
            rows += measure_palu(Shape(n, d, *counts), kinds, rounds=count, threads=threads, progress=progress)
    print_heading("One decode step's attention over latents, caches flushed", machine)
    shown = ("dense fp32", "dense bf16", RIVAL)
    print_rows([row for row in rows if row.kind != "memory"], {name: name for name in (*shown, "product")})
    print_notes(
        "dense, kivi-2: how many times faster than our dense Numba kernel, and than kivi-2; product: the time of the "
        "matrix product that rebuilds all keys, by NumPy, over that of the whole step."
    )
    names = list(dict.fromkeys(row.name for row in rows if row.kind == "palu"))
    crossings = {}
    for name in names:
        found = [row for row in rows if row.name == name]
        crossings[name] = {
            rival: break_even([row.shape.n for row in found], [row.ratios[rival].median for row in found])
            for rival in shown
        }
    print_heading("Tokens from which on latents are faster, interpolated", machine)
    beyond = f"above {max(lengths)}"
    print_table(
        ("what", *shown),
        [(name, *(beyond if x is None else f"{x:.0f}" for x in found.values())) for name, found in crossings.items()],
    )
    finish(json_file, document("palu", machine, rows=rows, break_even=crossings))


@app.command()
def encode(
    tokens: Annotated[int, typer.Option(help="Tokens to encode.")] = ANCHOR.n,
    d: Annotated[int, typer.Option("--d", help="Head size.")] = 128,
    threads: ThreadsOption = 1,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Time encoding a prompt against a copy of the same float32 numbers."""
    writable("--json", json_file)
    from benchmarks.encode import measure_encode

    machine, shape = describe_machine(), Shape(tokens // 32 * 32, d)
    with progress_bar() as progress:
        count = rounds or (QUICK_ROUNDS // 2 if quick else ROUNDS)
        rows = measure_encode(shape, rounds=count, threads=threads, progress=progress)
    print_heading("Encoding a prompt", machine)
    print_rows(rows, {"memcpy": "memcpy"}, {"GB/s of input": rate_cell})
    print_notes("memcpy: speed relative to the faster copy of the same numbers.")
    finish(json_file, document("encode", machine, rows=rows))


@app.command()
def scaling(
    axes: Annotated[str, typer.Option(help="n (tokens), m (rows of a sketch), d (channels), b (rows).")] = "n,m,d,b",
    threads: ThreadsOption = 1,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Time a decode step along each axis and fit a power law."""
    writable("--json", json_file)
    from benchmarks.scaling import measure_sweep, parse_axes, sweeps

    with user_errors("--axes"):
        chosen = parse_axes(axes, sweeps(quick))
    machine, rows, fits = describe_machine(), [], []
    count = rounds or (QUICK_ROUNDS // 2 if quick else QUICK_ROUNDS)
    for sweep in chosen:
        with progress_bar() as progress:
            found, fit = measure_sweep(sweep, rounds=count, threads=threads, progress=progress)
        print_heading(f"Decode along {sweep.axis}: {sweep.name}", machine)
        print_rows(found, {f"over {sweep.axis}={sweep.sizes[0]}": "first"})
        print_notes(
            f"time = {fit.factor:.3g} ms * {sweep.axis}^{fit.exponent:.2f}; the power law misses no median by more "
            f"than {fit.largest_miss:.2f} times."
        )
        rows += found
        fits.append({"axis": sweep.axis, "name": sweep.name, **fit._asdict()})
    finish(json_file, document("scaling", machine, rows=rows, fits=fits))


@app.command("threads")
def threads_command(
    tokens: Annotated[int, typer.Option(help="Cached tokens.")] = ANCHOR.n,
    subjects: SubjectsOption = None,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Time decode steps with one thread and with two."""
    writable("--json", json_file)
    from benchmarks.threads import measure_threads

    machine = describe_machine()
    if core_count() < 2:
        print_notes("not measured: two threads, this process may use one core only")
        finish(json_file, document("threads", machine))
        return
    with progress_bar() as progress:
        count = rounds or (QUICK_ROUNDS if quick else ROUNDS)
        rows = measure_threads(Shape(tokens), chosen_subjects(subjects, True), rounds=count, progress=progress)
    print_heading("Decode with one thread and with two", machine)
    print_rows(rows, {"over one thread": "one thread"})
    finish(json_file, document("threads", machine, rows=rows))


@app.command()
def limits(
    tokens: Annotated[int, typer.Option(help="Cached tokens.")] = ANCHOR.n,
    subjects: SubjectsOption = None,
    rounds: RoundsOption = None,
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Time what bounds a decode step: dot products, the loops around them, caches and memory."""
    writable("--json", json_file)
    from benchmarks.limits import measure_limits

    machine, chosen = describe_machine(), chosen_subjects(subjects, True)
    with progress_bar() as progress, user_errors("--subjects"):
        count = rounds or (QUICK_ROUNDS if quick else ROUNDS)
        found = measure_limits(Shape(tokens), chosen, rounds=count, progress=progress)
    print_heading(f"What bounds a decode step at {Shape(tokens)}, nanoseconds a page and head", machine)
    names = ("dots", "loops", "near", "far", "read", "dense")
    print_table(
        ("what", *names, "dense / far", "dense / loops", "dense / dots"),
        [
            (
                entry.subject.name,
                *(ratio_cell(getattr(entry, name)) for name in names),
                *(number_cell(entry.dense.median / getattr(entry, name).median) for name in ("far", "loops", "dots")),
            )
            for entry in found
        ],
    )
    print_notes(
        "dots: the dot products alone, at the rate at which this processor does nothing else; loops: with the loads "
        "and masks of codes, on a page in the nearest cache; near: all of attention, pages in a near cache; far: pages "
        "in memory; read: a plain read of the page; dense: the dense bf16 kernel on as many tokens. dense / dots: no "
        "kernel of these dot products can be more times faster than the dense one.",
        *(f"* CONTENDED: {reason}." for reason in {entry.contended for entry in found} if reason),
    )
    finish(json_file, document("limits", machine, limits=[entry.to_json() for entry in found]))


@app.command()
def start(
    methods: Annotated[str, typer.Option(help="Methods to use for the first time.")] = "kivi-2,qjl-256",
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Time processes that use kernels for the first time: one that compiles them, others that find them on disk."""
    writable("--json", json_file)
    from benchmarks.start import measure_import, measure_start

    machine = describe_machine()
    starts = measure_start(tuple(methods.split(",")), processes=2 if quick else 4)
    print_heading(f"First use of {methods}: append, encode and attend", machine)
    print_table(
        ("process", "seconds, all of it", "imports", "first use"),
        [
            (
                "compiles" if s.process == 1 else "finds kernels on disk",
                *(number_cell(x) for x in (s.total, s.imports, s.first_use)),
            )
            for s in starts
        ],
    )
    imports = measure_import()
    print_notes(f"`import kvsketch` alone: {imports:.2f} s.")
    finish(json_file, document("start", machine, starts=[s._asdict() for s in starts], imports=imports))


@app.command()
def generate(
    tokens: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "",
    methods: Annotated[str, typer.Option(help="Methods of kvsketch.")] = "kivi-2,kivi-4,qjl-256",
    model: Annotated[str, typer.Option(help="smollm2, a local directory or a hub name.")] = "smollm2",
    threads: Annotated[int | None, typer.Option(help="Threads of all that computes. [default: all cores]")] = None,
    rounds: RoundsOption = None,
    rivals: Annotated[bool, typer.Option(help="Run the rivals that are installed.")] = True,
    quick: QuickOption = False,
    json_file: JsonOption = None,
) -> None:
    """Time one-token steps of a model on compressed, dense and rivals' caches."""
    writable("--json", json_file)
    from kvsketch.console import load_language_model, read_text

    lengths = numbers("--tokens", tokens or ("512,2048" if quick else "512,2048,8000"))
    count = threads or core_count()
    language_model, tokenizer = load_language_model(model, "float32", count)
    from benchmarks.generate import RIVALS, measure_generate, reserved_share
    from benchmarks.names import absent_key
    from kvsketch.evaluation import text_windows

    set_threads(count)
    machine, rows = describe_machine(), []
    absent: dict[str, str] = {}
    text = read_text(None)[0]
    with progress_bar() as progress:
        for length in lengths:
            (window,) = text_windows(tokenizer, text, prompt_tokens=length - 1, score_tokens=1)
            found, missing = measure_generate(
                language_model, window[:, :length], methods.split(","), rounds=rounds or (9 if quick else ROUNDS),
                threads=count, rivals=RIVALS if rivals else (), progress=progress,
            )  # fmt: skip
            rows += found
            absent |= {absent_key(name, length): reason for name, reason in missing.items()}
    print_heading(f"One-token steps of {model} in float32", machine)
    print_rows(
        rows,
        {"times DynamicCache": "dense", "its attention": "dense attention", "empty context": "floor"},
        {
            "attention ms": extra_cell("attention_ms"),
            "tokens/s": extra_cell("tokens_per_s"),
            "mean ms": extra_cell("mean_ms"),
            "peak MB": extra_cell("peak_mb"),
        },
    )
    print_notes(
        "times DynamicCache: how many times faster a step is; its attention: the same without the time of a step at an "
        "empty context; empty context: that step's time over this one's. mean ms: with the step that quantizes "
        "everything anew, every 128th. llama.cpp has its own kernels and weights of 4 to 8 bits: see attention ms.",
        *(f"not measured: {name} ({reason})" for name, reason in absent.items()),
    )
    share = reserved_share()
    print_notes(f"Buffers of 8 rows of 8192 tokens, kivi-2, after reserve: {share:.3f} of dense 16-bit ones.")
    finish(json_file, document("generate", machine, rows=rows, absent=absent, reserved_share=share))


app.command()(shows)
app.command()(gpu)
app.command()(kernels)


if __name__ == "__main__":
    app()
