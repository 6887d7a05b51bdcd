"""The command ``kvsketch palu``: convert a model once, so that its cache holds low-rank latents."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch._attend import COEFFICIENTS
from kvsketch.console import (
    DTYPES,
    at_least,
    fail,
    load_language_model,
    parse_method,
    print_table,
    progress_bar,
    quiet_transformers,
    read_text,
    user_errors,
    writable,
)
from kvsketch.methods import LatentMethod, Method

#: Of a text that is named for evaluation too, the share that may be calibrated or tuned on; the rest is evaluated.
USED_SHARE = 0.6
#: A window of evaluation: tokens that are read first, and those that are predicted after one more.
PROMPT_TOKENS, SCORE_TOKENS = 256, 767
#: Length at which the bytes of a cache are told.
CACHE_TOKENS = 4096
#: Marks a whole width in a drawing of ranks.
BAR_WIDTH = 24


def palu(
    model: Annotated[str, typer.Argument(help="smollm2, a local directory or a hub name.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="New folder for the converted model.", show_default=False)],
    keep: Annotated[float, typer.Option(help="Share of the numbers of keys and values to keep.")] = 0.7,
    granularity: Annotated[str, typer.Option(help="Heads factored together: joint, head or group:N.")] = "joint",
    ranks: Annotated[str, typer.Option(help="Rule of ranks: balanced, uniform, fisher, fisher-uniform.")] = "balanced",
    factors: Annotated[str, typer.Option(help="Factors: two-sided, whitened (the paper's) or plain.")] = "two-sided",
    calibration: Annotated[
        Path | None, typer.Option(help="UTF-8 text to calibrate on. [default: the manual that comes with Python]")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of it to read; half of them for gradients.")] = 32768,
    calibration_window: Annotated[int, typer.Option(help="Tokens of it that are read at once.")] = 512,
    calibration_cache: Annotated[
        Path | None,
        typer.Option(help="File of the calibration's sums: an interrupted run goes on, another conversion reuses it."),
    ] = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="Fuse a rotation, for latents of few bits.")] = False,
    latent_bits: Annotated[int | None, typer.Option(help="Bits of a cached latent. [default: exact]")] = None,
    latent_group: Annotated[
        int | None, typer.Option(help="Latents that share a scale and zero. [default: all of a slice]")
    ] = None,
    first_tokens: Annotated[int, typer.Option(help="First tokens whose true keys and values are kept.")] = 1,
    block: Annotated[int, typer.Option(help="Ranks are multiples of this.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the rotations.")] = 0,
    evaluate: Annotated[
        Path | None, typer.Option(help="UTF-8 text to measure perplexity on, before and after.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of 1024 tokens to measure it on.")] = 4,
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Threads to compute with. [default: torch's choice]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was measured to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with a picture of the ranks.")] = None,
) -> None:
    """Convert MODEL by Palu into OUT: key and value projections become low-rank, and the cache holds their latents.

    The defaults are the best recipe measured; the paper's is --factors whitened --ranks fisher --first-tokens 0.
    """
    at_least(1, "--windows", windows)
    for option, file in (("--json", json_file), ("--report", report), ("--calibration-cache", calibration_cache)):
        writable(option, file)
    with user_errors("palu"):
        quiet_transformers()
        from kvsketch.adapters.palu import CalibrationSettings, PaluSettings
        from kvsketch.adapters.palu_saving import check_new_folder
    settings = checked_options(
        PaluSettings,
        keep=keep,
        granularity=granularity,
        ranks=ranks,
        factors=factors,
        block=block,
        rotate=rotate,
        seed=seed,
        first_tokens=first_tokens,
        latent_bits=latent_bits,
        latent_group=latent_group,
    )
    at_least(2, "--calibration-window", calibration_window)
    at_least(2 * calibration_window, "--tokens", tokens)
    reading = CalibrationSettings(tokens=tokens, gradient_tokens=tokens // 2, window=calibration_window)
    with user_errors("OUT"):
        check_new_folder(out)
    content, source, held_out, held_out_source = read_texts("--calibration", calibration, evaluate)
    language_model, tokenizer = load_language_model(model, dtype, threads)
    record = _run(
        *(language_model, tokenizer, out, settings, reading, content, source, calibration_cache),
        *(held_out, held_out_source, windows),
    )
    record |= {"model": model, "dtype": dtype}
    _print_record(record)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        typer.echo(f"Wrote {json_file}")
    if report is not None:
        from kvsketch.cli_palu_report import render_palu_report

        report.write_text(render_palu_report(record), encoding="utf-8")
        typer.echo(f"Wrote {report}")


def parse_any_method(
    option: str, method: str, residual_length: int | None, sink_tokens: int | None, coefficients: str
) -> Method | LatentMethod:
    """The method called `method` in `option`; of latents: ``palu`` (as converted), ``palu-exact`` or ``palu-BITS``."""
    name, _, bits = method.partition("-")
    if name != "palu":
        return parse_method(option, method, residual_length, sink_tokens)
    for setting, value in (("--residual-length", residual_length), ("--sink-tokens", sink_tokens)):
        if value is not None:
            fail(
                f"{setting} {value}: method {method} has none; first tokens are chosen by kvsketch palu --first-tokens"
            )
    if coefficients != COEFFICIENTS[0]:
        fail(f"--coefficients {coefficients}: method {method} rounds none; leave it out")
    if method == name:
        return LatentMethod(method, {})
    if bits == "exact":
        return LatentMethod(method, {"latent_bits": None})
    if not bits.isdecimal():
        fail(f"{option} {method}: give palu, palu-exact or palu-BITS, for instance palu-3")
    return LatentMethod(method, {"latent_bits": int(bits)})


def checked_options(kind: Any, **arguments: Any) -> Any:
    """``kind(**arguments)``; an argument that it refuses is named as the option that it came from."""
    try:
        return kind(**arguments)
    except (ValueError, TypeError) as error:
        name = next((name for name in arguments if str(error).startswith(name)), "")
        fail(f"--{name.replace('_', '-')}: {error}")


def read_texts(option: str, used: Path | None, evaluate: Path | None) -> tuple[str, str, str, str]:
    """The text to use, which `option` named, its name, the one to evaluate on and its name (both empty without one).

    One file for both is split, so that nothing is measured on what was used.
    """
    content, source = read_text(used, option)
    if evaluate is None:
        return content, source, "", ""
    held_out, held_out_source = read_text(evaluate, "--evaluate")
    if used is None or not evaluate.samefile(used):
        return content, source, held_out, held_out_source
    cut = int(USED_SHARE * len(content))
    share = f"{USED_SHARE:.0%}"
    return content[:cut], f"the first {share} of {source}", content[cut:], f"what follows the first {share} of {source}"


def cut_windows(tokenizer: Any, text: str, source: str, windows: int) -> Sequence[Any]:
    """Windows (1, n) to evaluate on, cut from the text of --evaluate; none without one."""
    from kvsketch.evaluation import text_windows

    if not text:
        return ()
    with user_errors(f"--evaluate {source}"):
        return text_windows(tokenizer, text, prompt_tokens=PROMPT_TOKENS, score_tokens=SCORE_TOKENS, windows=windows)


def _run(
    model: Any,
    tokenizer: Any,
    out: Path,
    settings: Any,
    reading: Any,
    content: str,
    source: str,
    calibration_cache: Path | None,
    held_out: str,
    held_out_source: str,
    windows: int,
) -> dict[str, Any]:
    """Calibrate, convert, save and evaluate; everything measured, by name."""
    from kvsketch.adapters.palu import calibrate, convert, save_pretrained
    from kvsketch.adapters.palu_evaluation import read_windows

    scored = cut_windows(tokenizer, held_out, held_out_source, windows)
    seconds: dict[str, float] = {}
    perplexity: dict[str, float] = {}
    whole_before = _weight_nbytes(model)
    start = time.perf_counter()
    with progress_bar() as progress:
        if scored:
            dense = read_windows(model, scored, prompt_tokens=PROMPT_TOKENS, title="Reading dense", progress=progress)
            perplexity["dense"] = dense.perplexity
        seconds["dense evaluation"], start = time.perf_counter() - start, time.perf_counter()
        statistics = None
        with user_errors(f"--calibration {source}"):
            if settings.needs_calibration:
                statistics = calibrate(
                    model, tokenizer, content, settings=reading, file=calibration_cache, progress=progress
                )
        seconds["calibration"], start = time.perf_counter() - start, time.perf_counter()
        with user_errors("MODEL"):
            convert(model, statistics, settings=settings, progress=progress)
        with user_errors("OUT"):
            save_pretrained(model, out, tokenizer)
        seconds["conversion"], start = time.perf_counter() - start, time.perf_counter()
        report = None
        if scored:
            perplexity["converted"], report = _evaluate(model, scored, settings, progress)
        seconds["evaluation"] = time.perf_counter() - start
    modules = model.palu.attention_modules(model)
    nbytes, dense_nbytes = (
        measure(model, CACHE_TOKENS) for measure in (model.palu.cache_nbytes, model.palu.dense_nbytes)
    )
    return {
        "out": str(out),
        "settings": asdict(settings),
        "calibration": {
            "text": source if settings.needs_calibration else None,
            "tokens": reading.tokens,
            "fingerprint": model.palu.calibration,
        },
        "kept": model.palu.kept(model),
        "layers": [asdict(module.plan) | {"width": module.h * module.d} for module in modules],
        "attention_weight_nbytes": {"before": model.palu.nbytes_before, "after": model.palu.nbytes_after(model)},
        "weight_nbytes": {"before": whole_before, "after": _weight_nbytes(model)},
        "cache": {
            "tokens": CACHE_TOKENS,
            "nbytes": nbytes,
            "dense_nbytes_16": dense_nbytes,
            "bits": 16 * nbytes / dense_nbytes,
        },
        "evaluation": None
        if not scored
        else {
            "text": held_out_source,
            "windows": windows,
            "perplexity": perplexity,
            "ratio": perplexity["converted"] / perplexity["dense"],
            "cache": report,
        },
        "seconds": seconds,
    }


def _evaluate(model: Any, scored: Sequence[Any], settings: Any, progress: Any) -> tuple[float, dict[str, Any] | None]:
    """Perplexity of the converted model: through its own cache where latents are quantized, else in one reading."""
    from kvsketch.adapters.palu import PaluCache
    from kvsketch.adapters.palu_evaluation import read_windows

    new_cache = None if settings.latent_bits is None else lambda: PaluCache.for_model(model)
    with user_errors("--latent-bits"):
        reading = read_windows(
            *(model, scored), prompt_tokens=PROMPT_TOKENS, new_cache=new_cache, title="Reading", progress=progress
        )
    return reading.perplexity, reading.cache


def _weight_nbytes(model: Any) -> int:
    """Bytes of all weights of `model`, tied ones once."""
    own = {x.data_ptr(): x.numel() * x.element_size() for x in [*model.parameters(), *model.buffers()]}
    return sum(own.values())


def _describe_ranks(ranks: Sequence[int]) -> str:
    """Ranks of a layer's slices in few characters: ``96``, ``4 x 32``, or their sum and range."""
    if len(set(ranks)) == 1:
        return str(ranks[0]) if len(ranks) == 1 else f"{len(ranks)} x {ranks[0]}"
    return f"{sum(ranks)} in {len(ranks)} of {min(ranks)}-{max(ranks)}"


def _print_record(record: dict[str, Any]) -> None:
    """A table of ranks, then sizes and perplexity in lines."""
    rows = []
    for layer in record["layers"]:
        sides = [layer[f"{side}_ranks"] for side in ("key", "value")]
        rows.append(
            (
                str(layer["layer"]),
                *(_describe_ranks(ranks) for ranks in sides),
                *(("#" * round(BAR_WIDTH * sum(ranks) / layer["width"])).ljust(BAR_WIDTH) for ranks in sides),
            )
        )
    settings = record["settings"]
    print_table(
        f"Ranks a slice: {settings['factors']} factors, {settings['granularity']} heads, {settings['ranks']} ranks",
        ("layer", "keys", "values", "keys kept", "values kept"),
        rows,
        f"{record['kept']:.4f} of all numbers are kept (asked for: {settings['keep']:g}); a full bar is "
        f"{BAR_WIDTH} marks.",
    )
    for what, key in (("attention weights", "attention_weight_nbytes"), ("all weights", "weight_nbytes")):
        before, after = (record[key][when] / 1e6 for when in ("before", "after"))
        typer.echo(f"{what}: {before:.1f} MB before, {after:.1f} MB after")
    cache = record["cache"]
    typer.echo(
        f"cache of {cache['tokens']} tokens: {cache['nbytes'] / 1e6:.2f} MB, {cache['bits']:.2f} bits a number all-in "
        f"(dense in 16 bits: {cache['dense_nbytes_16'] / 1e6:.2f} MB)"
    )
    if record["evaluation"] is not None:
        evaluation = record["evaluation"]
        by = "" if evaluation["cache"] is None else f", through a cache of {evaluation['cache']['bits']:.2f} bits"
        typer.echo(
            f"perplexity on {evaluation['text']}: {evaluation['perplexity']['dense']:.3f} dense, "
            f"{evaluation['perplexity']['converted']:.3f} converted{by}: x{evaluation['ratio']:.4f}"
        )
    typer.echo(f"Wrote {record['out']}")
