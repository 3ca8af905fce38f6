"""Progress: how long work, such as a download, says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""progress(what, done, total): what is being done, and how many of how many bytes. Called on the thread that does it.

What it raises ends the work.
"""


def no_progress(what: str, done: int, total: int) -> None:
    """Tell nobody."""
