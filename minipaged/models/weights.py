"""LlamaWeights: a model's parameters on the device, fused the way the forward pass reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from minipaged.ops.base import Array, Weight


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
    """[2 intermediate, hidden]: gate and up stacked."""
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
