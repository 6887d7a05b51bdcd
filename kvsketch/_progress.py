"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

#: Called with (description, completed, total).
Progress = Callable[[str, int, int | None], None]


def no_progress(description: str, completed: int, total: int | None) -> None:
    """Show no progress."""
