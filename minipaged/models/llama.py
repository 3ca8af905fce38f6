"""Llama: the forward pass of the whole family, written once over Ops."""

from __future__ import annotations

from typing import Generic

from minipaged.models.checkpoint import Checkpoint
from minipaged.models.config import ModelConfig
from minipaged.models.rope import rope_tables
from minipaged.models.weights import LayerWeights, LlamaWeights, load_weights
from minipaged.ops.base import Array, Batch, KVPool, Ops, Weight
from minipaged.progress import Progress, no_progress


def load_llama(
    checkpoint: Checkpoint,
    config: ModelConfig,
    ops: Ops[Array, Weight],
    max_model_len: int,
    progress: Progress = no_progress,
) -> Llama[Array, Weight]:
    """Put a model onto the device, for sequences of up to `max_model_len` tokens. Raises as `load_weights`."""
    weights = load_weights(checkpoint, config, ops, progress)
    return Llama(config, weights, ops, ops.load_rope(*rope_tables(config, max_model_len)))


class Llama(Generic[Array, Weight]):
    """A decoder of pre-normalised attention and gated MLP layers: Llama, SmolLM2, Mistral, Qwen2, Qwen3.

    `rope` is what `ops.load_rope` made of `rope_tables(config, max_model_len)`.
    """

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights[Array, Weight], ops: Ops[Array, Weight], rope: Array
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.rope = rope

    def forward(self, batch: Batch[Array], cache: KVPool[Array]) -> Array:
        """Compute the K and V of every token of the batch, in every layer, and write them into the cache.

        Returns the hidden states after the last layer's attention, [T, hidden]. What follows no other token reads:
        `logits` computes it, for the tokens whose logits are wanted.
        """
        layers = self.weights.layers
        hidden = self.ops.embed(batch.token_ids, self.weights.embedding)
        for index, layer in enumerate(layers):
            hidden = self._add_attention(index, layer, hidden, batch, cache)
            if index < len(layers) - 1:
                hidden = self._add_mlp(layer, hidden)
        return hidden

    def logits(self, hidden: Array, batch: Batch[Array]) -> Array:
        """Logits of the tokens `batch.sampled`, float32 [N, vocab_size], from what `forward` returned."""
        hidden = self._add_mlp(self.weights.layers[-1], self.ops.take(hidden, batch.sampled))
        normed = self.ops.rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return self.ops.logits(normed, self.weights.head)

    def _add_attention(
        self, index: int, layer: LayerWeights[Array, Weight], hidden: Array, batch: Batch[Array], cache: KVPool[Array]
    ) -> Array:
        config = self.config
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, config.rms_norm_eps)
        normed = self.ops.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        qkv = self.ops.linear(normed, layer.qkv, layer.qkv_bias, None)
        query = self.ops.rope_and_cache(qkv, self.rope, cache, index, batch, config.num_query_heads, norms)
        scale = config.head_dim**-0.5
        window = config.sliding_windows[index]
        attended = self.ops.paged_attention(query, cache, index, batch, scale, window)
        return self.ops.linear(attended, layer.output, layer.output_bias, hidden)

    def _add_mlp(self, layer: LayerWeights[Array, Weight], hidden: Array) -> Array:
        normed = self.ops.rms_norm(hidden, layer.post_attention_norm, self.config.rms_norm_eps)
        activated = self.ops.gated_linear(normed, layer.gate_up, layer.gate_up_bias)
        return self.ops.linear(activated, layer.down, layer.down_bias, hidden)
