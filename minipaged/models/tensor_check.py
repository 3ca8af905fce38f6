"""The strict comparison of a checkpoint with the tensors that a model of the Llama family reads."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np

from minipaged.errors import ModelLoadError
from minipaged.models.checkpoint import Checkpoint, StoredTensor
from minipaged.models.config import ModelConfig
from minipaged.models.llama_tensors import EMBEDDING, HEAD, axis_sizes, expected_axes, expected_shapes

# Buffers that old versions of transformers saved; the rotation is computed from the configuration.
_RECOMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


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


def _is_harmless(tensor: StoredTensor, checkpoint: Checkpoint, config: ModelConfig) -> bool:
    if tensor.name != HEAD or not config.tie_word_embeddings:
        return _RECOMPUTED.fullmatch(tensor.name) is not None
    embedding = checkpoint.tensors[EMBEDDING]
    same = tensor.shape == embedding.shape and tensor.encoding == embedding.encoding
    if not (same and np.array_equal(tensor.data, embedding.data)):
        raise ModelLoadError(
            f"{checkpoint.path} holds {HEAD} that differs from {EMBEDDING}, although tie_word_embeddings is true, "
            "which makes them one. Set it to false to use the head, or take the tensor out of the checkpoint."
        )
    return True


def _cause_of_shape(stored: StoredTensor, expected: tuple[int, ...], config: ModelConfig) -> str:
    if stored.shape == expected[::-1]:
        return "It looks transposed: a matrix is stored as [output features, input features]."
    if len(stored.shape) != len(expected):
        return "The checkpoint may be of another architecture than the configuration."
    axes = expected_axes(config)[stored.name]
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
        return f"The configuration has {keys[axis]} {axis_sizes(config)[axis]}: set {keys[axis]} to {found}."
    return "The numbers of heads or head_dim in the configuration are not this checkpoint's."


def _cause_of_missing(name: str, checkpoint: Checkpoint, config: ModelConfig) -> str:
    num_stored = _num_layers(checkpoint.tensors)
    if name == HEAD:
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
