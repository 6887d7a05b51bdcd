"""Files of caches: safetensors with a JSON header that describes the contents, and a checksum over both.

Reading executes nothing, and a file with any byte changed, cut off or added is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "kvsketch"
VERSION = 1
METADATA_KEY = "kvsketch"


def write_file(path: str | os.PathLike[str], tensors: dict[str, Any], header: dict[str, Any], *, kind: str) -> None:
    """Write `tensors` (NumPy arrays of plain dtypes) and `header` (JSON) to `path`, all or nothing.

    `kind` says what the header describes, for instance ``"cache"``; :func:`read_file` asks for the same.
    """
    from safetensors.numpy import save

    header = {"format": FORMAT, "version": VERSION, "kind": kind, **header}
    header["checksum"] = _checksum(tensors, header)
    data = save(tensors, metadata={METADATA_KEY: json.dumps(header, sort_keys=True)})
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def read_file(path: str | os.PathLike[str], *, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and header of a file of `kind` that :func:`write_file` wrote.

    ValueError says what is wrong with any other file.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = Path(path)
    data = path.read_bytes()
    try:
        layout = _layout(data)
        header = json.loads(layout["__metadata__"][METADATA_KEY])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a kvsketch file, or was damaged: its header cannot be read ({error})"
        ) from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a kvsketch file: its header does not say format {FORMAT!r}")
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {header.get('version')!r}, this kvsketch reads version {VERSION}; "
            "write it again with this version"
        )
    if header.get("kind") != kind:
        raise ValueError(f"{path} holds a {header.get('kind')!r}, not a {kind!r}; load it with what wrote it")
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is truncated or was damaged: {error}") from None
    checksum = header.pop("checksum", None)
    if checksum != _checksum(tensors, header):
        raise ValueError(f"{path} was damaged or changed: its contents do not match their checksum")
    for name in ("format", "version", "kind"):
        del header[name]
    return tensors, header


def _layout(data: bytes) -> dict[str, Any]:
    """The JSON that opens a safetensors file; ValueError unless it is spelled as it is written, without slack."""
    size = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + size].decode()
    layout = json.loads(text)
    if not isinstance(layout, dict) or json.dumps(layout, separators=(",", ":"), ensure_ascii=False) != text.rstrip(
        " "
    ):
        raise ValueError("it is not spelled as kvsketch writes it")
    return layout


def _checksum(tensors: dict[str, Any], header: dict[str, Any]) -> str:
    """SHA-256 over the header and over every tensor's name, dtype, shape and bytes, in order of names."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
