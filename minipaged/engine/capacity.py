"""Capacity: how many KV blocks an engine has, and how long a sequence they let grow."""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.config import EngineConfig
from minipaged.errors import ConfigError
from minipaged.kv.layout import KVLayout
from minipaged.kv.ledger import blocks_for, blocks_in_budget
from minipaged.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Capacity:
    """What `EngineConfig` comes to for one model."""

    block_bytes: int
    """Bytes of one KV block, all layers."""
    num_blocks: int
    swap_blocks: int
    """Blocks of the host pool."""
    max_model_len: int
    """Most tokens in a sequence, prompt and output."""
    max_batched_tokens: int
    """Most tokens of a step."""


def plan_capacity(
    config: EngineConfig, model: ModelConfig, layout: KVLayout, default_memory: int, default_batched_tokens: int
) -> Capacity:
    """Do the arithmetic. Raises `ConfigError` where the settings do not fit the model or each other.

    What the device takes where the settings do not say: `default_memory` bytes for the KV cache, and
    `default_batched_tokens` tokens in a step, or one for each sequence that may run if that is more.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, more than the {limit} positions that the model was made for "
            f"(max_position_embeddings); give at most {limit}."
        )
    per_block = layout.bytes_per_block
    num_blocks = _num_blocks(config, config.max_model_len or limit, layout, default_memory)
    swap_blocks = config.swap_blocks
    if swap_blocks is None:
        swap_blocks = _whole_blocks("swap_memory", config.swap_memory, layout) if config.swap_memory else 0
    pool_tokens = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > pool_tokens:
        needed = blocks_for(config.max_model_len, config.block_size)
        raise ConfigError(
            f"max_model_len is {config.max_model_len} but the pool of {num_blocks} KV blocks x {config.block_size} "
            f"tokens holds {pool_tokens}. Give num_blocks >= {needed}, or kv_cache_memory >= {needed * per_block} "
            f"bytes ({per_block} per block), or max_model_len <= {pool_tokens}."
        )
    return Capacity(
        block_bytes=per_block,
        num_blocks=num_blocks,
        swap_blocks=swap_blocks,
        max_model_len=config.max_model_len or min(limit, pool_tokens),
        max_batched_tokens=config.max_batched_tokens or max(default_batched_tokens, config.max_running),
    )


def _num_blocks(config: EngineConfig, max_length: int, layout: KVLayout, default_memory: int) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory is not None:
        return _whole_blocks("kv_cache_memory", config.kv_cache_memory, layout)
    remedy = f"Give kv_cache_memory, or on a GPU a larger memory_fraction ({config.memory_fraction}) or a smaller model"
    affordable = _whole_blocks("kv_cache_memory (by default)", default_memory, layout, remedy)
    return min(affordable, config.max_running * blocks_for(max_length, config.block_size))


def _whole_blocks(name: str, memory: int, layout: KVLayout, remedy: str | None = None) -> int:
    per_block = layout.bytes_per_block
    count = blocks_in_budget(memory, per_block)
    if count == 0:
        raise ConfigError(
            f"{name} is {memory} bytes, less than one KV block of {per_block} bytes ({layout.block_size} tokens x "
            f"{layout.bytes_per_token} bytes per token). {remedy or f'Give at least {per_block}'}, or lower block_size "
            f"({layout.block_size})."
        )
    return count
