"""Which tensors a model has, and the strict comparison of a checkpoint with that."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np

from minipaged.errors import ModelLoadError
from minipaged.models.checkpoint import Checkpoint, StoredTensor
from minipaged.models.config import ModelConfig

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

# Buffers that old versions of transformers saved; the rotation is computed from the configuration.
_RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model reads, in the order of its forward pass, with its shape."""
    sizes = _sizes(config)
    return {name: tuple(sizes[axis] for axis in axes) for name, axes in _expected_axes(config).items()}


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare names and shapes, from the headers alone.

    Raises `ModelLoadError` for a shape that does not fit, a missing tensor, or one that nothing reads; and for a
    separate head beside tied embeddings, if the two differ.
    """
    expected = expected_shapes(config)
    for name, shape in expected.items():
        stored = checkpoint.tensors.get(name)
        if stored is not None and stored.shape != shape:
            raise ModelLoadError(
                f"{checkpoint.path}: the tensor {_called(stored)} has the shape {list(stored.shape)}; expected "
                f"{list(shape)} from the configuration. {_cause_of_shape(stored, shape, config)}"
            )
    missing = [name for name in expected if name not in checkpoint.tensors]
    if missing:
        raise ModelLoadError(
            f"{checkpoint.path} lacks {_list(missing)}. {_cause_of_missing(missing[0], checkpoint, config)}"
        )
    unread = [tensor for name, tensor in checkpoint.tensors.items() if name not in expected]
    unread = [tensor for tensor in unread if not _is_harmless(tensor, checkpoint, config)]
    if unread:
        raise ModelLoadError(
            f"{checkpoint.path} holds {_list([_called(tensor) for tensor in unread])}, which nothing reads. "
            f"{_cause_of_unread(unread[0].name, config)}"
        )


def _expected_axes(config: ModelConfig) -> dict[str, tuple[str, ...]]:
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
    return axes if config.tie_word_embeddings else axes | {_HEAD: ("vocab", "hidden")}


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "query heads": config.num_query_heads * config.head_dim,
        "KV heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
    }


def _is_harmless(tensor: StoredTensor, checkpoint: Checkpoint, config: ModelConfig) -> bool:
    if tensor.name != _HEAD or not config.tie_word_embeddings:
        return _RECOMPUTED.fullmatch(tensor.name) is not None
    embedding = checkpoint.tensors[_EMBEDDING]
    same = tensor.shape == embedding.shape and tensor.encoding == embedding.encoding
    if not (same and np.array_equal(tensor.data, embedding.data)):
        raise ModelLoadError(
            f"{checkpoint.path} holds {_HEAD} that differs from {_EMBEDDING}, although tie_word_embeddings is true, "
            "which makes them one. Set it to false to use the head, or take the tensor out of the checkpoint."
        )
    return True


def _cause_of_shape(stored: StoredTensor, expected: tuple[int, ...], config: ModelConfig) -> str:
    if stored.shape == expected[::-1]:
        return "It looks transposed: a matrix is stored as [output features, input features]."
    if len(stored.shape) != len(expected):
        return "The checkpoint may be of another architecture than the configuration."
    axes = _expected_axes(config)[stored.name]
    axis, found = next(
        (axis, found) for axis, found, size in zip(axes, stored.shape, expected, strict=True) if found != size
    )
    num_heads, remainder = divmod(found, config.head_dim)
    if axis == "KV heads" and not remainder and config.num_query_heads % num_heads == 0:
        return (
            f"The configuration has num_key_value_heads {config.num_kv_heads} (where it is left out, it is the number "
            f"of query heads), but the tensor has {num_heads} heads of {config.head_dim}: set num_key_value_heads to "
            f"{num_heads}."
        )
    if axis == "query heads" and found % config.num_query_heads == 0:
        return (
            f"The configuration has head_dim {config.head_dim} (where it is left out, it is hidden_size divided by "
            f"num_attention_heads): set head_dim to {found // config.num_query_heads}."
        )
    keys = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "head_dim": "head_dim",
    }
    if axis in keys:
        return f"The configuration has {keys[axis]} {_sizes(config)[axis]}: set {keys[axis]} to {found}."
    return "The numbers of heads or head_dim in the configuration are not this checkpoint's."


def _cause_of_missing(name: str, checkpoint: Checkpoint, config: ModelConfig) -> str:
    num_stored = _num_layers(checkpoint.tensors)
    if name == _HEAD:
        return "If the model uses its embedding table as the head, set tie_word_embeddings to true."
    if 0 < num_stored < config.num_layers and name.startswith(f"model.layers.{num_stored}."):
        return (
            f"The configuration has num_hidden_layers {config.num_layers}, but the checkpoint has {num_stored} layers."
        )
    if name.endswith("bias"):
        return f"If the model has no such biases, {_bias_key(name)} must be false and model_type not qwen2."
    if name.removeprefix("model.") in checkpoint.tensors:
        return "The checkpoint's names lack the beginning 'model.'; take one that was saved with its language head."
    return "The checkpoint is incomplete, or of another architecture than the configuration; download it again."


def _cause_of_unread(name: str, config: ModelConfig) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None and int(layer[1]) >= config.num_layers:
        return f"The configuration has num_hidden_layers {config.num_layers}, fewer than the checkpoint."
    if name.endswith("proj.bias"):
        return f"If the model has biases there, set {_bias_key(name)} to true."
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return "Only models of model_type qwen3 normalise queries and keys."
    if "lora" in name:
        return "It looks like an adapter; merge it into the model's weights first."
    return "The checkpoint may be of another architecture than the configuration, or quantised."


def _num_layers(names: Collection[str]) -> int:
    indices = [int(match[1]) for name in names if (match := re.match(r"model\.layers\.(\d+)\.", name))]
    return max(indices, default=-1) + 1


def _bias_key(name: str) -> str:
    return "mlp_bias" if ".mlp." in name else "attention_bias"


def _called(tensor: StoredTensor) -> str:
    same = tensor.name == tensor.stored_name
    return tensor.name if same else f"{tensor.stored_name} ({tensor.name})"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 4} more tensors" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
