"""A compressed key/value cache of one attention layer.

A row's tokens are its first ones (sinks), kept exact, then encoded pages, then an exact window of the newest. A row of
n tokens is due ``max(0, (n - sink_tokens - residual_length) // p)`` pages of p tokens; they are encoded at the start
of the next append, or by :meth:`Cache.flush`, so that a step attends exactly over its own tokens. A token is encoded
once and never again. Each row of a batch counts its own tokens and padding is not stored: its bytes are those of the
row alone.

The same tokens in any pieces end, after a flush, as the same bytes (but for outlier channels chosen from the prompt,
which depend on what the window holds when a row's first page is encoded). They do not give the same results on the way:
the first forward over a prompt is exact, while a later piece, or a question asked again over a prompt that is already
encoded, attends over encoded pages.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np

from kvsketch._attend import COEFFICIENTS, attend_checked
from kvsketch._checks import check_choice, check_integer, check_ndim, on_host
from kvsketch._contents import Contents, due_pages, new_contents
from kvsketch._dispatch import ENGINES, namespace, on_device_of
from kvsketch._prepared_step import PreparedSteps
from kvsketch._token_checks import cast_tokens, check_finite, check_tokens, float_dtype, is_checked
from kvsketch.attention import CacheView, HeldView
from kvsketch.codecs import Codec, GroupedInts
from kvsketch.methods import DEFAULT_RESIDUAL_LENGTH, DEFAULT_SINK_TOKENS, LayerSettings
from kvsketch.pages import decode_keys, decode_values


class Cache(PreparedSteps):
    """Keys and values of one layer, compressed; grows by :meth:`append` and is read by :meth:`attend`.

    Batch, heads, head sizes and dtypes are those of the first append (:meth:`reset` forgets them). A call that raises
    leaves the cache as it was.

    Parameters
    ----------
    keys, values
        Codecs of the two sides, freely combined.
    residual_length
        At least this many of a row's newest tokens stay exact.
    sink_tokens
        This many of a row's first tokens stay exact.
    exact_dtype
        Dtype that tokens are kept and encoded in; by default the one they come in.
    max_tokens
        Tokens a row to make room for at the first append. More may follow, buffers then grow.
    checked
        Refuse NaN and infinities. Without it they are stored, and harm no other head or group. By default refused on
        the host alone: on a device, looking waits for it.
    name
        How errors call this cache.
    engine
        The engine for all operations; by default the fastest there is.
    coefficients
        What :meth:`attend` may round to, ``"int16"`` or the faster and coarser ``"int8"``; see
        :func:`kvsketch.attention.attend`.
    """

    def __init__(
        self,
        keys: Codec = GroupedInts(),  # noqa: B008  (a frozen dataclass)
        values: Codec = GroupedInts(),  # noqa: B008
        *,
        residual_length: int = DEFAULT_RESIDUAL_LENGTH,
        sink_tokens: int = DEFAULT_SINK_TOKENS,
        exact_dtype: Any = None,
        max_tokens: int | None = None,
        checked: bool | None = None,
        name: str = "cache",
        engine: str | None = None,
        coefficients: str = "int16",
    ) -> None:
        self.settings = LayerSettings(keys, values, residual_length, sink_tokens)
        self.exact_dtype = None if exact_dtype is None else float_dtype("exact_dtype", exact_dtype)
        self.max_tokens = None if max_tokens is None else check_integer("max_tokens", max_tokens, low=0)
        known = sorted({name for names in ENGINES.values() for name in names})
        if engine is not None and engine not in known:
            raise ValueError(f"engine must be None or one of {known}, got {engine!r}")
        self.checked = None if checked is None else bool(checked)
        self.name = str(name)
        self.engine = engine
        check_choice("coefficients", coefficients, COEFFICIENTS)
        self.coefficients = coefficients
        self._contents: Contents | None = None

    # -- growing ------------------------------------------------------------------------------------------------------

    def append(self, k: Any, v: Any, *, valid: Any = None) -> None:
        """Add s tokens to every row, after encoding the pages that were due before.

        Parameters
        ----------
        k : (b, h, s, d) float32, float16 or bfloat16
        v : (b, h, s, dv)
        valid : (b, s) bool on the host, optional
            False where a position is padding: it counts in :attr:`length` but is not stored.

        Raises
        ------
        ValueError, TypeError
            For shapes or dtypes that do not fit together or what is held, and for numbers that are not finite.
        """
        valid = check_tokens(k, v, valid)
        with on_device_of(k):
            self._append(k, v, valid)

    def _append(self, k: Any, v: Any, valid: Any) -> None:
        """Append tokens that fit together, on the current device."""
        contents = self._contents
        if contents is None:
            contents = new_contents(self.settings, k, v, self.exact_dtype, self.max_tokens)
        elif contents.given != (k.dtype, v.dtype, k.shape[0], k.shape[1], k.shape[3], v.shape[3]):
            self._check_fits(contents, k, v)
        exact, positions = contents.exact, contents.positions
        stored_k, stored_v = cast_tokens(k, exact.window_k.dtype), cast_tokens(v, exact.window_v.dtype)
        if is_checked(self.checked, k):
            check_finite(self.name, "keys", stored_k, k, valid, positions.length)
            check_finite(self.name, "values", stored_v, v, valid, positions.length)
        s = k.shape[2]
        if s == 0:
            return
        contents.make_ready(s, padded=valid is not None, engine=self.engine)
        # From here on nothing asks for more than a row's memory.
        exact.append(stored_k, stored_v, valid)
        positions.append(s, valid)
        self._contents = contents

    def flush(self, *, spare: int = 0) -> None:
        """Encode now the pages that are due, leaving `spare` tokens more than the residual exact, and give room back.

        With ``spare=64`` after a long prompt the last 64 tokens can still be cropped.
        """
        check_integer("spare", spare, low=0)
        if self._contents is None:
            return
        self._contents.drop_prepared()
        exact, pages = self._contents.exact, self._contents.pages
        due = exact.due(spare)
        with on_device_of(pages.pages):
            encoded = None if due is None else pages.encode(exact, due, self.engine)
            exact.make_room(0, None if due is None else due * exact.page)
            if encoded is not None:
                pages.commit(encoded)

    def reserve(self, n: int) -> None:
        """Make room for `n` tokens a row, so that no buffer of pages grows before.

        Nor does the window then move to another buffer by steps of one token, unless pages are due now: flush before.
        """
        check_integer("n", n, low=0)
        if self._contents is not None:
            self._contents.drop_prepared()
            exact, pages = self._contents.exact, self._contents.pages
            with on_device_of(pages.pages):
                pages.reserve(due_pages(n, self.settings, exact.page))
                exact.settle()
        self.max_tokens = max(n, self.max_tokens or 0)

    # -- reading ------------------------------------------------------------------------------------------------------

    def attend(
        self,
        q: Any,
        *,
        mask: Any = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Any = None,
        coefficients: str | None = None,
    ) -> Any:
        """Attention of the newest s positions, which were appended before, over the cache.

        Parameters
        ----------
        q : (b, hq, s, d) float32, float16 or bfloat16, hq a multiple of h
            Query i stands at position ``length - s + i`` and sees no later one, and no padding.
        mask : (b or 1, hq or 1, s, length), optional
            Hides more: bool (True: visible), or a float that is added to the scores. Its last axis counts positions
            with padding.
        scale, softcap, sink_logits
            See :func:`kvsketch.attention.attend`.
        coefficients
            By default the cache's own.

        Returns
        -------
        (b, hq, s, dv) in the dtype of `q`; zeros for a query that sees nothing.
        """
        contents = self._held("attend")
        check_ndim("q", q, "(b, hq, s, d)")
        _, hq, s, _ = q.shape
        positions = contents.positions
        if s > positions.length:
            raise ValueError(f"q has {s} positions but the cache holds {positions.length}; append their keys first")
        limits = positions.limits(s, contents.lengths)
        view = self._view(contents)
        view.check_queries(q)
        contents.queries = hq // contents.given[3] * s
        options = (scale, softcap, sink_logits, coefficients or self.coefficients, self.engine)
        with on_device_of(q):
            view.with_counts(contents.send_counts())
            bias = None if mask is None else positions.bias(mask, s, hq)
            return attend_checked(q, view, None if limits is None else namespace(q).asarray(limits), bias, *options)

    def decode(self, row: int) -> tuple[Any, Any]:
        """Keys (h, n, d) and values (h, n, dv) of a row in float32, as :meth:`attend` sees them, without padding."""
        contents = self._held("decode")
        check_integer("row", row, low=0, high=self.batch - 1)
        with on_device_of(contents.pages.pages):
            exact, layout = contents.exact, contents.pages.layout
            xp = namespace(exact.sink_k)
            sinks = int(exact.sink_counts[row])
            window = slice(int(exact.starts[row]), int(exact.starts[row] + exact.counts[row]))
            records = contents.pages.pages[row, :, : int(contents.pages.counts[row])]
            split = layout.value_offset
            k = decode_keys(records[..., :split], layout.keys, engine=self.engine)
            v = decode_values(records[..., split:], layout.values, engine=self.engine)
            first_k, last_k = exact.sink_k[row, :, :sinks], exact.window_k[row, :, window]
            first_v, last_v = exact.sink_v[row, :, :sinks], exact.window_v[row, :, window]
            f4 = xp.float32
            return (
                xp.concatenate([first_k.astype(f4), k, last_k.astype(f4)], axis=1),
                xp.concatenate([first_v.astype(f4), v, last_v.astype(f4)], axis=1),
            )

    def view(self) -> CacheView:
        """The cache's arrays as they are, read-only where the library knows that; nothing is copied.

        The next append, crop, reorder or flush makes the view invalid.
        """
        view = CacheView(*self._view(self._held("view")))
        arrays: dict[str, Any] = {}
        for name, array in zip(view._fields[1:], view[1:], strict=True):
            arrays[name] = array[...] if isinstance(array, np.ndarray) else array
            if isinstance(array, np.ndarray):
                arrays[name].flags.writeable = False
        return view._replace(**arrays)

    # -- rows and length ----------------------------------------------------------------------------------------------

    def reorder(self, idx: Any) -> None:
        """Make row i what row ``idx[i]`` was, as a beam search does; `idx` (b,) may repeat rows."""
        contents = self._held("reorder")
        rows = self._check_rows(idx)
        if len(rows) != self.batch:
            raise ValueError(f"idx must name {self.batch} rows, got {len(rows)}; use select for another number of rows")
        changed = np.flatnonzero(rows != np.arange(len(rows)))
        if not len(changed):
            return
        contents.put(changed, contents.take(rows[changed]))

    def select(self, idx: Any) -> None:
        """Keep the rows `idx`, in that order; rows may repeat, the batch becomes ``len(idx)``."""
        contents = self._held("select")
        self._contents = contents.take(self._check_rows(idx))

    def repeat(self, k: int) -> None:
        """Follow each row by ``k - 1`` copies of itself: the batch becomes ``k * b``."""
        contents = self._held("repeat")
        check_integer("k", k, low=1)
        self._contents = contents.take(np.repeat(np.arange(self.batch), k))

    def crop(self, to: int) -> None:
        """Keep the first `to` positions (padding counts), or drop the last ``-to`` when `to` is negative.

        Possible where no encoded token would be dropped, and to 0, which is :meth:`reset`; otherwise ValueError.
        Dropped numbers are overwritten. With ``flush(spare=n)`` the newest n positions can always be cropped.
        """
        length = self.length
        check_integer("to", to, low=-length)
        keep = length + to if to < 0 else int(to)
        if keep >= length:
            return
        if keep == 0:
            self.reset()
            return
        contents = self._held("crop")
        if keep == contents.positions.length:  # a step that was prepared is all that had to go
            return
        dropped = contents.positions.tokens_from(keep)
        exact_tokens = contents.exact.counts + np.where(contents.pages.counts > 0, 0, contents.exact.sink_counts)
        blocked = np.flatnonzero(dropped > exact_tokens)
        if len(blocked):
            row = int(blocked[0])
            raise ValueError(
                f"crop to {to} would drop {int(dropped[row])} tokens of row {row}, but only its newest "
                f"{int(exact_tokens[row])} are not encoded; crop less, or to 0, or flush with a larger spare"
            )
        contents.crop(keep, dropped)

    def reset(self) -> None:
        """Forget all tokens, and with them the batch size, head sizes and dtypes; the settings stay."""
        self._contents = None

    def copy(self) -> Cache:
        """An independent cache with the same contents."""
        new = Cache.__new__(Cache)
        new.__dict__.update(self.__dict__)
        if self._contents is not None:
            new._contents = self._held("copy").take(np.arange(self.batch))
        return new

    def to(self, device: str | int) -> Cache:
        """A copy of this cache in the memory of ``"cpu"`` or of a CUDA device, by number (needs CuPy); the same bytes.

        ValueError for a device that does not exist. A named :attr:`engine` has to run there.
        """
        from kvsketch._moving import moved

        return moved(self, device)

    def __copy__(self) -> Cache:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Cache:
        return self.copy()

    # -- files --------------------------------------------------------------------------------------------------------

    def to_tensors(self, prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
        """Flush, and give the contents as named arrays and a JSON-able header; see :mod:`kvsketch.storage`."""
        from kvsketch._snapshot import cache_to_tensors

        self.flush()
        return cache_to_tensors(self, prefix)

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Any], header: dict[str, Any], prefix: str = "", *, engine: str | None = None
    ) -> Cache:
        """The cache that :meth:`to_tensors` described; ValueError names what does not fit."""
        from kvsketch._snapshot import cache_from_tensors

        return cache_from_tensors(tensors, header, prefix, engine=engine)

    def save(self, path: str | PathLike[str]) -> None:
        """Flush, and write the cache to a safetensors file with a header that says all its settings."""
        from kvsketch.storage import write_file

        write_file(path, *self.to_tensors(), kind="cache")

    @classmethod
    def load(cls, path: str | PathLike[str], *, engine: str | None = None) -> Cache:
        """Read a cache that :meth:`save` wrote. ValueError says what is wrong with any other file."""
        from kvsketch.storage import read_file

        tensors, header = read_file(path, kind="cache")
        return cls.from_tensors(tensors, header, engine=engine)

    # -- what the calls above share -----------------------------------------------------------------------------------

    def _held(self, call: str) -> Contents:
        if self._contents is None:
            raise ValueError(f"{self.name} is empty; append keys and values before {call}")
        if self._contents.step_ready and call != "step":
            self._contents.drop_prepared()
        return self._contents

    def _view(self, contents: Contents) -> HeldView:
        exact, pages = contents.exact, contents.pages
        return HeldView(
            pages.layout,
            pages.pages,
            pages.counts,
            exact.sink_k,
            exact.sink_v,
            exact.sink_counts,
            exact.window_k,
            exact.window_v,
            exact.starts,
            exact.counts,
        )

    def _check_fits(self, contents: Contents, k: Any, v: Any) -> None:
        """Raise unless k and v have the rows, heads, head sizes and dtypes of what is held."""
        key_dtype, value_dtype, b, h, d, dv = contents.given
        s = k.shape[2]
        for name, x, expected in (("k", k, (b, h, s, d)), ("v", v, (b, h, s, dv))):
            if x.shape != expected:
                raise ValueError(
                    f"{self.name}: {name} must have shape ({b}, {h}, s, {expected[3]}) like what is held, got "
                    f"{tuple(x.shape)}; reset the cache before using it for something else"
                )
        for name, x, dtype in (("k", k, key_dtype), ("v", v, value_dtype)):
            if self.exact_dtype is None and x.dtype != dtype:
                raise TypeError(f"{self.name}: {name} has dtype {x.dtype}, but what is held came in {dtype}; cast it")

    def _check_rows(self, idx: Any) -> Any:
        rows = on_host(idx)
        if rows.ndim != 1 or not len(rows) or not np.issubdtype(rows.dtype, np.integer):
            raise ValueError(f"idx must be a list of row numbers, got {idx!r}")
        if rows.min() < 0 or rows.max() >= self.batch:
            raise ValueError(f"idx must name rows 0..{self.batch - 1}, got {rows.tolist()}")
        return rows.astype(np.int64)
