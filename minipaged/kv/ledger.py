"""The arithmetic of KV memory: blocks per budget and per sequence, time to swap or to recompute."""

from __future__ import annotations


def blocks_in_budget(memory: int, bytes_per_block: int) -> int:
    """Whole blocks that fit `memory` bytes."""
    return memory // bytes_per_block


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` take: the quotient rounded up."""
    return -(-num_tokens // block_size)


def swap_seconds(num_blocks: int, bytes_per_block: int, bandwidth: float) -> float:
    """Time to move blocks out and back in at `bandwidth` bytes per second each way."""
    return 2 * num_blocks * bytes_per_block / bandwidth


def recompute_seconds(num_tokens: int, tokens_per_second: float) -> float:
    """Time to prefill tokens again."""
    return num_tokens / tokens_per_second
