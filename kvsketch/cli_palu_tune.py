"""The command ``kvsketch palu-tune``: train a converted model for a few steps, to recover what conversion lost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli_palu import PROMPT_TOKENS, checked_options, cut_windows, read_texts
from kvsketch.console import (
    at_least,
    fail,
    load_converted_model,
    load_original_model,
    print_table,
    progress_bar,
    quiet_transformers,
    user_errors,
    writable,
)

#: Share of the steps whose losses are averaged, at the beginning and at the end.
LOSS_SHARE = 0.1


def palu_tune(
    converted: Annotated[Path, typer.Argument(help="Folder that kvsketch palu wrote.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="New folder for the tuned model.", show_default=False)],
    text: Annotated[Path, typer.Option(help="UTF-8 text to train on.", show_default=False)],
    steps: Annotated[int, typer.Option(help="Steps, of one window of text each.")] = 100,
    rank: Annotated[int, typer.Option(help="Rank of the additions to each down projection.")] = 8,
    loss: Annotated[
        str,
        typer.Option(help="next-token, or distillation: the distance from what --original predicts."),
    ] = "next-token",
    original: Annotated[
        str | None, typer.Option(help="The model that was converted, for --loss distillation and for comparison.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of the first step; it falls to zero.")] = 1e-3,
    window: Annotated[int, typer.Option(help="Tokens of a step.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the order of windows and of the first weights.")] = 0,
    evaluate: Annotated[
        Path | None, typer.Option(help="UTF-8 text to measure perplexity on, before and after.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of 1024 tokens to measure it on.")] = 4,
    threads: Annotated[int | None, typer.Option(help="Threads to compute with. [default: torch's choice]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was measured to this file.")] = None,
) -> None:
    """Tune CONVERTED on a text into OUT: low-rank additions to its down projections, trained and merged.

    Ranks, cache and sizes stay what they were.
    """
    at_least(1, "--windows", windows)
    writable("--json", json_file)
    with user_errors("palu-tune"):
        quiet_transformers()
        from kvsketch.adapters.palu_saving import check_new_folder
        from kvsketch.adapters.palu_tuning import TuningSettings
    settings = checked_options(
        *(TuningSettings,),
        **{"steps": steps, "rank": rank, "loss": loss, "learning_rate": learning_rate, "window": window, "seed": seed},
    )
    if loss == "distillation" and original is None:
        fail("--loss distillation needs the model that was converted; name it with --original")
    with user_errors("OUT"):
        check_new_folder(out)
    content, source, held_out, held_out_source = read_texts("--text", text, evaluate)
    model, tokenizer = load_converted_model("CONVERTED", converted, threads)
    teacher = None if original is None else load_original_model(original, model, "float32")
    record = _run(model, tokenizer, teacher, out, settings, content, source, held_out, held_out_source, windows)
    record |= {"converted": str(converted), "original": original}
    _print_record(record)
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        typer.echo(f"Wrote {json_file}")


def _run(
    model: Any,
    tokenizer: Any,
    teacher: Any,
    out: Path,
    settings: Any,
    content: str,
    source: str,
    held_out: str,
    held_out_source: str,
    windows: int,
) -> dict[str, Any]:
    """Evaluate, tune, evaluate again and save; everything measured, by name."""
    from kvsketch.adapters.palu import save_pretrained
    from kvsketch.adapters.palu_evaluation import read_windows
    from kvsketch.adapters.palu_tuning import tune

    scored = cut_windows(tokenizer, held_out, held_out_source, windows)
    perplexity: dict[str, float] = {}
    cached: dict[str, Any] = {}
    with progress_bar() as progress:
        if scored and teacher is not None:
            reading = read_windows(
                teacher, scored, prompt_tokens=PROMPT_TOKENS, title="Reading the original", progress=progress
            )
            perplexity["original"] = reading.perplexity
        if scored:
            perplexity["converted"], cached["converted"] = _evaluate(model, scored, progress)
        start = time.perf_counter()
        with user_errors("--text"):
            losses = tune(
                *(model, tokenizer, content),
                settings=settings,
                original=teacher if settings.loss == "distillation" else None,
                progress=progress,
            )
        seconds = time.perf_counter() - start
        if scored:
            perplexity["tuned"], cached["tuned"] = _evaluate(model, scored, progress)
        with user_errors("OUT"):
            save_pretrained(model, out, tokenizer)
    ends = max(1, round(LOSS_SHARE * len(losses)))
    return {
        "out": str(out),
        "settings": asdict(settings),
        "text": source,
        "losses": losses,
        "loss": {"first": sum(losses[:ends]) / ends, "last": sum(losses[-ends:]) / ends, "steps": ends},
        "seconds": seconds,
        "evaluation": None
        if not scored
        else {
            "text": held_out_source,
            "windows": windows,
            "perplexity": perplexity,
            "cached": cached if any(cached.values()) else None,
            "ratio": perplexity["tuned"] / perplexity["converted"],
        },
    }


def _evaluate(model: Any, scored: Sequence[Any], progress: Any) -> tuple[float, dict[str, float] | None]:
    """Perplexity on exact latents, and where the model quantizes them through its own cache: that and its bits."""
    from kvsketch.adapters.palu import PaluCache
    from kvsketch.adapters.palu_evaluation import read_windows

    exact = read_windows(model, scored, prompt_tokens=PROMPT_TOKENS, title="Reading", progress=progress)
    if model.palu.settings.latent_bits is None:
        return exact.perplexity, None
    reading = read_windows(
        *(model, scored),
        prompt_tokens=PROMPT_TOKENS,
        new_cache=lambda: PaluCache.for_model(model),
        title="Reading through the cache",
        progress=progress,
    )
    return exact.perplexity, {"perplexity": reading.perplexity, "bits": (reading.cache or {})["bits"]}


def _print_record(record: dict[str, Any]) -> None:
    """The training loss in a line, then a table of perplexities and what became of them."""
    loss, settings = record["loss"], record["settings"]
    typer.echo(
        f"{settings['loss']} loss on {record['text']}: {loss['first']:.4f} in the first {loss['steps']} steps, "
        f"{loss['last']:.4f} in the last, of {settings['steps']}, in {record['seconds']:.0f} s"
    )
    evaluation = record["evaluation"]
    if evaluation is not None:
        perplexity, cached = evaluation["perplexity"], evaluation["cached"]
        base = perplexity.get("original", perplexity["converted"])
        rows: list[tuple[str, ...]] = []
        for name, value in perplexity.items():
            row: tuple[str, ...] = (name, f"{value:.3f}", f"{value / base:.4f}")
            if cached is not None:
                through = cached.get(name)
                row += ("", "") if through is None else (f"{through['perplexity']:.3f}", f"{through['bits']:.2f}")
            rows.append(row)
        compared = "original" if "original" in perplexity else "converted"
        print_table(
            f"Perplexity on {evaluation['text']}, {evaluation['windows']} windows",
            ("model", "exact latents", f"over {compared}", *(() if cached is None else ("its cache", "bits"))),
            rows,
            _verdict(perplexity),
        )
    typer.echo(f"Wrote {record['out']}")


def _verdict(perplexity: dict[str, float]) -> str:
    """Whether tuning helped on text that was not trained on, and whether by more than it can have recovered."""
    ratio = perplexity["tuned"] / perplexity["converted"]
    if ratio < 1:
        sentence = f"Tuning lowered perplexity on text that was not trained on by {1 - ratio:.2%}."
        if perplexity["tuned"] < perplexity.get("original", 0):
            sentence += (
                " That is below the original's: the kind of text was learnt too, so evaluate on text of another kind, "
                "or use --loss distillation."
            )
        return sentence
    return f"No gain: on text that was not trained on, perplexity changed by {ratio - 1:+.2%}."
