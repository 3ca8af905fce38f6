"""ModelConfig: the shape of a Llama-family model, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.kv.layout import ElementType, KVLayout, grouped_query_layout


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Rotary embedding as in RoFormer (arXiv:2104.09864): frequency theta**(-2i/head_dim)."""


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's rule: low frequencies divided by `factor`, high ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv:2309.00071): a ramp between interpolated and kept frequencies, and an attention scale."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Multiplies cos and sin; None: 0.1 ln(factor) + 1, or from mscale and mscale_all_dim."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """Whether the ramp's ends are rounded to whole dimensions."""


@dataclass(frozen=True, slots=True)
class FactorsRope:
    """Each frequency divided by a factor of its own: what a GGUF file stores where the rule was Llama 3.1's."""

    factors: tuple[float, ...]
    """One per pair of elements, head_dim / 2 of them, fastest frequency first."""


RopeScaling = DefaultRope | LinearRope | Llama3Rope | YarnRope | FactorsRope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes are numbers of elements; `num_query_heads` is a multiple of `num_kv_heads`."""

    architecture: str
    """Its name in the registry."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    attention_bias: bool
    """Biases on q, k and v."""
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over head_dim of each query and key head before rotation (Qwen3)."""
    tie_word_embeddings: bool
    """The output head is the embedding table."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many latest positions a token attends to, itself included; None: all."""
    eos_token_ids: tuple[int, ...]

    def kv_layout(self, block_size: int, element_type: ElementType) -> KVLayout:
        """Where the KV of this model's tokens stands in blocks of `block_size` tokens."""
        return grouped_query_layout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            element_type=element_type,
        )


def context_length(declared: int, scaling: RopeScaling) -> int:
    """The longest sequence: with YaRN some files declare the stretched context and some the original one."""
    if isinstance(scaling, YarnRope):
        return max(declared, int(scaling.factor * scaling.original_max_position_embeddings))
    return declared
