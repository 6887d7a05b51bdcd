"""What the commands share: reading what a user asked for, saying clearly what is wrong with it, progress and tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvsketch.methods import LatentMethod, Method, get_method

if TYPE_CHECKING:
    from kvsketch.evaluation import Result

DTYPES = ("float32", "bfloat16", "float16")
#: The optional extras that bring a package, where these are not the command line's own.
EXTRAS = {"peft": "cli,hf,tune"}
#: Columns of a table that is not written to a terminal.
PLAIN_WIDTH = 100

CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
#: Where progress is shown: on stderr, and only when that is a terminal.
PROGRESS_CONSOLE = Console(stderr=True)


def fail(message: str) -> NoReturn:
    """End the command with one line on stderr about a user's mistake, and exit code 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def user_errors(option: str) -> Iterator[None]:
    """Turn an error that `option` led to into :func:`fail`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        fail(f"{option}: {error}")
    except ModuleNotFoundError as error:
        extras = EXTRAS.get(error.name or "", "cli,hf")
        fail(f"{option}: needs the package {error.name}; run: pip install 'kvsketch[{extras}]'")


def at_least(low: int, option: str, value: int | None) -> None:
    """Fail unless `value` is None or at least `low`."""
    if value is not None and value < low:
        fail(f"{option} must be at least {low}, got {value}")


def one_of(choices: Sequence[str], option: str, value: str) -> None:
    """Fail unless `value` is one of `choices`."""
    if value not in choices:
        fail(f"{option} must be {' or '.join(choices)}, got {value!r}")


def split_methods(text: str) -> list[str]:
    """The methods named in `text`, with commas between; the commas inside a spelled-out method stay where they are.

    What follows a comma belongs to the method before when it is a setting of a codec, ``name=value`` with another name
    than ``keys`` or ``values``.
    """
    names: list[str] = []
    for part in text.split(","):
        setting = re.match(r"\s*(\w+)=", part)
        if names and setting and setting[1] not in ("keys", "values"):
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    for name in names:
        if names.count(name) > 1:
            fail(f"--methods names {name!r} twice; give each method once")
    return names


def parse_method(option: str, name: str, residual_length: int | None, sink_tokens: int | None) -> Method:
    """The method called `name` in `option`, with the window and first tokens that were asked for."""
    at_least(0, "--residual-length", residual_length)
    at_least(0, "--sink-tokens", sink_tokens)
    with user_errors(option):
        return get_method(name).with_settings(residual_length=residual_length, sink_tokens=sink_tokens)


def read_text(path: Path | None, option: str = "--text") -> tuple[str, str]:
    """The text of `path`, which `option` named, and a name for it; without a path, the manual that every Python has."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)), "Python's manual (pydoc_data.topics)"
    if not path.exists():
        fail(f"{option} {path}: there is no such file; give an existing text file")
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except UnicodeDecodeError as error:
        fail(f"{option} {path}: not UTF-8 ({error.reason} at byte {error.start}); convert the file to UTF-8")
    except OSError as error:
        fail(f"{option} {path}: cannot be read ({error.strerror}); give a readable text file")


def writable(option: str, path: Path | None) -> None:
    """Fail before the work when its result could not be written to `path`."""
    if path is None:
        return
    if path.is_dir():
        fail(f"{option} {path}: this is a folder; give a file name in it")
    if not path.parent.is_dir():
        fail(f"{option} {path}: there is no folder {path.parent}; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        fail(f"{option} {path}: may not be written; name a file that you may write")


def quiet_transformers() -> None:
    """Keep transformers from drawing bars and writing warnings; to be called before torch is imported."""
    # Read when torch and tqdm are imported: how long torch's threads spin before they sleep (with the default, one
    # busy neighbour makes a step twenty times slower), and no bars that transformers draws by itself.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_language_model(name: str, dtype: str, threads: int | None) -> tuple[Any, Any]:
    """Model and tokenizer called `name`, computing in `dtype` with `threads` threads."""
    if dtype not in DTYPES:
        fail(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    return _load("--model", name, dtype, threads)


def load_converted_model(argument: str, folder: Path, threads: int | None) -> tuple[Any, Any]:
    """Model and tokenizer in `folder`, which `argument` named and ``kvsketch palu`` wrote, in their own dtype."""
    from kvsketch.adapters.palu_saving import is_converted

    if not is_converted(folder):
        fail(f"{argument}: {folder} is no folder of a converted model; convert one first with kvsketch palu")
    return _load(argument, str(folder), None, threads)


def load_original_model(name: str, converted: Any, dtype: str) -> Any:
    """The model called `name`, in `dtype`, which must be the one that `converted` was made from."""
    from kvsketch.adapters.palu_original import check_original

    model, _ = _load("--original", name, dtype, threads=None)
    with user_errors(f"--original {name}"):
        check_original(converted, model)
    return model


def _load(option: str, name: str, dtype: str | None, threads: int | None) -> tuple[Any, Any]:
    at_least(1, "--threads", threads)
    with user_errors(option), waiting(f"Loading {name}"):
        quiet_transformers()
        import torch

        from kvsketch.adapters.models import load_model
        from kvsketch.environment import set_threads

        set_threads(torch.get_num_threads() if threads is None else threads)
        return load_model(name, dtype=dtype)


def note_length(model: Any, tokens: int) -> None:
    """Say so when `tokens` are more than the model was made for."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        typer.echo(f"note: {tokens} tokens are more than the {limit} that the model was made for", err=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that `what` is going on; nothing where stderr is no terminal."""
    with PROGRESS_CONSOLE.status(what):
        yield


def preparing(method: Method | LatentMethod) -> AbstractContextManager[None]:
    """Show that `method` is being warmed up."""
    return waiting(f"Preparing {method.name} (the first time, its kernels are compiled)")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar that follows calls with (description, completed, total); nothing where stderr is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Drawn rarely, since decode steps are timed meanwhile.
    with Progress(
        *columns,
        console=PROGRESS_CONSOLE,
        transient=True,
        refresh_per_second=2,
        disable=not PROGRESS_CONSOLE.is_terminal,
    ) as bar:
        task = bar.add_task("Starting", total=None)

        def update(description: str, completed: int, total: int | None) -> None:
            bar.update(task, description=description, completed=completed, total=total)

        yield update


def print_results(results: Sequence[Result], setting: dict[str, Any]) -> None:
    """Print two tables of 80 columns: size and quality, then speed and memory."""
    first = results[0]
    print_table(
        f"Size and quality: {setting['windows']} x {setting['score_tokens']} tokens of {setting['text']} after "
        f"{setting['prompt_tokens']}, {setting['model']} in {setting['dtype']}",
        ("method", "keys", "values", "bits", "MB", "vs 16", "ppl", "ratio", "KL", "top-1"),
        [
            (
                r.method,
                *(f"{bits:.2f}" for bits in (r.key_bits, r.value_bits, r.bits)),
                f"{r.cache_bytes / 1e6:.2f}",
                f"{r.ratio:.2f}x",
                f"{r.perplexity:.2f}",
                f"{r.perplexity_ratio:.4f}",
                f"{r.kl:.4f}",
                f"{r.top1:.3f}",
            )
            for r in results
        ],
        f"Bits a number, exact tokens included, in a cache of {first.tokens} tokens; 'vs 16': times smaller than dense "
        f"in 16 bits ({first.dense_bytes / 1e6:.2f} MB). Quality against {setting['baseline']}: perplexity (ppl), over "
        "its own (ratio), mean KL in nats, agreement on the likeliest token.",
    )
    floors = " and ".join(sorted({f"{r.floor_ms:.1f}" for r in results}))
    threads = "1 thread" if setting["threads"] == 1 else f"{setting['threads']} threads"
    warning = ". CONTENDED: something else was running, do not trust the times" if first.contended else ""
    print_table(
        f"One decode step at {first.tokens} tokens, {threads}{warning}",
        ("method", "step ms", "quartiles", "attention", "tokens/s", "peak MB"),
        [
            (
                r.method,
                f"{r.decode_ms:.1f}",
                f"{r.decode_q1_ms:.1f} - {r.decode_q3_ms:.1f}",
                f"{r.attention_ms:.1f}",
                f"{r.tokens_per_s:.1f}",
                "unknown" if r.peak_step_mb is None else f"{r.peak_step_mb:.1f}",
            )
            for r in results
        ],
        f"Milliseconds: median and quartiles; 'attention' is the median without the model's own {floors} "
        "ms, a step with an empty context. Peak memory of cache and step.",
    )


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str,
    *,
    text_widths: Sequence[int | None] = (None,),
) -> None:
    """Print a table.

    Its first columns are text, on as many lines as it takes in columns of these widths (None: what is left); the others
    are numbers.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, width in zip(columns, text_widths, strict=False):
        table.add_column(name, overflow="fold", width=width)
    for name in columns[len(text_widths) :]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    CONSOLE.print()
    CONSOLE.print(Text(title, style="bold"))
    CONSOLE.print(table)
    CONSOLE.print(Text(note, style="dim"))
