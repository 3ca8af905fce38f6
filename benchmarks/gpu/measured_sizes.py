"""How large everything is: on a GPU, and in the test of this benchmark, where the GPU is emulated."""

from __future__ import annotations

from dataclasses import dataclass

from minipaged.models.config import DefaultRope, ModelConfig


@dataclass(frozen=True, slots=True)
class Effort:
    """How long one measurement takes."""

    seconds: float
    """Of the device's time, all repeats together."""
    most_calls: int
    """In one repeat."""
    repeats: int
    """Whose median is taken."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """See the parts."""

    model: ModelConfig
    effort: Effort
    copy_bytes: int
    error_tokens: int
    error_positions: int
    decode_batches: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    groups: tuple[int, ...]
    """Query heads per KV head."""
    most_cache_bytes: int
    product_rows: tuple[int, ...]
    most_head_rows: int
    """The head only computes rows that sample."""
    prefill_lengths: tuple[int, ...]
    batches: tuple[int, ...]
    """Requests at once, end to end."""
    prompt_tokens: int
    long_prompt_tokens: int
    """Of the prompt whose first token is timed."""
    new_tokens: int
    swap_blocks: int


def llama(
    *, hidden: int, intermediate: int, layers: int, heads: tuple[int, int], head_dim: int, vocab: int
) -> ModelConfig:
    """A model of Llama 3's kind. `heads`: query and KV heads."""
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        rope_scaling=DefaultRope(),
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        sliding_windows=(None,) * layers,
        eos_token_ids=(0,),
    )


REAL = Sizes(
    model=llama(hidden=4096, intermediate=14336, layers=32, heads=(32, 8), head_dim=128, vocab=128256),
    effort=Effort(seconds=0.03, most_calls=100, repeats=7),
    copy_bytes=2 << 30,
    error_tokens=200,
    error_positions=1500,
    decode_batches=(1, 16, 64, 256),
    decode_contexts=(512, 2048, 8192, 32768),
    groups=(1, 4, 8),
    most_cache_bytes=36 << 30,
    product_rows=(1, 8, 16, 64, 256, 2048, 8192),
    most_head_rows=256,
    prefill_lengths=(2048, 8192),
    batches=(1, 16, 64, 256),
    prompt_tokens=128,
    long_prompt_tokens=2048,
    new_tokens=64,
    swap_blocks=512,
)
"""Llama 3 8B."""

TINY = Sizes(
    model=llama(hidden=64, intermediate=64, layers=1, heads=(2, 1), head_dim=64, vocab=384),
    effort=Effort(seconds=0.0, most_calls=2, repeats=1),
    copy_bytes=1 << 10,
    error_tokens=5,
    error_positions=20,
    decode_batches=(1, 2),
    decode_contexts=(20,),
    groups=(1, 2),
    most_cache_bytes=1 << 20,
    product_rows=(1, 3),
    most_head_rows=2,
    prefill_lengths=(20,),
    batches=(1, 2),
    prompt_tokens=4,
    long_prompt_tokens=8,
    new_tokens=3,
    swap_blocks=3,
)
"""For the fake GPU of the tests."""
