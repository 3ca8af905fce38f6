"""config.json and generation_config.json of every generation and architecture."""

from __future__ import annotations

import re

import pytest

from minipaged.errors import ModelLoadError
from minipaged.models.config import DefaultRope, LinearRope, Llama3Rope, ModelConfig, RopeScaling, YarnRope
from minipaged.models.files.huggingface_config import parse_huggingface_config
from tests.models.files import published
from tests.tiny import tiny_config


def parse(generation: dict[str, object] | None = None, /, **overrides: object) -> ModelConfig:
    return parse_huggingface_config(tiny_config(**overrides), generation)


def without(config: dict[str, object], *keys: str) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_2_without_the_keys_that_came_later() -> None:
    config = parse_huggingface_config(published.LLAMA_2_7B, None)
    assert (config.architecture, config.num_query_heads, config.num_kv_heads, config.head_dim) == ("llama", 32, 32, 128)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, DefaultRope())
    assert config.eos_token_ids == (2,)
    assert config.sliding_windows == (None,) * 32
    assert not config.attention_bias
    assert not config.tie_word_embeddings


def test_llama_3_1() -> None:
    config = parse_huggingface_config(published.LLAMA_3_1_8B, None)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    assert config.max_position_embeddings == 131072
    assert config.eos_token_ids == (128001, 128008, 128009)


def test_smollm2() -> None:
    config = parse_huggingface_config(published.SMOLLM2_135M, {"eos_token_id": 2})
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_word_embeddings
    assert config.rope_theta == 100000.0


def test_mistral() -> None:
    first = parse_huggingface_config(published.MISTRAL_7B_V01, None)
    assert first.sliding_windows == (4096,) * 32
    assert (first.attention_bias, first.attention_output_bias, first.mlp_bias, first.qk_norm) == (False,) * 4
    nemo = parse_huggingface_config(published.MISTRAL_NEMO, None)
    assert nemo.sliding_windows == (None,) * 40
    assert nemo.head_dim == 128  # not hidden_size / num_attention_heads, which is 160


def test_qwen2_has_biases_on_q_k_and_v_alone() -> None:
    config = parse_huggingface_config(published.QWEN2_5_0_5B, {"eos_token_id": [151645, 151643]})
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True, False, False)
    assert config.eos_token_ids == (151645, 151643)
    assert config.sliding_windows == (None,) * 24


def test_qwen3_normalises_queries_and_keys() -> None:
    config = parse_huggingface_config(published.QWEN3_0_6B, None)
    assert (config.qk_norm, config.attention_bias, config.head_dim) == (True, False, 128)


@pytest.mark.parametrize(
    ("model_type", "expected"), [("llama", (True, True)), ("qwen3", (True, True)), ("mistral", (False, False))]
)
def test_attention_bias_where_the_architecture_has_such(model_type: str, expected: tuple[bool, bool]) -> None:
    config = parse(model_type=model_type, attention_bias=True)
    assert (config.attention_bias, config.attention_output_bias) == expected


def test_mlp_bias() -> None:
    assert parse(mlp_bias=True).mlp_bias
    assert not parse(mlp_bias=False).mlp_bias


@pytest.mark.parametrize("config", [tiny_config(head_dim=None), without(tiny_config(), "head_dim")])
def test_head_dim_is_derived(config: dict[str, object]) -> None:
    assert parse_huggingface_config(config, None).head_dim == 16


def test_head_dim_is_given() -> None:
    assert parse(head_dim=32).head_dim == 32


LLAMA3_KEYS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROPE_CASES: list[tuple[dict[str, object], RopeScaling]] = [
    ({"rope_scaling": None}, DefaultRope()),
    ({"rope_scaling": {}}, DefaultRope()),
    ({"rope_scaling": {"rope_type": "default"}}, DefaultRope()),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(2.0)),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, LinearRope(2.0)),
    ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}}, LinearRope(2.0)),
    ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3_KEYS}, Llama3Rope(8.0, 1.0, 4.0, 128)),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "finetuned": True}},
        YarnRope(4.0, 128),
    ),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, YarnRope(4.0, 512)),
    ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128}}, YarnRope(4.0, 128)),
    (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16,
                "beta_slow": None,
                "attention_factor": 1.25,
                "mscale": 0.5,
                "mscale_all_dim": 1.0,
                "truncate": False,
            }
        },
        YarnRope(4.0, 128, 16.0, 1.0, 1.25, 0.5, 1.0, truncate=False),
    ),
    ({"rope_parameters": {"rope_type": "llama3"} | LLAMA3_KEYS}, Llama3Rope(8.0, 1.0, 4.0, 128)),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, LinearRope(2.0)),
    (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0},
            }
        },
        LinearRope(2.0),
    ),
    (
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        LinearRope(2.0),
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), ROPE_CASES)
def test_rope_in_every_generation(overrides: dict[str, object], expected: RopeScaling) -> None:
    assert parse(**overrides).rope_scaling == expected


def test_rope_theta_in_rope_parameters() -> None:
    config = without(tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rope_theta")
    assert parse_huggingface_config(config, None).rope_theta == 5e5
    config = without(tiny_config(rope_parameters={"full_attention": {"rope_theta": 7e5}}), "rope_theta")
    assert parse_huggingface_config(config, None).rope_theta == 7e5


@pytest.mark.parametrize("declared", [128, 512])
def test_yarn_reaches_the_stretched_context(declared: int) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse(max_position_embeddings=declared, rope_scaling=scaling).max_position_embeddings == 512


ROPE_MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'; expected one of default, linear, llama3, yarn"),
    ({"rope_scaling": {"type": "longrope"}}, "'longrope'; expected one of default, linear, llama3, yarn"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters: rope_type is 'proportional'"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "rope_type is 'yarn'; expected the same as type"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing; expected a number of at least 1"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected an object"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    ({"rope_scaling": {"type": "llama3"} | LLAMA3_KEYS | {"high_freq_factor": 1.0}}, "a number above 1"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1}}, "beta_fast is 1; expected a number above 1"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 0}}, "beta_slow is 0; expected a number above 0"),
    ({"rope_scaling": {"type": "yarn", "factor": 1e308}}, "factor is 1e+308; expected a number of at least 1"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1}, "rope_theta is 1; expected a number above 1"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 3}}, "holds beta, which a scaling of kind 'linear'"),
    ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 500000.0; expected 10000.0"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "different rotary embeddings",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"x": 1}}},
        "holds x",
    ),
    (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0},
                "sliding_attention": {},
            }
        },
        "different rotary embeddings",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), ROPE_MISTAKES)
def test_rope_mistakes(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        parse(**overrides)


MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"model_type": "gpt2"}, "model_type is 'gpt2'; expected one of llama, mistral, qwen2, qwen3"),
    ({"model_type": None}, "model_type is None; expected a string"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected silu"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised (quant_method 'awq')"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor of num_attention_heads, 4"),
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8; expected a divisor"),
    ({"head_dim": None, "hidden_size": 65}, "hidden_size 65 is no multiple of num_attention_heads 4"),
    ({"head_dim": 15}, "head_dim is 15"),
    ({"num_hidden_layers": 10**30}, "expected an integer of at least 1, below 2**31"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; expected a number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a number"),
    ({"eos_token_id": 384}, "eos_token_id is 384; expected a token id, or a list of them, from 0 to 383"),
    ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ({"eos_token_id": True}, "eos_token_id is True"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0; expected an integer of at least 1"),
    ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "expected a list of 2 (num_hidden_layers)"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, "layer_types is"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "no sliding window is given"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_mistakes(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        parse(**overrides)


REQUIRED_INTEGERS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", [*REQUIRED_INTEGERS, "rms_norm_eps", "model_type"])
def test_a_missing_key_is_named_with_its_file(key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"the/config.json: {key} is missing; expected"):
        parse_huggingface_config(without(tiny_config(), key), None, where="the/config.json")


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64]])
@pytest.mark.parametrize("key", [*REQUIRED_INTEGERS, "num_key_value_heads", "head_dim"])
def test_an_ill_typed_key_is_named_with_what_was_found(key: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(f"{key} is {value!r}; expected")):
        parse(**{key: value})


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (1, None, (1,)),
        ([1, 3], None, (1, 3)),
        (1, {"eos_token_id": 2}, (2,)),
        (1, {"eos_token_id": [2, 3]}, (2, 3)),
        (1, {"temperature": 0.6}, (1,)),
        (1, {"eos_token_id": None}, (1,)),
        (None, None, ()),
        ([], None, ()),
    ],
)
def test_eos(config: object, generation: dict[str, object] | None, expected: tuple[int, ...]) -> None:
    assert parse(generation, eos_token_id=config).eos_token_ids == expected


def test_an_eos_that_is_not_mentioned_is_that_of_the_architecture() -> None:
    assert parse_huggingface_config(without(tiny_config(), "eos_token_id"), None).eos_token_ids == (2,)
    assert parse_huggingface_config(without(tiny_config(model_type="qwen2"), "eos_token_id"), None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_sliding_windows(overrides: dict[str, object], expected: tuple[int | None, ...]) -> None:
    assert parse(**overrides).sliding_windows == expected
