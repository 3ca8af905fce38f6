"""EngineStats: what an engine is doing, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """KV blocks of one tier; free + cached + in use = total."""

    total: int
    free: int
    cached: int
    """Unused, but kept for the prefix cache until the space is needed."""
    in_use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Counts run from the engine's start."""

    waiting: int
    """Requests not yet scheduled, those being encoded included."""
    running: int
    """Sequences in the batch."""
    blocks: BlockCounts
    host_blocks: BlockCounts
    """Blocks of the host pool."""
    prefix_cache_queries: int
    """Prompt tokens looked up."""
    prefix_cache_hits: int
    """Prompt tokens found."""
    preemptions_by_swap: int
    preemptions_by_recompute: int
    steps: int
    generated_tokens: int
