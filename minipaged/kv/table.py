"""BlockTable: where one sequence's KV lies."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockTable:
    """The device blocks of a sequence, in order of position, and how far they stand in the prefix cache."""

    blocks: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    """Prefix-cache nodes of the leading blocks whose content the prefix cache knows."""
    host_blocks: list[int] = field(default_factory=list)
    """Host blocks that hold the KV of a sequence that was swapped out."""
