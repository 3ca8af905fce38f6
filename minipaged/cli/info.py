"""`minipaged info`: what a model is, what its KV cache takes, and whether there is a GPU to run it."""

from __future__ import annotations

from pathlib import Path

import typer

from minipaged.cli.loading_bar import loading_bar
from minipaged.cli.memory_sizes import format_size
from minipaged.config import EngineConfig
from minipaged.engine.devices import describe_cuda
from minipaged.kv.layout import ElementType
from minipaged.kv.ledger import blocks_in_budget
from minipaged.models.config import ModelConfig
from minipaged.models.files.hub import resolve_model
from minipaged.models.files.model_source import ModelSource, open_model

ELEMENT_TYPES: dict[ElementType, str] = {
    "float16": "the default on a CPU or GPU is this or bfloat16, which is as large",
    "float32": 'the default of device "reference"',
}
"""Element types of the KV cache, and which devices use them."""


def run(model: str | None, kv_memory: int) -> None:
    """Print two columns. `kv_memory`: bytes for the KV cache."""
    with loading_bar() as progress:
        path = resolve_model(model, progress)
    source = open_model(path)
    with source.checkpoint:
        rows = [*_model_rows(source), *_cache_rows(source.config, kv_memory), ("GPU", describe_cuda())]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        typer.echo(f"{label:<{width}}  {value}")


def _model_rows(source: ModelSource) -> list[tuple[str, str]]:
    config = source.config
    bits = 8 * source.num_bytes / source.num_parameters
    windows = {window for window in config.sliding_windows if window is not None}
    attention = f"{config.num_query_heads} query heads, {config.num_kv_heads} KV heads, head_dim {config.head_dim}"
    if windows:
        attention += f", sliding window of {max(windows)} tokens"
    return [
        ("Model", _shown(source.path)),
        ("Architecture", f"{config.architecture}, {config.num_layers} layers, hidden size {config.hidden_size}"),
        ("Attention", attention),
        ("Vocabulary", f"{config.vocab_size:,} tokens"),
        ("Context length", f"{config.max_position_embeddings:,} tokens"),
        ("Parameters", f"{_count(source.num_parameters)}, {bits:.1f} bits each"),
        ("Weights on disk", format_size(source.num_bytes)),
    ]


def _cache_rows(config: ModelConfig, kv_memory: int) -> list[tuple[str, str]]:
    block_size = EngineConfig().block_size
    rows = []
    for dtype, use in ELEMENT_TYPES.items():
        layout = config.kv_layout(block_size, dtype)
        blocks = blocks_in_budget(kv_memory, layout.bytes_per_block)
        tokens = blocks * block_size
        rows.append(
            (
                f"KV cache, {dtype}",
                f"{format_size(layout.bytes_per_token)} per token, "
                f"{format_size(layout.bytes_per_block)} per block ({use})",
            )
        )
        rows.append(
            (
                f"  in {format_size(kv_memory)}",
                f"{blocks:,} blocks of {block_size} tokens = {tokens:,} tokens, "
                f"{tokens / config.max_position_embeddings:.3g} sequences of full context length",
            )
        )
    return rows


def _shown(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"
