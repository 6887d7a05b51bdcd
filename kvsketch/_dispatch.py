"""Which engine runs an operation.

An engine is a package of functions, one module a family, with the same names and signatures as the reference: that
``kvsketch.numba_cpu.qjl.sketch_scores`` exists is the whole declaration that the Numba engine offers the operation.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

#: Engines of each array library, fastest first. ``reference`` is the specification and offers every operation.
ENGINES: dict[str, tuple[str, ...]] = {
    "numpy": ("numba_cpu", "reference"),
    "cupy": ("cuda_raw", "numba_cuda", "reference"),
}


def array_library(*arrays: Any) -> str:
    """Name of the library that all `arrays` belong to: ``"numpy"`` or ``"cupy"``.

    Raises TypeError when an argument is no array of either library, or when libraries are mixed.
    """
    kinds: set[Any] = {type(a) for a in arrays}
    found = {_library_of(kind) for kind in kinds}
    if len(found) != 1:
        raise TypeError(f"arrays must all belong to one library, got {sorted(found)}; move them to one device first")
    return found.pop()


@cache
def _library_of(kind: type) -> str:
    if issubclass(kind, np.ndarray):
        return "numpy"
    root = kind.__module__.partition(".")[0]
    if root in ENGINES:
        return root
    hint = "; use kvsketch.adapters for torch tensors" if root == "torch" else ""
    raise TypeError(f"expected a NumPy or CuPy array, got {kind.__module__}.{kind.__qualname__}{hint}")


def namespace(*arrays: Any) -> ModuleType:
    """The module (`numpy` or `cupy`) whose functions work on `arrays`."""
    return sys.modules[array_library(*arrays)]


_HERE = nullcontext()


def on_device_of(array: Any) -> AbstractContextManager[Any]:
    """Where new arrays lie on the device of `array`, for CuPy; nothing changes for NumPy."""
    return _HERE if isinstance(array, np.ndarray) else array.device


def implementation(op: str, *arrays: Any, engine: str | None = None) -> Callable[..., Any]:
    """The function that runs operation `op` (``"family.name"``) on `arrays`.

    `engine=None` takes the fastest engine that offers the operation. A named engine that does not exist for the
    arrays' library, or does not offer the operation, raises ValueError: there is no silent fallback.
    """
    return _find(op, array_library(*arrays), engine)[1]


def engine_for(op: str, *arrays: Any, engine: str | None = None) -> str:
    """Name of the engine that :func:`implementation` would use."""
    return _find(op, array_library(*arrays), engine)[0]


def kernel_level(op: str, *arrays: Any, engine: str | None = None, **shapes: Any) -> str | None:
    """What the engine that runs operation `op` on `arrays` says of its kernels for `shapes`: None if it says nothing.

    An engine says it by a function `kernel_level` in the operation's module, called on the device of the arrays.
    """
    family = op.partition(".")[0]
    tell = getattr(engine_module(engine_for(op, *arrays, engine=engine), family), "kernel_level", None)
    with on_device_of(arrays[0]):
        return None if tell is None else tell(**shapes)


@cache
def _find(op: str, library: str, engine: str | None) -> tuple[str, Callable[..., Any]]:
    if engine is not None and engine not in ENGINES[library]:
        raise ValueError(f"engine={engine!r} does not run on {library} arrays; choose from {list(ENGINES[library])}")
    family, _, name = op.partition(".")
    for candidate in ENGINES[library] if engine is None else (engine,):
        module = engine_module(candidate, family)
        function = getattr(module, name, None)
        if function is not None:
            return candidate, function
    raise ValueError(f"engine={engine!r} does not offer {op!r}; leave engine=None to use one that does")


def engine_module(engine: str, family: str) -> ModuleType | None:
    """Module of `family` in `engine`, or None when the engine does not have that family.

    Only the absence of the engine's own module is read as "not offered": an import that fails inside it propagates.
    """
    package = f"kvsketch.{engine}"
    path = f"{package}.{family}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name in (package, path):
            return None
        raise
