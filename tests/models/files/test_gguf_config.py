"""The metadata of GGUF files."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from minipaged.errors import ModelLoadError
from minipaged.models.config import DefaultRope, FactorsRope, LinearRope, ModelConfig, RopeScaling, YarnRope
from minipaged.models.files.gguf_config import parse_gguf_config
from minipaged.models.files.model_source import open_model
from minipaged.models.rope import frequencies
from tests.tiny import tiny_config, write_model_folder, write_tiny_model
from tests.tiny_gguf import write_model_gguf, write_tiny_gguf


def metadata(architecture: str) -> dict[str, object]:
    values: dict[str, object] = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 8,
    }
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in values.items()}


def parse(
    changes: dict[str, object] | None = None,
    *,
    architecture: str = "llama",
    tensors: tuple[str, ...] = (),
    factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    return parse_gguf_config(metadata(architecture) | (changes or {}), tensors, factors, where="model.gguf")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"head_dim": 32, "num_key_value_heads": 1},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3"},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ],
)
def test_the_same_configuration_as_from_a_folder(tmp_path: Path, overrides: dict[str, object]) -> None:
    folder = open_model(write_model_folder(tmp_path / "model", tiny_config(**overrides))).config
    file = open_model(write_model_gguf(tmp_path / "model.gguf", tiny_config(**overrides))).config
    for name in ModelConfig.__slots__:
        expected = getattr(folder, name)
        if name == "architecture" and expected == "mistral":
            expected = "llama"
        if name == "rms_norm_eps":
            expected = float(np.float32(expected))
        assert getattr(file, name) == expected, name


def test_llama_3_1_rope_factors_give_the_frequencies_of_the_rule(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    folder = open_model(write_tiny_model(tmp_path / "model", rope_scaling=scaling)).config
    source = open_model(write_tiny_gguf(tmp_path / "model.gguf", rope_scaling=scaling))
    file = source.config
    assert isinstance(file.rope_scaling, FactorsRope)
    np.testing.assert_allclose(
        frequencies(file.head_dim, file.rope_theta, file.rope_scaling),
        frequencies(folder.head_dim, folder.rope_theta, folder.rope_scaling),
        rtol=1e-6,
    )
    assert "rope_freqs.weight" not in source.checkpoint.tensors  # it has been read as configuration


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, DefaultRope()),
        ({"llama.rope.scaling.type": "none"}, DefaultRope()),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}, DefaultRope()),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, DefaultRope()),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearRope(4.0)),
        ({"llama.rope.scaling.factor": 4.0}, LinearRope(4.0)),
        ({"llama.rope.scale_linear": 4.0}, LinearRope(4.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            YarnRope(4.0, 128, beta_fast=16.0),
        ),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, YarnRope(4.0, 512)),
    ],
)
def test_rope_scaling(changes: dict[str, object], expected: RopeScaling) -> None:
    assert parse(changes).rope_scaling == expected


def test_defaults() -> None:
    config = parse({"llama.attention.head_count_kv": None, "llama.vocab_size": None, "tokenizer.ggml.tokens": ["a"]})
    assert (config.num_kv_heads, config.head_dim, config.vocab_size, config.rope_theta) == (4, 16, 1, 10000.0)
    assert config.eos_token_ids == ()


def test_lists_with_a_number_per_layer() -> None:
    assert parse({"llama.attention.head_count_kv": [2, 2]}).num_kv_heads == 2
    with pytest.raises(ModelLoadError, match=re.escape("attention.head_count_kv is [2, 4]; expected an integer")):
        parse({"llama.attention.head_count_kv": [2, 4]})


def test_properties_that_show_in_the_tensors() -> None:
    config = parse(tensors=("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"))
    assert not config.tie_word_embeddings
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, True, True)
    assert parse(tensors=("token_embd.weight",)).tie_word_embeddings


def test_every_token_that_ends_a_turn_is_an_eos() -> None:
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "b", "<|im_end|>", "c", "d", "e"]
    changes: dict[str, object] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.eom_token_id": 5,
    }
    config = parse(changes)
    assert config.eos_token_ids[0] == 2  # the file's own first
    assert set(config.eos_token_ids) == {1, 2, 3, 4, 5}


def test_sliding_window() -> None:
    assert parse({"llama.attention.sliding_window": 8}).sliding_windows == (8, 8)
    assert parse({"llama.attention.sliding_window": 0}).sliding_windows == (None, None)


MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"general.architecture": "gemma2"}, "general.architecture is 'gemma2'; expected one of llama, qwen2, qwen3"),
    ({"general.architecture": None}, "general.architecture is None; expected a string"),
    ({"llama.attention.head_count_kv": 3}, "expected a divisor of attention.head_count, 4"),
    (
        {"llama.attention.key_length": 15},
        "attention.key_length is 15 (given, or embedding_length / attention.head_count); expected an even",
    ),
    ({"llama.embedding_length": 66}, "embedding_length 66 is no multiple of attention.head_count 4"),
    ({"llama.attention.value_length": 32}, "attention.value_length is 32; expected 16"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8; expected 16"),
    ({"llama.expert_count": 8}, "expert_count is 8; expected 0. Mixtures of experts"),
    ({"llama.attention.sliding_window_pattern": 2}, "expected no pattern"),
    ({"llama.rope.scaling.type": "longrope"}, "'longrope'; expected one of none, linear, yarn"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.5}, "attn_factor is 0.5"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_slow": 0}, "yarn_beta_slow is 0"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": 0.5}, "yarn_beta_fast is 0.5"),
    ({"llama.rope.freq_base": 1.0}, "rope.freq_base is 1.0; expected a number above 1"),
    ({"tokenizer.ggml.eos_token_id": 8}, "eos_token_id is 8; expected a token id from 0 to 7"),
    ({"tokenizer.ggml.eot_token_id": -1}, "eot_token_id is -1"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        parse(changes)


@pytest.mark.parametrize("factors", [(1.0,) * 7, (1.0,) * 7 + (0.0,), (1.0,) * 7 + (math.nan,)])
def test_rope_factors_of_the_wrong_kind(factors: tuple[float, ...]) -> None:
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight .* expected 8"):
        parse(factors=factors)


def test_rope_factors_beside_a_scaling() -> None:
    with pytest.raises(ModelLoadError, match=r"rope.scaling.factor is 4.0; expected none beside"):
        parse({"llama.rope.scaling.factor": 4.0}, factors=(1.0,) * 8)


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "vocab_size"],
)
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "64", True])
def test_missing_and_ill_typed_keys_are_named(key: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=rf"^model\.gguf.*{re.escape(key)} is {re.escape(repr(value))}; expected"):
        parse({f"llama.{key}": value})
