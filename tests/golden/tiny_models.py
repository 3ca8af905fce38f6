"""The tiny models whose logits `make_golden.py` stores and tests/models/test_llama.py compares with.

Weights and prompts are regenerated from seeds, so that only configurations and logits are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.tiny import tiny_config, tiny_tensors, write_safetensors

VOCAB_SIZE = 80
PROMPT_LENGTH = 72
ORIGINAL_CONTEXT = 24
"""Of the scaled rotary embeddings: a third of the prompt."""

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_CONTEXT,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT}

CASES: dict[str, dict[str, object]] = {
    "llama_mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "llama_gqa3": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "llama_gqa4": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-2},
    "llama_gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 12},
    "llama_attention_bias": {"attention_bias": True},
    "llama_mlp_bias": {"mlp_bias": True, "hidden_size": 48},
    "llama_all_biases_tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama_theta": {"rope_theta": 500000.0},
    "rope_default_new_keys": {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "rope_linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope_llama3": {"rope_scaling": {"rope_type": "llama3"} | LLAMA3, "rope_theta": 500.0},
    "rope_llama3_new_keys": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0} | LLAMA3},
    "rope_yarn": {"rope_scaling": {"rope_type": "yarn"} | YARN, "head_dim": 32},
    "rope_yarn_new_keys": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0} | YARN, "head_dim": 32},
    "rope_yarn_attention_factor": {"rope_scaling": {"rope_type": "yarn", "attention_factor": 0.8} | YARN},
    "rope_yarn_mscale": {"rope_scaling": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7} | YARN},
    "rope_yarn_betas": {
        "rope_scaling": {"rope_type": "yarn", "beta_fast": 3.0, "beta_slow": 0.25} | YARN,
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "rope_yarn_not_truncated": {
        "rope_scaling": {"rope_type": "yarn", "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False} | YARN,
        "head_dim": 32,
    },
    "mistral_window": {"model_type": "mistral", "sliding_window": 20},
    "mistral_full": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3_gqa4_tied": {
        "model_type": "qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3_bias_yarn": {
        "model_type": "qwen3",
        "attention_bias": True,
        "rope_scaling": {"rope_type": "yarn"} | YARN,
    },
}
"""Name of each model to the keys of its config.json that differ from `tiny_config`'s."""


def write_model(folder: Path, name: str) -> None:
    """Write config.json and model.safetensors of one case."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(name)))
    write_safetensors(folder, _tensors(name))


def prompt(name: str) -> NDArray[np.int32]:
    """Token ids [PROMPT_LENGTH]."""
    return _generator(name).integers(VOCAB_SIZE, size=PROMPT_LENGTH, dtype=np.int32)


def digest(name: str) -> str:
    """Of the weights and the prompt; tells a changed generator from a wrong forward pass."""
    sha256 = hashlib.sha256(prompt(name).tobytes())
    for key, tensor in sorted(_tensors(name).items()):
        sha256.update(key.encode() + np.ascontiguousarray(tensor).tobytes())
    return sha256.hexdigest()


def _config(name: str) -> Mapping[str, object]:
    config = tiny_config(**{"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4 * ORIGINAL_CONTEXT} | CASES[name])
    if "rope_parameters" in config:
        del config["rope_theta"]
    return config


def _tensors(name: str) -> Mapping[str, NDArray[np.float32]]:
    return tiny_tensors(_config(name), seed=list(CASES).index(name))


def _generator(name: str) -> np.random.Generator:
    return np.random.default_rng([1, list(CASES).index(name)])
