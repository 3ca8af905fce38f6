"""A fault, and what finds it."""

from __future__ import annotations

from dataclasses import dataclass

WRONG_NUMBERS = "wrong numbers"


@dataclass(frozen=True)
class Fault:
    """In a run's source the first `old` becomes `new`; `found` is in what is reported, or the numbers are wrong."""

    run: str
    """A name in runs.RUNS."""
    what: str
    old: str
    new: str
    found: str
