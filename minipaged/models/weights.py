"""LlamaWeights: a model's parameters on the device, fused the way the forward pass reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from minipaged.models.checkpoint import Checkpoint
from minipaged.models.config import ModelConfig
from minipaged.models.llama_tensors import expected_shapes
from minipaged.models.tensor_check import check_tensors
from minipaged.ops.base import Array, Ops, Weight
from minipaged.ops.tensor import HostTensor
from minipaged.progress import Progress, no_progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[Array, Weight]):
    """One transformer layer. Matrices are [out_features, in_features]."""

    input_norm: Array
    """[hidden]"""
    qkv: Weight
    """[(num_query_heads + 2 num_kv_heads) head_dim, hidden]: q, k and v stacked."""
    qkv_bias: Array | None
    q_norm: Array | None
    """[head_dim]"""
    k_norm: Array | None
    """[head_dim]"""
    output: Weight
    """[hidden, num_query_heads head_dim]"""
    output_bias: Array | None
    post_attention_norm: Array
    """[hidden]"""
    gate_up: Weight
    """[2 intermediate, hidden]: gate and up, for `gated_linear`."""
    gate_up_bias: Array | None
    down: Weight
    """[hidden, intermediate]"""
    down_bias: Array | None


@dataclass(frozen=True, slots=True)
class LlamaWeights(Generic[Array, Weight]):
    """The whole model."""

    embedding: Weight
    """[vocab_size, hidden]"""
    layers: tuple[LayerWeights[Array, Weight], ...]
    final_norm: Array
    """[hidden]"""
    head: Weight
    """[vocab_size, hidden]; the same object as `embedding` where the two are tied."""


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, ops: Ops[Array, Weight], progress: Progress = no_progress
) -> LlamaWeights[Array, Weight]:
    """Put a model's parameters on the device; nothing is uploaded before all names and shapes have been checked.

    Raises `ModelLoadError`: a tensor is missing, does not fit the configuration, or is one that nothing reads.
    """
    check_tensors(checkpoint, config)
    load = _Loader(checkpoint, config, ops, progress)
    embedding = load.matrix("model.embed_tokens")
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(_load_layer(load, config, f"model.layers.{index}") for index in range(config.num_layers)),
        final_norm=load.norm("model.norm"),
        head=embedding if config.tie_word_embeddings else load.matrix("lm_head"),
    )


def _load_layer(load: _Loader[Array, Weight], config: ModelConfig, layer: str) -> LayerWeights[Array, Weight]:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    qkv = [f"{attention}.{name}_proj" for name in "qkv"]
    output, down = f"{attention}.o_proj", f"{mlp}.down_proj"
    gate, up = f"{mlp}.gate_proj", f"{mlp}.up_proj"
    return LayerWeights(
        input_norm=load.norm(f"{layer}.input_layernorm"),
        qkv=load.matrix(*qkv),
        qkv_bias=load.bias(*qkv) if config.attention_bias else None,
        q_norm=load.norm(f"{attention}.q_norm") if config.qk_norm else None,
        k_norm=load.norm(f"{attention}.k_norm") if config.qk_norm else None,
        output=load.matrix(output),
        output_bias=load.bias(output) if config.attention_output_bias else None,
        post_attention_norm=load.norm(f"{layer}.post_attention_layernorm"),
        gate_up=load.gate_up(gate, up),
        gate_up_bias=load.gate_up_bias(gate, up) if config.mlp_bias else None,
        down=load.matrix(down),
        down_bias=load.bias(down) if config.mlp_bias else None,
    )


class _Loader(Generic[Array, Weight]):
    """Uploads tensors by the names of their modules, and counts the bytes."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops[Array, Weight], progress: Progress
    ) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._progress = progress
        self._done = 0
        self._total = sum(checkpoint.tensors[name].num_bytes for name in expected_shapes(config))

    def matrix(self, *modules: str) -> Weight:
        return self._load(self._ops.load_matrix, modules, "weight")

    def gate_up(self, gate: str, up: str) -> Weight:
        return self._load(lambda tensors: self._ops.load_gate_up(*tensors), [gate, up], "weight")

    def gate_up_bias(self, gate: str, up: str) -> Array:
        return self._load(lambda tensors: self._ops.load_gate_up_bias(*tensors), [gate, up], "bias")

    def norm(self, module: str) -> Array:
        return self._load(self._ops.load_vector, [module], "weight")

    def bias(self, *modules: str) -> Array:
        return self._load(self._ops.load_vector, modules, "bias")

    def _load(self, load: Callable[[Sequence[HostTensor]], T], modules: Sequence[str], kind: str) -> T:
        names = [f"{module}.{kind}" for module in modules]
        tensors = [self._checkpoint.tensor(name) for name in names]
        loaded = load(tensors)
        for name in names:
            self._checkpoint.release(name)
        self._done += sum(tensor.rows.nbytes for tensor in tensors)
        self._progress("Loading weights", self._done, self._total)
        return loaded
