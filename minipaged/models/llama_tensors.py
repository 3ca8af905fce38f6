"""The tensors of the Llama family: their names, in Hugging Face checkpoints and in GGUF files, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping

from minipaged.models.config import ModelConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

GGUF_MODULES: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Name of a module outside layers in GGUF, and in a Hugging Face checkpoint."""
GGUF_LAYER_MODULES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name of a layer's module in GGUF, and within the layer in a Hugging Face checkpoint."""

_MODEL: Mapping[str, tuple[str, ...]] = {
    "model.embed_tokens.weight": ("vocab", "hidden"),
    "model.norm.weight": ("hidden",),
}
_LAYER: Mapping[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("query heads", "hidden"),
    "self_attn.k_proj.weight": ("KV heads", "hidden"),
    "self_attn.v_proj.weight": ("KV heads", "hidden"),
    "self_attn.o_proj.weight": ("hidden", "query heads"),
    "post_attention_layernorm.weight": ("hidden",),
    "mlp.gate_proj.weight": ("intermediate", "hidden"),
    "mlp.up_proj.weight": ("intermediate", "hidden"),
    "mlp.down_proj.weight": ("hidden", "intermediate"),
}
_QKV_BIAS: Mapping[str, tuple[str, ...]] = {
    "self_attn.q_proj.bias": ("query heads",),
    "self_attn.k_proj.bias": ("KV heads",),
    "self_attn.v_proj.bias": ("KV heads",),
}
_OUTPUT_BIAS: Mapping[str, tuple[str, ...]] = {"self_attn.o_proj.bias": ("hidden",)}
_MLP_BIAS: Mapping[str, tuple[str, ...]] = {
    "mlp.gate_proj.bias": ("intermediate",),
    "mlp.up_proj.bias": ("intermediate",),
    "mlp.down_proj.bias": ("hidden",),
}
_QK_NORM: Mapping[str, tuple[str, ...]] = {
    "self_attn.q_norm.weight": ("head_dim",),
    "self_attn.k_norm.weight": ("head_dim",),
}


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model reads, in the order of its forward pass, with its shape."""
    sizes = axis_sizes(config)
    return {name: tuple(sizes[axis] for axis in axes) for name, axes in expected_axes(config).items()}


def expected_axes(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Every tensor that the model reads, with what each of its axes counts: a key of `axis_sizes`."""
    layer = dict(_LAYER)
    for wanted, tensors in (
        (config.attention_bias, _QKV_BIAS),
        (config.attention_output_bias, _OUTPUT_BIAS),
        (config.mlp_bias, _MLP_BIAS),
        (config.qk_norm, _QK_NORM),
    ):
        layer |= tensors if wanted else {}
    axes = dict(_MODEL)
    for index in range(config.num_layers):
        axes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return axes if config.tie_word_embeddings else axes | {HEAD: ("vocab", "hidden")}


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """How long each kind of axis is."""
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "query heads": config.num_query_heads * config.head_dim,
        "KV heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
    }
