"""ModelConfig from a Hugging Face config.json and generation_config.json.

Where a key is absent, the default is that of the architecture's configuration class in transformers, except that
a number of KV heads is the number of query heads; if a model is not like that, its k_proj shows it when loading.
"""

from __future__ import annotations

from collections.abc import Mapping

from minipaged.errors import ModelLoadError
from minipaged.models.architecture import Architecture, HuggingFaceKeys
from minipaged.models.architectures.registry import ARCHITECTURES
from minipaged.models.config import ModelConfig, context_length
from minipaged.models.files.attention_heads import read_heads
from minipaged.models.files.fields import Fields
from minipaged.models.files.huggingface_rope import parse_rope


def parse_huggingface_config(
    config: Mapping[str, object], generation: Mapping[str, object] | None, where: str = "config.json"
) -> ModelConfig:
    """Read the parsed JSON of config.json, and of generation_config.json if there is one.

    `where` is what errors call config.json. Raises `ModelLoadError`.
    """
    fields = Fields(config, where)
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    heads = read_heads(
        fields,
        hidden_size="hidden_size",
        num_query_heads="num_attention_heads",
        num_kv_heads="num_key_value_heads",
        head_dim="head_dim",
    )
    rope_theta, rope_scaling = parse_rope(fields)
    vocab_size = fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers")
    keys = architecture.huggingface
    optional_bias = keys.has_optional_biases and fields.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture.name,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_query_heads=heads.num_query_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=context_length(fields.integer("max_position_embeddings"), rope_scaling),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=optional_bias or architecture.has_qkv_bias,
        attention_output_bias=optional_bias,
        mlp_bias=keys.has_optional_mlp_bias and fields.boolean("mlp_bias", False),
        qk_norm=architecture.has_qk_norm,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        sliding_windows=_sliding_windows(fields, keys, num_layers),
        eos_token_ids=_eos_token_ids(fields, generation, keys, vocab_size),
    )


def _architecture(fields: Fields) -> Architecture:
    model_type = fields.string("model_type")
    if model_type not in ARCHITECTURES:
        raise fields.wrong("model_type", f"one of {', '.join(ARCHITECTURES)}. Other architectures cannot be loaded")
    return ARCHITECTURES[model_type]


def _refuse_unsupported(fields: Fields) -> None:
    quantization = fields.within("quantization_config")
    if quantization is not None:
        raise ModelLoadError(
            f"{quantization.where}: the weights are quantised (quant_method {quantization.get('quant_method')!r}); "
            "expected float32, float16 or bfloat16. Take the model's unquantised files, or a GGUF file of it."
        )
    if fields.string("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "silu. Models with other activations cannot be loaded")


def _sliding_windows(fields: Fields, keys: HuggingFaceKeys, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; None: the layer has none."""
    if keys.sliding_window == "none":
        return (None,) * num_layers
    if keys.sliding_window == "all layers":
        explicitly_none = "sliding_window" in fields.values and fields.get("sliding_window") is None
        window = None if explicitly_none else fields.integer("sliding_window", 4096)
        first_layer = 0
    else:
        use_window = fields.boolean("use_sliding_window", False)
        window = fields.integer("sliding_window", 4096) if use_window else None
        first_layer = fields.integer("max_window_layers", 28, at_least=0)
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return tuple(window if layer >= first_layer else None for layer in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or any(t not in known for t in layer_types):
        raise fields.wrong("layer_types", f"a list of {num_layers} (num_hidden_layers) times {' or '.join(known)}")
    if window is None and "sliding_attention" in layer_types:
        raise fields.wrong("layer_types", "full_attention alone, since no sliding window is given or switched on")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _eos_token_ids(
    fields: Fields, generation: Mapping[str, object] | None, keys: HuggingFaceKeys, vocab_size: int
) -> tuple[int, ...]:
    """generation_config.json has the last word: it knows of the tokens that end a turn, too."""
    if generation is not None and generation.get("eos_token_id") is not None:
        return _token_ids(Fields(generation, "generation_config.json"), "eos_token_id", vocab_size)
    if "eos_token_id" not in fields.values and keys.default_eos_token_id is not None:
        return (keys.default_eos_token_id,)
    return _token_ids(fields, "eos_token_id", vocab_size)


def _token_ids(fields: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    value = fields.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
        raise fields.wrong(key, f"a token id, or a list of them, from 0 to {vocab_size - 1} (vocab_size - 1)")
    return tuple(ids)
