"""All declared instantiations of this engine's kernels, which ``make kernels`` compiles for every architecture.

Kernels of attention are templates on codecs; pairs of codecs that are not here are compiled when they are first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvsketch._checks import BITS, FLOAT_DTYPES
from kvsketch.codecs import Codec, Exact, GroupedInts, Side, SignSketch, TokenInts
from kvsketch.cuda_raw import attention, attention_mma, attention_simt, device_step, palu, palu_plan
from kvsketch.cuda_raw.attention_instances import EXACT, SIMT
from kvsketch.cuda_raw.attention_mma_instances import MMA
from kvsketch.cuda_raw.attention_plan import PageKernel
from kvsketch.cuda_raw.encode_instances import ENCODE
from kvsketch.cuda_raw.palu_instances import MMA as LATENTS_MMA
from kvsketch.cuda_raw.palu_instances import PALU
from kvsketch.cuda_raw.palu_plan import LatentKernel
from kvsketch.layout import LANES, page_layout, side_layout

#: Turing, A100, RTX 30, RTX 40, H100 and H200, B200, RTX 50.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
#: Channels of a head, and rows of its sketches, where blocks differ in size by them.
HEAD, SKETCH_ROWS = 128, 256
#: Latents: heads that share them, their numbers, and query rows of all heads; and true first tokens.
LATENT_HEADS, RANK, LATENT_QUERIES, FIRST_TOKENS = 4, 256, 16, 4


class Block(NamedTuple):
    """How a kernel is launched."""

    threads: int
    shared: int  #: bytes of dynamic shared memory


class Instance(NamedTuple):
    """A kernel of a ``.cu`` file with its template arguments, and its block on each architecture that it is for."""

    file: str
    expression: str
    blocks: dict[int, Block]

    @property
    def kernel(self) -> str:
        """Its name alone."""
        return self.expression.partition("<")[0]


def _everywhere(file: str, expression: str, threads: int, shared: int = 0) -> Instance:
    return Instance(file, expression, dict.fromkeys(ARCHITECTURES, Block(threads, shared)))


def _chosen(kernels: Iterable[tuple[int, PageKernel | LatentKernel | str]]) -> Instance:
    """The instance that planning chooses, by architecture; a reason why there is none leaves one out."""
    found = {a: kernel for a, kernel in kernels if not isinstance(kernel, str)}
    [(file, expression)] = {(kernel.file, kernel.expression) for kernel in found.values()}
    return Instance(file, expression, {a: Block(kernel.threads, kernel.shared) for a, kernel in found.items()})


def _codecs(side: Side) -> dict[str, tuple[Codec, str]]:
    """Codecs of a side, and the dtype of numbers that stay exact, by their names in C++."""
    codecs: list[Codec] = [Exact(), *map(GroupedInts, BITS), *map(TokenInts, BITS)]
    if side == "keys":
        codecs.append(SignSketch(m=SKETCH_ROWS))
    name = attention_simt.key_codec if side == "keys" else attention_simt.value_codec
    return {
        name(side_layout(side, codec, LANES, HEAD, dtype).spec): (codec, dtype)
        for codec in codecs
        for dtype in FLOAT_DTYPES
    }


def _simt() -> Iterator[Instance]:
    """Attention without tensor cores, over pages and over exact tokens."""
    of_keys, of_values = _codecs("keys"), _codecs("values")
    for keys, values, queries, warps in SIMT:
        (k, key_dtype), (v, value_dtype) = of_keys[keys], of_values[values]
        width = _width(warps)
        layout = page_layout(k, v, width, width, key_dtype=key_dtype, value_dtype=value_dtype)
        yield _chosen((a, attention_simt.page_kernel(layout, queries, a)) for a in ARCHITECTURES)
    for number, queries, warps in EXACT:
        _, dtype = of_keys[f"ExactKeys<{number}>"]
        width = _width(warps)
        layout = page_layout(Exact(), Exact(), width, width, key_dtype=dtype, value_dtype=dtype)
        yield _chosen((a, attention_simt.exact_kernel(layout, queries, a)) for a in ARCHITECTURES)
    for name, threads in (
        ("prepare_queries", attention.PREPARE_THREADS),
        ("sketch_queries", attention.SKETCH_ROWS),
        ("combine_splits", attention.COMBINE_THREADS),
    ):
        yield _everywhere(attention.COMBINE_FILE, name, threads)
    yield _everywhere(device_step.FILE, "append_token", device_step.THREADS)


def _width(warps: int) -> int:
    """Channels of heads that take so many warps: the usual number, unless that takes fewer."""
    return HEAD if warps == attention_simt.WARPS[0] else LANES * warps


def _mma() -> Iterator[Instance]:
    """Attention on tensor cores."""
    for case in MMA:
        queries = case.ratio * case.s
        yield _chosen((a, attention_mma.page_kernel(case.layout, queries, a, case.coefficients)) for a in ARCHITECTURES)


def _palu() -> Iterator[Instance]:
    """Attention over latents: both kernels over tokens, and what is around them."""
    heads = palu_plan.Keys(LATENT_HEADS, HEAD, rotary=HEAD)
    # By the bytes that a latent is on tensor cores.
    codecs = {1: TokenInts(4), 2: TokenInts(4, LANES)}
    names = {planes: name for name, planes in palu_plan.PLANES.items()}
    for keys, values, matrix in LATENTS_MMA:
        layout = page_layout(codecs[keys], codecs[values], RANK, RANK)
        yield _chosen(
            (a, palu_plan.mma_kernel(layout, heads, LATENT_QUERIES, a, names[matrix], exact=False))
            for a in ARCHITECTURES
        )
    for scored in (heads, palu_plan.Keys(1, LATENT_QUERIES, whole=True)):
        layout = page_layout(codecs[1], codecs[1], RANK, RANK)
        yield _chosen((a, palu_plan.simt_kernel(layout, scored, LATENT_QUERIES, a)) for a in ARCHITECTURES)
    for file, expression in PALU:
        if file == palu_plan.PREPARE_FILE:
            yield Instance(file, expression, {a: Block(palu_plan.MMA_THREADS, 0) for a in _with_tensor_cores()})
        elif file == palu_plan.FIRST_FILE:
            yield _everywhere(file, expression, palu.FIRST_THREADS, 4 * FIRST_TOKENS)


def _with_tensor_cores() -> list[int]:
    return [a for a in ARCHITECTURES if a >= palu_plan.MMA_ARCHITECTURE]


INSTANCES = (*(_everywhere(*launched) for launched in ENCODE), *_simt(), *_mma(), *_palu())
