"""A cache as plain arrays and a header that describes them, and back with every statement of the header checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch._contents import Contents, new_contents
from kvsketch._dispatch import on_device_of
from kvsketch.codecs import codec_from_settings, codec_settings

if TYPE_CHECKING:
    from kvsketch.cache import Cache

_COUNTS = ("sink_counts", "page_counts", "window_counts")


def cache_to_tensors(cache: Cache, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Live contents of `cache` as NumPy arrays, each name after `prefix`, and a JSON-able header.

    Rows have different lengths, so the tokens of all rows stand one after the other: ``sink_k`` (h, tokens, d),
    ``pages`` (h, pages, record_bytes) and so on. 16-bit floats are stored as their bits.
    """
    contents = cache._contents
    settings = cache.settings
    header: dict[str, Any] = {
        "name": cache.name,
        "checked": cache.checked,
        "exact_dtype": None if cache.exact_dtype is None else str(cache.exact_dtype),
        "max_tokens": cache.max_tokens,
        "keys": codec_settings(settings.keys),
        "values": codec_settings(settings.values),
        "residual_length": settings.residual_length,
        "sink_tokens": settings.sink_tokens,
        "batch": cache.batch,
        "length": cache.length,
        "lengths": cache.lengths.tolist(),
    }
    if contents is None:
        return {}, header
    exact, pages, valid = contents.exact, contents.pages, contents.positions.map
    header |= {
        "heads": cache.heads,
        "d": cache.d,
        "dv": cache.dv,
        "key_dtype": str(contents.given[0]),
        "value_dtype": str(contents.given[1]),
        "page_tokens": pages.layout.page_tokens,
        "record_bytes": pages.layout.record_bytes,
        "saturated": int(pages.saturated),
        "padded": valid is not None,
    }
    with on_device_of(pages.pages):
        none = np.zeros_like(exact.starts)
        tensors = {
            "sink_counts": exact.sink_counts,
            "page_counts": pages.counts,
            "window_counts": exact.counts,
            "sink_k": _bits(_gather(exact.sink_k, none, exact.sink_counts)),
            "sink_v": _bits(_gather(exact.sink_v, none, exact.sink_counts)),
            "pages": _gather(pages.pages, none, pages.counts),
            "window_k": _bits(_gather(exact.window_k, exact.starts, exact.counts)),
            "window_v": _bits(_gather(exact.window_v, exact.starts, exact.counts)),
        }
        if valid is not None:
            tensors["valid"] = valid.astype(np.uint8)
        if pages.channels is not None:
            tensors["channels"] = pages.channels
        return {prefix + name: np.ascontiguousarray(_host(array)) for name, array in tensors.items()}, header


def cache_from_tensors(tensors: dict[str, Any], header: dict[str, Any], prefix: str, *, engine: str | None) -> Cache:
    """The cache that :func:`cache_to_tensors` described. ValueError names what is missing or does not fit."""
    from kvsketch.cache import Cache

    try:
        cache = Cache(
            codec_from_settings(header["keys"]),
            codec_from_settings(header["values"]),
            residual_length=header["residual_length"],
            sink_tokens=header["sink_tokens"],
            exact_dtype=header["exact_dtype"],
            max_tokens=header["max_tokens"],
            checked=header["checked"],
            name=header["name"],
            engine=engine,
        )
        if header["batch"]:
            cache._contents = _read_contents(cache, tensors, header, prefix)
        if header["length"] != cache.length or header["lengths"] != cache.lengths.tolist():
            raise ValueError(
                f"its header says length {header['length']} and lengths {header['lengths']}, its arrays hold "
                f"{cache.length} and {cache.lengths.tolist()}"
            )
    except KeyError as error:
        raise ValueError(f"saved cache lacks {error}; it was not written whole, or not by kvsketch") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"saved cache has a header of the wrong types: {error}") from None
    except ValueError as error:
        raise ValueError(f"saved cache does not fit together: {error}") from None
    return cache


def _read_contents(cache: Cache, tensors: dict[str, Any], header: dict[str, Any], prefix: str) -> Contents:
    b, h, length, d, dv = (_size(header, name) for name in ("batch", "heads", "length", "d", "dv"))
    key_dtype, value_dtype = (FLOAT_DTYPES[header[name]] for name in ("key_dtype", "value_dtype"))
    k, v = np.empty((b, h, 0, d), dtype=key_dtype), np.empty((b, h, 0, dv), dtype=value_dtype)
    contents = new_contents(cache.settings, k, v, cache.exact_dtype, cache.max_tokens)
    exact, pages, positions = contents.exact, contents.pages, contents.positions
    layout = pages.layout
    for name, expected in (("page_tokens", layout.page_tokens), ("record_bytes", layout.record_bytes)):
        if header[name] != expected:
            raise ValueError(f"{name} is {header[name]}, but these settings have {expected}")

    def read(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        array = tensors[prefix + name]
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(
                f"{prefix + name} must be {np.dtype(dtype)} of shape {shape}, got {array.dtype} of shape {array.shape}"
            )
        return array

    sinks, page_counts, window = (read(name, (b,), np.int64) for name in _COUNTS)
    full = sinks == cache.settings.sink_tokens
    if (np.minimum(np.minimum(sinks, page_counts), window) < 0).any() or (sinks > cache.settings.sink_tokens).any():
        raise ValueError(f"counts out of range: {sinks.tolist()}, {page_counts.tolist()}, {window.tolist()}")
    if (~full & (page_counts + window > 0)).any():
        raise ValueError(f"rows with {sinks.tolist()} first tokens of {cache.settings.sink_tokens} hold later tokens")

    def read_exact(name: str, counts: Any, width: int, dtype: Any) -> Any:
        stored = np.dtype(np.uint16) if dtype.itemsize == 2 else dtype
        return read(name, (h, int(counts.sum()), width), stored).view(dtype)

    numbers = exact.window_k.dtype, exact.window_v.dtype
    exact.make_room(int(window.max()))
    pages.reserve(int(page_counts.max()))
    _scatter(exact.sink_k, read_exact("sink_k", sinks, d, numbers[0]), sinks)
    _scatter(exact.sink_v, read_exact("sink_v", sinks, dv, numbers[1]), sinks)
    _scatter(exact.window_k, read_exact("window_k", window, d, numbers[0]), window)
    _scatter(exact.window_v, read_exact("window_v", window, dv, numbers[1]), window)
    records = read("pages", (h, int(page_counts.sum()), layout.record_bytes), np.uint8)
    _scatter(pages.pages, records, page_counts)
    exact.set_counts(sinks.copy(), window.copy())
    pages.counts = page_counts.copy()
    if pages.channels is not None:
        pages.channels = read("channels", pages.channels.shape, np.uint16).copy()
        if (pages.channels >= d).any():
            raise ValueError(f"channels must be below the head size {d}, got {int(pages.channels.max())}")
    pages.saturated = _size(header, "saturated")
    valid = None
    if header["padded"]:
        valid = read("valid", (b, length), np.uint8) != 0
        if (valid.sum(axis=1) != contents.lengths).any():
            raise ValueError("valid marks another number of tokens than are stored")
    elif (contents.lengths != length).any():
        raise ValueError(f"rows hold {contents.lengths.tolist()} tokens at {length} positions without padding")
    positions.make_room(length, valid is not None)
    positions.append(length, valid)
    return contents


def _size(header: dict[str, Any], name: str) -> int:
    value = header[name]
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a size, got {value!r}")
    return value


def _host(array: Any) -> Any:
    """`array` as a NumPy array."""
    return array if isinstance(array, np.ndarray) else array.get()


def _bits(array: Any) -> Any:
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def _gather(array: Any, starts: Any, counts: Any) -> Any:
    """Live entries of an array (b, h, capacity, x), rows one after the other: (h, sum of counts, x)."""
    rows = [_host(array[row, :, int(s) : int(s + c)]) for row, (s, c) in enumerate(zip(starts, counts, strict=True))]
    return np.concatenate(rows, axis=1)


def _scatter(array: Any, gathered: Any, counts: Any) -> None:
    """Inverse of :func:`_gather`, to the beginning of each row."""
    first = 0
    for row, count in enumerate(counts):
        array[row, :, : int(count)] = gathered[:, first : first + int(count)]
        first += int(count)
