"""The command ``kvsketch``: generate text on a compressed cache, compare methods, check the theory, show the machine.

A user's mistake ends with one line on stderr, which names the option, its value and what to do, and exit code 2.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch._attend import COEFFICIENTS
from kvsketch.cli_palu import palu, parse_any_method
from kvsketch.cli_palu_tune import palu_tune
from kvsketch.cli_validate import validate
from kvsketch.console import (
    DTYPES,
    at_least,
    fail,
    load_language_model,
    load_original_model,
    note_length,
    one_of,
    preparing,
    print_results,
    progress_bar,
    read_text,
    split_methods,
    user_errors,
    writable,
)
from kvsketch.methods import LatentMethod

DEMO_METHODS = "exact,kivi-4,kivi-2,qjl-paper,qjl-512"

app = typer.Typer(
    help="Compressed key-value caches for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelOption = Annotated[
    str, typer.Option(help="smollm2 (SmolLM2-135M-Instruct, from a package), a local directory or a hub name.")
]
DtypeOption = Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")]
CoefficientsOption = Annotated[
    str, typer.Option(help="What attention may round to: int16, or int8, which is faster and coarser.")
]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads to compute with. [default: torch's choice]")]
ResidualOption = Annotated[
    int | None, typer.Option(help="Newest tokens kept exact. [default: the method's own, 32 or 128]")
]
SinkOption = Annotated[int | None, typer.Option(help="First tokens kept exact. [default: the method's own, 4 or 0]")]


def main() -> None:
    """Entry point of the command ``kvsketch``."""
    app()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask, or with --raw the text to continue.", show_default=False)],
    model: ModelOption = "smollm2",
    method: Annotated[
        str,
        typer.Option(
            help="Compression method; kvsketch compare --help says more. For a model that kvsketch palu converted also "
            "palu, palu-exact or palu-BITS."
        ),
    ] = "kivi-2",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    residual_length: ResidualOption = None,
    sink_tokens: SinkOption = None,
    coefficients: CoefficientsOption = "int16",
    threads: ThreadsOption = None,
    dtype: DtypeOption = "float32",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt instead of answering it as a chat.")] = False,
) -> None:
    """Stream a greedy answer to PROMPT, generated on a compressed cache."""
    if not prompt.strip():
        fail("PROMPT is empty; give a question or a text")
    at_least(1, "--max-new-tokens", max_new_tokens)
    one_of(COEFFICIENTS, "--coefficients", coefficients)
    chosen = parse_any_method("--method", method, residual_length, sink_tokens, coefficients)
    language_model, tokenizer = load_language_model(model, dtype, threads)
    from kvsketch.adapters.palu import PaluCache
    from kvsketch.adapters.transformers_cache import CompressedCache
    from kvsketch.evaluation import cache_argument, warm_up

    cache: CompressedCache
    with preparing(chosen), user_errors("--method"):
        warm_up(language_model, chosen, coefficients)
    if isinstance(chosen, LatentMethod):
        cache = PaluCache.for_model(language_model, **chosen.options)
    else:
        cache = CompressedCache.for_model(language_model, chosen, coefficients=coefficients)
    if raw or tokenizer.chat_template is None:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    else:
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
    note_length(language_model, ids.shape[1] + max_new_tokens)
    clock = TokenClock()
    pad_token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    language_model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad_token,
        streamer=clock.streamer(tokenizer),
        **{cache_argument(language_model): cache},
    )
    total = cache.report()["total"]
    smaller, smaller_than_model = (total[f"dense_nbytes_{kind}"] / total["nbytes"] for kind in ("16", "model"))
    typer.echo(
        f"\n{clock.tokens} tokens at {clock.tokens_per_second:.1f} tokens/s, after a prompt of {ids.shape[1]} in "
        f"{clock.prompt_seconds:.2f} s. {cache.method.name} cache of {total['tokens']} tokens: "
        f"{total['nbytes'] / 1e6:.2f} MB, {total['bits']:.2f} bits a number, {smaller:.1f} times smaller than dense in "
        f"16 bits and {smaller_than_model:.1f} times than dense in {dtype}."
    )


class TokenClock:
    """When tokens came: the prompt's time and the rate after the first new token."""

    def __init__(self) -> None:
        self.tokens = 0
        self._started = self._first = self._last = time.perf_counter()

    def streamer(self, tokenizer: Any) -> Any:
        """A streamer for ``model.generate`` that prints new text as it comes and tells this clock."""
        from transformers import TextStreamer

        clock = self

        class Streamer(TextStreamer):  # type: ignore[misc]
            def put(self, value: Any) -> None:
                if self.next_tokens_are_prompt:
                    clock._started = time.perf_counter()
                else:
                    clock.tick()
                super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                typer.echo(text, nl=stream_end)

        return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def tick(self) -> None:
        """Note that a token came."""
        self.tokens += 1
        self._last = time.perf_counter()
        if self.tokens == 1:
            self._first = self._last

    @property
    def prompt_seconds(self) -> float:
        return self._first - self._started

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first a second; of the first one where it is alone."""
        if self.tokens < 2:
            return 1 / max(self.prompt_seconds, 1e-9)
        return (self.tokens - 1) / (self._last - self._first)


@app.command()
def compare(
    model: ModelOption = "smollm2",
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text file to read. [default: the manual that comes with Python]")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, with commas between: exact, kivi-4, kivi-3, kivi-2, kivi-2-paper, qjl-paper, qjl-256, "
            "qjl-512, or any combination such as 'keys=sketch:m=256,outliers=8,outlier_m=256;values=ints:bits=2'. For "
            "a model that kvsketch palu converted also palu, palu-exact or palu-BITS."
        ),
    ] = DEMO_METHODS,
    original: Annotated[
        str | None,
        typer.Option(
            help="The model that --model was converted from: its dense cache is then what all is compared with, and "
            "the other methods are its own."
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a window that are read exactly first.")] = 2048,
    score_tokens: Annotated[int, typer.Option(help="Tokens of a window that are then predicted and scored.")] = 256,
    residual_length: ResidualOption = None,
    sink_tokens: SinkOption = None,
    windows: Annotated[int, typer.Option(help="Windows of text, one after the other from its beginning.")] = 1,
    baseline: Annotated[bool, typer.Option("--baseline", help="Add a row for transformers' own dense cache.")] = False,
    coefficients: CoefficientsOption = "int16",
    threads: ThreadsOption = None,
    dtype: DtypeOption = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None,
) -> None:
    """Measure methods on a text: bits, memory, quality against the dense cache, and time of a decode step.

    Exits with 1 when the method `exact`, if asked for, does not give what transformers' own cache gives.
    """
    at_least(1, "--prompt-tokens", prompt_tokens)
    at_least(1, "--score-tokens", score_tokens)
    at_least(1, "--windows", windows)
    one_of(COEFFICIENTS, "--coefficients", coefficients)
    for option, file in (("--json", json_file), ("--report", report)):
        writable(option, file)
    chosen = [
        parse_any_method("--methods", name, residual_length, sink_tokens, coefficients)
        for name in split_methods(methods)
    ]
    content, source = read_text(text)
    language_model, tokenizer = load_language_model(model, dtype, threads)
    converted = getattr(language_model, "palu", None) is not None
    if original is not None and not converted:
        fail(f"--original {original}: {model} is not converted by Palu; leave --original out, or name a converted one")
    dense_model = None if original is None else load_original_model(original, language_model, dtype)
    from kvsketch.environment import describe_environment
    from kvsketch.evaluation import check_exact, compare_methods, text_windows, warm_up

    with user_errors(f"--text {source}"):
        ids = text_windows(tokenizer, content, prompt_tokens=prompt_tokens, score_tokens=score_tokens, windows=windows)
    for method in chosen:
        with (
            preparing(method),
            user_errors(f"--methods {method.name}"),
        ):
            own = dense_model is None or isinstance(method, LatentMethod)
            warm_up(language_model if own else dense_model, method, coefficients)
    note_length(language_model, prompt_tokens + score_tokens)
    with progress_bar() as progress, user_errors("--model"):
        results = compare_methods(
            language_model,
            ids,
            chosen,
            prompt_tokens=prompt_tokens,
            original=dense_model,
            baseline=baseline,
            coefficients=coefficients,
            progress=progress,
        )
    setting = {"model": model, "text": source, "dtype": dtype, "prompt_tokens": prompt_tokens} | {
        "score_tokens": score_tokens,
        "windows": windows,
        "original": original,
        "baseline": _describe_baseline(converted, original),
        "threads": int(describe_environment()["threads"]["torch"]),
    }
    print_results(results, setting)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(r) | setting for r in results], indent=2) + "\n")
        typer.echo(f"Wrote {json_file}")
    check = check_exact(results, dtype)
    if report is not None:
        from kvsketch.report import render_report

        report.write_text(render_report(results, setting, check), encoding="utf-8")
        typer.echo(f"Wrote {report}")
    if check is not None:
        passed, sentence = check
        typer.echo(f"{'ok' if passed else 'FAILED'}: {sentence}")
        if not passed:
            raise typer.Exit(1)


def _describe_baseline(converted: bool, original: str | None) -> str:
    """What the columns of quality compare with."""
    if not converted:
        return "the dense cache"
    if original is not None:
        return f"the dense cache of {original}, which was converted"
    return (
        "the dense cache of the converted model itself, with exact latents (what conversion lost is not in these "
        "figures; --original names the model that was converted)"
    )


app.command()(validate)
app.command()(palu)
app.command()(palu_tune)


@app.command()
def info() -> None:
    """Show versions, engines found, devices, threads and kernel caches."""
    from kvsketch.environment import show_config

    show_config()


if __name__ == "__main__":
    main()
