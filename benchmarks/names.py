"""Names by which tables and bars find rows."""

from __future__ import annotations

#: Our dense kernel, by dtype of keys and values.
DENSE_FLASH = {dtype: f"dense Numba flash {dtype}" for dtype in ("fp32", "bf16")}
#: A plain read of the bytes of a dense cache.
READ = "read of {dtype} cache"
#: transformers' dense cache, a step over an empty one, and its strongest quantized one.
DYNAMIC_CACHE, EMPTY, QUANTO = "DynamicCache", "empty context", "QuantizedCache quanto, 2 bits"


def absent_key(name: str, n: int) -> str:
    """Under what the reason is noted for which a rival was not measured at a context."""
    return f"{name} at {n} tokens"
