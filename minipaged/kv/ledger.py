"""The arithmetic of KV memory: bytes per token, blocks per budget, time to swap or to recompute."""

from __future__ import annotations

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """2 (K and V) x layers x KV heads x head_dim x bytes per element."""
    return 2 * num_layers * num_kv_heads * head_dim * ELEMENT_BYTES[dtype]


def block_bytes(block_size: int, token_bytes: int) -> int:
    """Bytes of one block of all layers."""
    return block_size * token_bytes


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
