"""From a model's name to something that executes step plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minipaged.capacity import Capacity, plan_capacity
from minipaged.config import EngineConfig
from minipaged.devices import with_device
from minipaged.errors import DeviceError
from minipaged.models.config import ModelConfig
from minipaged.models.hub import resolve_model
from minipaged.models.llama import Llama
from minipaged.models.rope import rope_tables
from minipaged.models.source import ModelSource, open_model
from minipaged.models.weights import load_weights
from minipaged.ops.base import Array, CacheShape, Ops, Weight
from minipaged.progress import Progress
from minipaged.runner import Runner
from minipaged.step_loop import StepRunner
from minipaged.text.chat import ChatTemplate
from minipaged.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that an engine needs of a model."""

    model_config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    capacity: Capacity
    runner: StepRunner
    device: str
    """Which one it runs on: "cpu" or "reference"."""
    close: Callable[[], None]
    """Frees what garbage collection does not."""


def load_model(name: str | Path | None, config: EngineConfig, progress: Progress) -> LoadedModel:
    """Find, read and check a model and allocate its KV cache. Takes seconds, or minutes if it downloads.

    Raises `ModelLoadError`, `ConfigError` (before any weight is read) and `DeviceError`.
    """

    def load(ops: Ops[Array, Weight]) -> LoadedModel:
        source = open_model(resolve_model(name, progress))
        with source.checkpoint:
            tokenizer = _load_tokenizer(source)
            chat_template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
            capacity = plan_capacity(config, source.config, _kv_dtype(config, ops))
            return LoadedModel(
                model_config=source.config,
                tokenizer=tokenizer,
                chat_template=chat_template,
                capacity=capacity,
                runner=_make_runner(source, config, capacity, ops, progress),
                device=ops.name,
                close=ops.close,
            )

    try:
        return with_device(config, load)
    except MemoryError as error:
        raise DeviceError(
            f"There is not enough memory for the model ({error}); take a smaller one, or a smaller quantisation, or "
            f"lower max_running ({config.max_running})."
        ) from error


def _kv_dtype(config: EngineConfig, ops: Ops[Array, Weight]) -> str:
    return ops.kv_dtype if config.kv_dtype == "auto" else config.kv_dtype


def _load_tokenizer(source: ModelSource) -> Tokenizer:
    if source.gguf_metadata is not None:
        return Tokenizer.from_gguf(source.gguf_metadata, where=str(source.path))
    assert source.folder is not None
    return Tokenizer.from_file(source.folder / "tokenizer.json")


def _make_runner(
    source: ModelSource, config: EngineConfig, capacity: Capacity, ops: Ops[Array, Weight], progress: Progress
) -> Runner[Array, Weight]:
    model = source.config
    weights = load_weights(source.checkpoint, model, ops, progress)
    rope = ops.load_rope(*rope_tables(model, capacity.max_model_len))
    cache, host_cache = _allocate(model, config, capacity, ops)
    return Runner(
        ops,
        Llama(model, weights, ops, rope),
        cache,
        host_cache,
        config,
        vocab_size=model.vocab_size,
        max_model_len=capacity.max_model_len,
        eos_token_ids=model.eos_token_ids,
    )


def _allocate(
    model: ModelConfig, config: EngineConfig, capacity: Capacity, ops: Ops[Array, Weight]
) -> tuple[Array, NDArray[np.uint8]]:
    """The block pools of both tiers."""

    def shape(num_blocks: int) -> CacheShape:
        return CacheShape(num_blocks, model.num_layers, model.num_kv_heads, config.block_size, model.head_dim)

    dtype = _kv_dtype(config, ops)
    try:
        return (
            ops.allocate_cache(shape(capacity.num_blocks), dtype),
            ops.allocate_host_cache(shape(capacity.swap_blocks), dtype),
        )
    except (MemoryError, ValueError) as error:  # more than NumPy can count is a ValueError
        raise DeviceError(
            f"There is not enough memory for {capacity.num_blocks} KV blocks and {capacity.swap_blocks} swap blocks of "
            f"{capacity.block_bytes} bytes; give a smaller kv_cache_memory (or num_blocks) or swap_memory."
        ) from error
