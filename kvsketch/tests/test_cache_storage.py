"""Saved caches: the same cache comes back, and nothing else is ever read as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch.cache import Cache
from kvsketch.codecs import Exact, SignSketch
from kvsketch.storage import METADATA_KEY, read_file, write_file
from kvsketch.tests.cache_cases import PAIRS, append_in_chunks, cache_state, make_cache, make_tokens


def filled(pair: str, *, padded: bool = False, dtype: Any = np.float32, **options: Any) -> Cache:
    k, v = make_tokens(1, 2, 2, 130, 16, 24, dtype)
    valid = np.ones((2, 130), dtype=bool)
    if padded:
        valid[1, :40] = False
        valid[0, 100:103] = False
    cache = make_cache(pair, **options)
    append_in_chunks(cache, k, v, [100, 30], valid)
    return cache


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_saved_cache_comes_back_and_goes_on(pair: str, padded: bool, dtype: Any, tmp_path: Path) -> None:
    cache = filled(pair, padded=padded, dtype=dtype, residual_length=20, sink_tokens=3, name="layer 1", checked=False)
    cache.save(tmp_path / "cache.safetensors")
    loaded = Cache.load(tmp_path / "cache.safetensors")
    assert cache_state(loaded) == cache_state(cache)
    assert loaded.settings == cache.settings
    assert (loaded.name, loaded.checked, loaded.max_tokens) == ("layer 1", False, None)
    assert loaded.nbytes == cache.nbytes
    assert {k: v for k, v in loaded.report().items() if k != "allocated_nbytes"} == {
        k: v for k, v in cache.report().items() if k != "allocated_nbytes"
    }
    more_k, more_v = make_tokens(2, 2, 2, 80, 16, 24, dtype)
    for each in (cache, loaded):
        append_in_chunks(each, more_k, more_v, [1] * 60 + [20])
    assert cache_state(loaded) == cache_state(cache)
    q = np.random.default_rng(3).standard_normal((2, 4, 20, 16)).astype(np.float32)
    np.testing.assert_array_equal(loaded.attend(q), cache.attend(q))


def test_saving_flushes_and_leaves_no_other_file(tmp_path: Path) -> None:
    cache = filled("ints2-ints2")
    cache.append(*make_tokens(2, 2, 2, 40, 16, 24))
    waiting = cache.page_counts
    cache.save(tmp_path / "a")
    assert (cache.page_counts > waiting).all()
    cache.save(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "missing" / "a")
    with pytest.raises(FileNotFoundError):
        Cache.load(tmp_path / "b")


def test_empty_caches_and_prompt_channels_are_saved_too(tmp_path: Path) -> None:
    make_cache(exact_dtype="bfloat16", max_tokens=500).save(tmp_path / "empty")
    empty = Cache.load(tmp_path / "empty")
    assert empty.is_empty
    assert (str(empty.exact_dtype), empty.max_tokens) == ("bfloat16", 500)
    codec = SignSketch(m=32, outliers=2, outlier_m=32, outlier_channels="prompt", kind="hadamard", seed=11)
    cache = Cache(codec, Exact())
    cache.append(*make_tokens(4, 2, 1, 150))
    cache.save(tmp_path / "prompt")
    loaded = Cache.load(tmp_path / "prompt", engine="reference")
    assert loaded.engine == "reference"
    more = make_tokens(5, 2, 1, 64)
    for each in (cache, loaded):
        each.append(*more)
        each.flush()
    assert cache_state(loaded) == cache_state(cache)


def test_the_seed_travels_with_the_state(tmp_path: Path) -> None:
    """T41: a loaded cache scores with the projection it was written with, whoever reads it."""
    tokens = make_tokens(6, 1, 1, 150)
    decoded = []
    for seed in (0, 5):
        cache = Cache(SignSketch(m=64, seed=seed), Exact())
        cache.append(*tokens)
        cache.save(tmp_path / f"{seed}")
        loaded = Cache.load(tmp_path / f"{seed}")
        assert loaded.settings.keys == SignSketch(m=64, seed=seed)
        np.testing.assert_array_equal(loaded.decode(0)[0], cache.decode(0)[0])
        decoded.append(loaded.decode(0)[0])
    assert (decoded[0] != decoded[1]).any()


def test_no_byte_of_a_file_can_change(tmp_path: Path) -> None:
    """T42: any byte changed, cut off or added is noticed (every byte of the header, every 7th of the arrays)."""
    cache = Cache(SignSketch(m=16), Exact(), residual_length=0, sink_tokens=1)
    cache.append(*make_tokens(7, 1, 1, 34, 4))
    path = tmp_path / "cache"
    cache.save(path)
    data = path.read_bytes()
    assert cache_state(Cache.load(path)) == cache_state(cache)
    header = 8 + int.from_bytes(data[:8], "little")
    for position in [*range(header), *range(header, len(data), 7)]:
        for change in (1, 0x20):
            path.write_bytes(data[:position] + bytes([data[position] ^ change]) + data[position + 1 :])
            with pytest.raises(ValueError, match=r"cache|header"):
                Cache.load(path)
    for size in (*range(0, header, 13), header, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="cache"):
            Cache.load(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="truncated or was damaged"):
        Cache.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    import pickle

    from safetensors.numpy import save_file

    path = tmp_path / "file"
    for content in (b"", b"hello", pickle.dumps({"a": 1}), b"\xff" * 100, b"\x02" + b"\0" * 7 + b"[]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a kvsketch file"):
            Cache.load(path)
    save_file({"a": np.zeros(3)}, path)
    with pytest.raises(ValueError, match="is not a kvsketch file"):
        Cache.load(path)
    save_file({"a": np.zeros(3)}, path, metadata={METADATA_KEY: json.dumps({"format": "other"})})
    with pytest.raises(ValueError, match="does not say format 'kvsketch'"):
        Cache.load(path)
    save_file({"a": np.zeros(3)}, path, metadata={METADATA_KEY: json.dumps({"format": "kvsketch", "version": 99})})
    with pytest.raises(ValueError, match="has format version 99, this kvsketch reads version 1"):
        Cache.load(path)
    write_file(path, {"a": np.zeros(3)}, {}, kind="model")
    with pytest.raises(ValueError, match="holds a 'model', not a 'cache'"):
        Cache.load(path)


def change(header: dict[str, Any], tensors: dict[str, Any], name: str, value: Any) -> None:
    target = header if name in header else tensors
    if value is None:
        del target[name]
    else:
        target[name] = value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("keys", {"codec": "sketch", "m": 256}, "record_bytes is .*, but these settings have"),
        ("keys", {"codec": "ints", "bits": 2, "group": 64}, "page_tokens is 32, but these settings have 64"),
        ("keys", {"codec": "zip"}, "unknown codec"),
        ("keys", {"codec": "ints", "rank": 2}, "has no setting 'rank'"),
        ("keys", {"codec": "ints", "bits": 7}, "bits must be one of"),
        ("keys", "ints", "wrong types|unknown|dictionary"),
        ("values", None, "lacks 'values'"),
        ("d", 32, "record_bytes is|must be"),
        ("d", -1, "d must be a size"),
        ("key_dtype", "float16", "must be uint16 of shape"),
        ("key_dtype", "float64", "lacks 'float64'|dtype"),
        ("residual_length", "x", "residual_length must be an integer"),
        ("batch", 3, "must be int64 of shape"),
        ("length", 131, "tokens at 131 positions|length"),
        ("lengths", [130, 129], "its header says"),
        ("padded", True, "lacks 'layer0.valid'"),
        ("layer0.pages", None, "lacks 'layer0.pages'"),
        ("layer0.pages", np.zeros((2, 3, 5), dtype=np.uint8), "layer0.pages must be uint8 of shape"),
        ("layer0.window_k", np.zeros((2, 3, 16), dtype=np.float32), "layer0.window_k must be float32 of shape"),
        ("layer0.sink_counts", np.array([5, 4]), "counts out of range"),
        ("layer0.page_counts", np.array([-1, 2]), "counts out of range"),
        ("layer0.sink_counts", np.array([3, 4]), "hold later tokens"),
    ],
)
def test_headers_and_arrays_that_do_not_fit_together_are_named(name: str, value: Any, message: str) -> None:
    tensors, header = filled("ints2-ints2").to_tensors("layer0.")
    assert set(tensors) > {"layer0.pages", "layer0.window_k"}
    assert Cache.from_tensors(tensors, header, "layer0.").length == 130
    change(header, tensors, name, value)
    with pytest.raises(ValueError, match=f"saved cache .*({message})"):
        Cache.from_tensors(tensors, header, "layer0.")


def test_many_caches_in_one_file(tmp_path: Path) -> None:
    caches = [filled(pair, padded=True) for pair in PAIRS]
    tensors: dict[str, Any] = {}
    headers = []
    for i, cache in enumerate(caches):
        arrays, header = cache.to_tensors(f"layer{i}.")
        tensors |= arrays
        headers.append(header)
    write_file(tmp_path / "model", tensors, {"layers": headers, "method": "mixed"}, kind="model")
    arrays, read = read_file(tmp_path / "model", kind="model")
    assert read["method"] == "mixed"
    for i, cache in enumerate(caches):
        loaded = Cache.from_tensors(arrays, read["layers"][i], f"layer{i}.")
        assert cache_state(loaded) == cache_state(cache)
