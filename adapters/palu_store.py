"""Latents of one layer: a :class:`kvsketch.cache.Cache` a slice, and the true keys and values of rows' first tokens.

It looks to the adapter's layers as a single cache does, and counts its bits against the keys and values that the
latents stand for.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch._dispatch import engine_for, kernel_level, namespace, on_device_of
from kvsketch._exact_store import take_rows
from kvsketch.cache import Cache
from kvsketch.codecs import Codec
from kvsketch.layout import page_layout
from kvsketch.methods import LayerSettings
from kvsketch.palu import FirstTokens, Reconstruction


class LatentStore:
    """The caches of a layer's slices, which grow and shrink together.

    Latents of all tokens are stored, those of first tokens too, whose true keys and values are used instead.

    Parameters
    ----------
    slices
        Number of slices.
    codec
        What latents are stored with, keys' and values' alike.
    heads, d
        Key/value heads of the layer and their size.
    first_tokens
        First tokens of a row whose true keys and values are kept.
    rebuilds
        Whether attention rebuilds keys (:func:`kvsketch.palu.attend`), or each slice's cache attends by itself.
    name, options
        How errors call the layer, and further arguments of :class:`~kvsketch.cache.Cache`.
    """

    def __init__(
        self,
        slices: int,
        codec: Codec,
        *,
        heads: int,
        d: int,
        first_tokens: int,
        rebuilds: bool,
        name: str,
        options: dict[str, Any],
    ) -> None:
        self.slices = [
            Cache(codec, codec, residual_length=0, sink_tokens=0, name=f"{name}, slice {i}", **options)
            for i in range(slices)
        ]
        self.heads, self.d, self.dv = heads, d, d
        self.first_tokens, self.rebuilds, self.name = first_tokens, rebuilds, name
        self._forget_first()
        #: Of the last attention that rebuilt keys: query rows of a slice, and how it was computed.
        self._asked: tuple[int, bool, dict[str, str]] = (0, False, {})

    def __repr__(self) -> str:
        return f"LatentStore({self.name!r}, {len(self.slices)} slices, length={self.length})"

    def _forget_first(self) -> None:
        #: (b, h, first_tokens, d): true keys, after RoPE, and true values of each row's first tokens.
        self.first_keys: Any = None
        self.first_values: Any = None

    # -- growing ------------------------------------------------------------------------------------------------------

    def append(self, keys: Sequence[Any], values: Sequence[Any], *, valid: Any = None) -> None:
        """Add latents (b, 1, s, r) of each slice; `valid` (b, s) is False where a position is padding.

        When a slice refuses, those before it have grown: crop to the length before.
        """
        for cache, k, v in zip(self.slices, keys, values, strict=True):
            cache.append(k, v, valid=valid)

    def keep_first(self, rows: Any, places: Any, keys: Any, values: Any) -> None:
        """Keep true keys and values (t, h, d) of the tokens at `places` (t,) of `rows` (t,), which were appended."""
        with on_device_of(keys):
            if self.first_keys is None:
                xp, shape = namespace(keys), (self.batch, self.heads, self.first_tokens, self.d)
                self.first_keys, self.first_values = xp.zeros(shape, keys.dtype), xp.zeros(shape, values.dtype)
            self.first_keys[rows, :, places] = keys
            self.first_values[rows, :, places] = values

    def first(self) -> FirstTokens | None:
        """What is kept of first tokens."""
        if self.first_keys is None:
            return None
        return FirstTokens(self.first_keys, self.first_values, self.first_counts)

    def note_queries(self, queries: int, q: Any, matrices: Reconstruction, **given: Any) -> None:
        """Remember for :meth:`report` how `queries` rows of a slice attend; q (b, hq, s, d), and what else is given."""
        told, with_first = self._asked[:2], given["first"] is not None
        if told == (queries, with_first):
            return
        cache, op = self.slices[0], "palu.attend"
        shapes = {"layout": cache._held("report").pages.layout, "queries": queries, "coefficients": "int16"}
        shapes |= given | {"matrices": matrices, "d": q.shape[3], "softcap": None}
        level = kernel_level(op, q, engine=cache.engine, **shapes)
        self._asked = queries, with_first, {} if level is None else {op: level}

    def flush(self, *, spare: int = 0) -> None:
        for cache in self.slices:
            cache.flush(spare=spare)

    # -- rows and length ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> LayerSettings:
        """What every slice is stored with."""
        return self.slices[0].settings

    @property
    def is_empty(self) -> bool:
        return self.slices[0].is_empty

    @property
    def length(self) -> int:
        """Positions of every row, padding included; of the longest slice when an append stopped half-way."""
        return max(cache.length for cache in self.slices)

    @property
    def batch(self) -> int:
        return self.slices[0].batch

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """(b,) tokens of each row."""
        return self.slices[0].lengths

    @property
    def first_counts(self) -> np.ndarray[Any, Any]:
        """(b,) tokens of each row whose true keys and values are used."""
        return np.minimum(self.lengths, self.first_tokens)

    def _rows(self, rows: Any) -> None:
        if self.first_keys is not None:
            with on_device_of(self.first_keys):
                self.first_keys, self.first_values = (take_rows(x, rows) for x in (self.first_keys, self.first_values))

    def reorder(self, idx: Any) -> None:
        """Row i becomes what row ``idx[i]`` was."""
        for cache in self.slices:
            cache.reorder(idx)
        self._rows(np.asarray(idx))

    def select(self, idx: Any) -> None:
        """Keep the rows `idx`."""
        for cache in self.slices:
            cache.select(idx)
        self._rows(np.asarray(idx))

    def repeat(self, k: int) -> None:
        """Follow each row by ``k - 1`` copies of itself."""
        rows = np.repeat(np.arange(self.batch), k)
        for cache in self.slices:
            cache.repeat(k)
        self._rows(rows)

    def crop(self, to: int) -> None:
        """Keep the first `to` positions; ValueError, before any change, when codes would have to be taken apart."""
        for cache in self.slices:
            # All slices hold the same tokens in pages of the same size: the first one refuses, or none does.
            cache.crop(min(to, cache.length))
        if self.is_empty:
            self._forget_first()

    def reset(self) -> None:
        """Forget all tokens."""
        for cache in self.slices:
            cache.reset()
        self._forget_first()
        self._asked = (0, False, {})

    def copy(self) -> LatentStore:
        """An independent store with the same contents."""
        new = copy.copy(self)
        new.slices = [cache.copy() for cache in self.slices]
        new._rows(np.arange(self.batch))
        return new

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _first_nbytes(self, x: Any) -> int:
        return 0 if x is None else int(self.first_counts.sum()) * self.heads * self.d * x.dtype.itemsize

    @property
    def key_nbytes(self) -> int:
        """Live bytes of the keys' latents and the first tokens' keys."""
        return sum(cache.key_nbytes for cache in self.slices) + self._first_nbytes(self.first_keys)

    @property
    def value_nbytes(self) -> int:
        """Live bytes of the values' latents and the first tokens' values."""
        return sum(cache.value_nbytes for cache in self.slices) + self._first_nbytes(self.first_values)

    @property
    def nbytes(self) -> int:
        """Live bytes, each slice's map of padded positions included."""
        firsts = self._first_nbytes(self.first_keys) + self._first_nbytes(self.first_values)
        return sum(cache.nbytes for cache in self.slices) + firsts

    @property
    def table_nbytes(self) -> int:
        """0: no codec of latents has tables."""
        return 0

    def report(self) -> dict[str, Any]:
        """The entries of :meth:`kvsketch.cache.Cache.report`, against the keys and values that latents stand for.

        `exact_tokens` are those whose latents are not encoded yet, true first tokens apart.
        """
        own, given = [cache.report() for cache in self.slices], self.slices[0]._contents
        numbers = int(self.lengths.sum()) * self.heads * self.d
        firsts = sum(0 if x is None else x.nbytes for x in (self.first_keys, self.first_values))
        engines = dict(own[0]["engines"])
        if self.rebuilds:
            del engines["attention.attend"]
            on = np.empty(0) if given is None else given.pages.pages
            engines["palu.attend"] = engine_for("palu.attend", on, engine=self.slices[0].engine)
        model = 0 if given is None else numbers * (given.given[0].itemsize + given.given[1].itemsize)
        return own[0] | {
            "key_bits": 8 * self.key_nbytes / numbers if numbers else 0.0,
            "value_bits": 8 * self.value_nbytes / numbers if numbers else 0.0,
            "bits": 4 * self.nbytes / numbers if numbers else 0.0,
            "nbytes": self.nbytes,
            "allocated_nbytes": sum(entry["allocated_nbytes"] for entry in own) + firsts,
            "dense_nbytes_16": 4 * numbers,
            "dense_nbytes_model": model,
            "engines": engines,
            "kernels": self._asked[2] if self.rebuilds else own[0]["kernels"],
            "saturated": sum(entry["saturated"] for entry in own),
        }


def latent_nbytes(
    codec: Codec,
    key_ranks: Sequence[int],
    value_ranks: Sequence[int],
    tokens: int,
    *,
    heads: int,
    d: int,
    first_tokens: int,
    dtype: str = "float32",
) -> int:
    """Live bytes of a :class:`LatentStore` of one unpadded row of `tokens` tokens, every full page encoded."""
    width = np.dtype(FLOAT_DTYPES[dtype]).itemsize
    nbytes = 2 * min(tokens, first_tokens) * heads * d * width
    for rk, rv in zip(key_ranks, value_ranks, strict=True):
        layout = page_layout(codec, codec, rk, rv, key_dtype=dtype, value_dtype=dtype)
        pages, newest = divmod(tokens, layout.page_tokens)
        nbytes += pages * layout.record_bytes + newest * (rk + rv) * width
    return nbytes
