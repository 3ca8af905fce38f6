"""PeerEngine: what every engine has to do in these benchmarks, as well as its own interface allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine is loaded."""

    threads: int
    max_requests: int
    """Most requests at once."""
    max_length: int
    """Most tokens of a request, prompt and output."""
    prompt_tokens_per_step: int | None
    """Prompt tokens that may be computed in one step, for engines with such a limit; None: the engine's default."""
    prefix_caching: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave."""

    token_ids: list[int]
    arrivals: list[float]
    """When the caller had each token, on the clock `time.monotonic`."""


class PeerEngine(Protocol):
    """A loaded engine."""

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
        """Submit all prompts at once, all of one length; generate greedily, exactly `new_tokens` each."""


class LoadPeerEngine(Protocol):
    """Loads an engine."""

    def __call__(self, model: Path, settings: Settings) -> PeerEngine:
        """`model` is a GGUF file."""
