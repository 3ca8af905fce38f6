"""ModelConfig from the metadata of a GGUF file.

Keys and defaults are those that llama.cpp reads (gguf-py/gguf/constants.py and src/llama-model.cpp in its repository).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from minipaged.errors import ModelLoadError
from minipaged.models.architecture import Architecture
from minipaged.models.architectures.registry import GGUF_ARCHITECTURES
from minipaged.models.config import (
    DefaultRope,
    FactorsRope,
    LinearRope,
    ModelConfig,
    RopeScaling,
    YarnRope,
    context_length,
)
from minipaged.models.files.attention_heads import read_heads
from minipaged.models.files.fields import Fields

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds what `FactorsRope` does; it belongs to the configuration."""

_END_TOKENS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"})
"""Tokens of these model families that end a text or a turn. Many files name but one of theirs in the metadata."""


def parse_gguf_config(
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    rope_factors: tuple[float, ...] | None,
    where: str = "GGUF metadata",
) -> ModelConfig:
    """Read a file's metadata; some properties show only in which tensors it has.

    `rope_factors` is the content of the tensor `ROPE_FACTORS`, if there is one; `where` is what errors call the file.
    Raises `ModelLoadError`.
    """
    general = Fields(metadata, where)
    architecture = _architecture(general)
    prefix = f"{general.string('general.architecture')}."
    num_layers = general.integer(f"{prefix}block_count")
    fields = Fields(
        {
            key.removeprefix(prefix): _same_in_all_layers(value, num_layers)
            for key, value in metadata.items()
            if key.startswith(prefix)
        },
        f"{where}, {prefix}*",
    )
    heads = read_heads(
        fields,
        hidden_size="embedding_length",
        num_query_heads="attention.head_count",
        num_kv_heads="attention.head_count_kv",
        head_dim="attention.key_length",
    )
    _refuse_unsupported(fields, heads.head_dim)
    scaling = _rope_scaling(fields, rope_factors, heads.head_dim)
    vocab_size = _vocab_size(general, fields)
    window = fields.integer("attention.sliding_window", 0, at_least=0) or None
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=vocab_size,
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_query_heads=heads.num_query_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context_length(fields.integer("context_length"), scaling),
        rope_theta=fields.number("rope.freq_base", 10000.0, above=1),
        rope_scaling=scaling,
        attention_bias=architecture.has_qkv_bias or "blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_down.bias" in tensor_names,
        qk_norm=architecture.has_qk_norm,
        tie_word_embeddings="output.weight" not in tensor_names,
        sliding_windows=(window,) * num_layers,
        eos_token_ids=_eos_token_ids(general, vocab_size),
    )


def _architecture(general: Fields) -> Architecture:
    name = general.string("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise general.wrong("general.architecture", f"one of {', '.join(GGUF_ARCHITECTURES)}. Others cannot be loaded")
    return GGUF_ARCHITECTURES[name]


def _same_in_all_layers(value: object, num_layers: int) -> object:
    """Some converters write a list with a number per layer where all layers are alike."""
    alike = isinstance(value, list) and len(value) == num_layers and all(item == value[0] for item in value)
    return value[0] if alike and isinstance(value, list) else value


def _refuse_unsupported(fields: Fields, head_dim: int) -> None:
    if fields.integer("expert_count", 0, at_least=0):
        raise fields.wrong("expert_count", "0. Mixtures of experts cannot be loaded")
    if fields.get("attention.sliding_window_pattern") is not None:
        raise fields.wrong("attention.sliding_window_pattern", "no pattern: a window in all layers or in none")
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.wrong(key, f"{head_dim}, the size of a key head. Other models cannot be loaded")


def _rope_scaling(fields: Fields, factors: tuple[float, ...] | None, head_dim: int) -> RopeScaling:
    old_factor = fields.number("rope.scale_linear", 1.0)
    factor = fields.number("rope.scaling.factor", old_factor or 1.0) or 1.0
    kind = fields.string("rope.scaling.type", "linear")
    if factors is not None:
        if factor != 1.0:
            raise fields.wrong("rope.scaling.factor", f"none beside the tensor {ROPE_FACTORS}")
        if len(factors) != head_dim // 2 or not all(0 < one < float("inf") for one in factors):
            raise ModelLoadError(
                f"{fields.where}: the tensor {ROPE_FACTORS} has {len(factors)} elements, {factors!r:.80}; "
                f"expected {head_dim // 2} (half the size of a head), all positive. Download the file again."
            )
        return FactorsRope(factors)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return DefaultRope()
    if kind == "linear":
        return LinearRope(factor)
    if kind == "yarn":
        return _yarn(fields, factor)
    raise fields.wrong("rope.scaling.type", "one of none, linear, yarn. Models with other kinds cannot be loaded")


def _yarn(fields: Fields, factor: float) -> YarnRope:
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise fields.wrong("rope.scaling.yarn_ext_factor", "1. Other mixtures cannot be loaded")
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier"):
        if fields.get(key) is not None:
            raise fields.wrong(key, "no value. Models with an attention factor of their own cannot be loaded")
    beta_slow = fields.number("rope.scaling.yarn_beta_slow", 1.0, above=0)
    return YarnRope(
        factor=factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, above=beta_slow),
        beta_slow=beta_slow,
    )


def _vocab_size(general: Fields, fields: Fields) -> int:
    tokens = general.get("tokenizer.ggml.tokens")
    return fields.integer("vocab_size", len(tokens) if isinstance(tokens, list) and tokens else None)


def _token_id(general: Fields, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if general.get(key) is None:
        return None
    token_id = general.integer(key, at_least=0)
    if token_id >= vocab_size:
        raise general.wrong(key, f"a token id from 0 to {vocab_size - 1}")
    return token_id


def _eos_token_ids(general: Fields, vocab_size: int) -> tuple[int, ...]:
    named = [_token_id(general, name, vocab_size) for name in ("eos", "eot", "eom")]
    tokens = general.get("tokenizer.ggml.tokens")
    known = [i for i, token in enumerate(tokens) if token in _END_TOKENS] if isinstance(tokens, list) else []
    return tuple(dict.fromkeys(token_id for token_id in [*named, *known] if token_id is not None))
