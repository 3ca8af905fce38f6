"""From a model's name to something that executes step plans."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from minipaged.config import EngineConfig
from minipaged.engine.capacity import Capacity, plan_capacity
from minipaged.engine.devices import with_device
from minipaged.engine.step_loop import StepRunner
from minipaged.errors import DeviceError, UnsupportedModelError
from minipaged.execution.runner import Runner
from minipaged.models.config import ModelConfig
from minipaged.models.files.hub import resolve_model
from minipaged.models.files.model_source import ModelSource, open_model
from minipaged.ops.base import Array, Dimensions, ElementTypes, Ops, StepLimits, Weight
from minipaged.progress import Progress
from minipaged.text.chat import ChatTemplate
from minipaged.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that an engine needs of a model."""

    model_config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    capacity: Capacity
    runner: StepRunner
    device: str
    """Which one it runs on: "cuda", "cpu" or "reference"."""
    close: Callable[[], None]
    """Frees what garbage collection does not."""


def load_model(name: str | Path | None, config: EngineConfig, progress: Progress) -> LoadedModel:
    """Find, read and check a model and allocate its KV cache. Takes seconds, or minutes if it downloads.

    Raises `ModelLoadError`, `ConfigError` (before any weight is read) and `DeviceError`.
    """

    def load(ops: Ops[Array, Weight]) -> LoadedModel:
        try:
            return load_onto(ops, name, config, progress)
        except BaseException:
            ops.close()
            raise

    try:
        try:
            return with_device(config, load)
        except UnsupportedModelError as error:
            if config.device != "auto":
                raise
            logger.warning("Running on the CPU, not on the GPU. %s", error)
            return with_device(replace(config, device="cpu"), load)
    except MemoryError as error:
        raise DeviceError(
            f"There is not enough memory for the model ({error}); take a smaller one, or a smaller quantisation, or "
            f"lower max_running ({config.max_running})."
        ) from error


def load_onto(
    ops: Ops[Array, Weight], name: str | Path | None, config: EngineConfig, progress: Progress
) -> LoadedModel:
    """As `load_model`, on a device that is there already; the caller closes it if this fails."""
    source = open_model(resolve_model(name, progress))
    with source.checkpoint:
        tokenizer = _load_tokenizer(source)
        chat_template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
        source = replace(source, gguf_metadata=None)  # lists of all tokens and merges
        _return_freed_memory()
        _prepare(ops, source, config, progress)
        capacity, runner = _make_runner(source, config, ops, progress)
        return LoadedModel(
            model_config=source.config,
            tokenizer=tokenizer,
            chat_template=chat_template,
            capacity=capacity,
            runner=runner,
            device=ops.name,
            close=ops.close,
        )


def _prepare(ops: Ops[Array, Weight], source: ModelSource, config: EngineConfig, progress: Progress) -> None:
    embedding = source.checkpoint.tensors.get("model.embed_tokens.weight")
    stored = "" if embedding is None else embedding.encoding  # that it is missing is said when weights are loaded
    types = ElementTypes(weights=config.dtype, cache=config.kv_dtype, stored=stored)
    ops.prepare(dimensions_of(source.config, config.block_size), types, progress)


def dimensions_of(model: ModelConfig, block_size: int) -> Dimensions:
    """What `Ops.prepare` is told of a model."""
    return Dimensions(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        head_dim=model.head_dim,
        block_size=block_size,
    )


def _return_freed_memory() -> None:
    """Building a tokenizer leaves megabytes that glibc would keep, and a small container would count."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _load_tokenizer(source: ModelSource) -> Tokenizer:
    if source.gguf_metadata is not None:
        return Tokenizer.from_gguf(source.gguf_metadata, where=str(source.path))
    assert source.folder is not None
    return Tokenizer.from_file(source.folder / "tokenizer.json")


def _make_runner(
    source: ModelSource, config: EngineConfig, ops: Ops[Array, Weight], progress: Progress
) -> tuple[Capacity, Runner[Array, Weight]]:
    model = source.config
    layout = model.kv_layout(config.block_size, ops.kv_dtype if config.kv_dtype == "auto" else config.kv_dtype)

    def plan() -> Capacity:
        memory = ops.cache_memory(config.memory_fraction)
        return plan_capacity(config, model, layout, memory, ops.max_batched_tokens)

    most = plan()  # before the weights take their part, so that what cannot fit is refused before they are read
    loaded = source.architecture.load(source.checkpoint, model, ops, most.max_model_len, progress)
    limits = StepLimits(most.max_batched_tokens, config.max_running, most.max_model_len)
    ops.reserve(limits, layout, lambda batch, cache: loaded.logits(loaded.forward(batch, cache), batch))
    capacity = plan()
    try:
        cache = ops.allocate_cache(layout, capacity.num_blocks)
        host_cache = ops.allocate_host_cache(layout, capacity.swap_blocks)
    except (MemoryError, ValueError) as error:  # more than NumPy can count is a ValueError
        raise DeviceError(
            f"There is not enough memory for {capacity.num_blocks} KV blocks and {capacity.swap_blocks} swap blocks of "
            f"{capacity.block_bytes} bytes; give a smaller kv_cache_memory (or num_blocks) or swap_memory."
        ) from error
    runner = Runner(
        ops,
        loaded,
        cache,
        host_cache,
        config,
        vocab_size=model.vocab_size,
        max_model_len=capacity.max_model_len,
    )
    return capacity, runner
