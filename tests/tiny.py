"""Tiny random models of the Llama family, as a Hugging Face folder or as a GGUF file, for everyone's tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Tensors = dict[str, NDArray[np.float32]]

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
"""Ids 0 to 3."""
BOS_ID = 0
EOS_ID = 1

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{% if message['role'] == 'assistant' %}<|eos|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_TOKENIZER_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on while the rain falls in the garden.",
    "A model that predicts the next token is asked again and again; what it said before is what it reads now.",
    "There are three things to know about the sky: it is blue, it is high above us, and it is never the same.",
    "Why is the sea salty? Because rivers carry minerals from the rocks of the land into the water of the oceans.",
    'She counted 1, 2, 3, 10, 100 and 1000 before they could begin; his answer was short: "No, not yet."\n\n',
    "def add(left, right):\n    return left + right\n\nfor number in range(10):\n    print(add(number, 1))\n",
]


def write_tiny_model(
    path: Path, *, seed: int = 0, dtype: str = "float32", shards: int = 1, **config_overrides: object
) -> Path:
    """Write a Hugging Face folder at `path` and return it. `config_overrides` are keys of its config.json."""
    return write_model_folder(path, tiny_config(**config_overrides), seed=seed, dtype=dtype, shards=shards)


def write_model_folder(
    path: Path, config: Mapping[str, object], *, seed: int = 0, dtype: str = "float32", shards: int = 1
) -> Path:
    """The same from a whole config.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    write_safetensors(path, tiny_tensors(config, seed=seed), dtype=dtype, shards=shards)
    tiny_tokenizer(vocab_size=min(integer(config, "vocab_size"), 384)).save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return path


def tiny_config(**overrides: object) -> dict[str, object]:
    """The config.json of a tiny model."""
    model_type = str(overrides.get("model_type", "llama"))
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES.get(model_type, "UnknownForCausalLM")],
        "model_type": model_type,
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    return config | overrides


def tiny_tensors(config: Mapping[str, object], *, seed: int = 0) -> Tensors:
    """Random weights under their Hugging Face names, scaled so that greedy outputs vary."""
    generator = np.random.default_rng(seed)
    hidden, intermediate = integer(config, "hidden_size"), integer(config, "intermediate_size")
    head_dim = integer(config, "head_dim")
    q_size = integer(config, "num_attention_heads") * head_dim
    kv_size = integer(config, "num_key_value_heads") * head_dim
    model_type = config["model_type"]
    attention_bias = config.get("attention_bias") is True
    tensors: Tensors = {}

    def matrix(name: str, rows: int, columns: int, *, scale: float = 1.0, bias: bool = False) -> None:
        weight = generator.standard_normal((rows, columns), dtype=np.float32)
        tensors[f"{name}.weight"] = weight * np.float32(scale / np.sqrt(columns))
        if bias:
            tensors[f"{name}.bias"] = generator.standard_normal(rows, dtype=np.float32) * np.float32(0.3)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = generator.uniform(0.5, 1.5, size).astype(np.float32)

    matrix("model.embed_tokens", integer(config, "vocab_size"), hidden, scale=float(np.sqrt(hidden)) / 4)
    for layer in range(integer(config, "num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        qkv_bias = attention_bias or model_type == "qwen2"
        output_bias = attention_bias and model_type != "qwen2"
        mlp_bias = config.get("mlp_bias") is True
        matrix(f"{prefix}.self_attn.q_proj", q_size, hidden, scale=1.5, bias=qkv_bias)
        matrix(f"{prefix}.self_attn.k_proj", kv_size, hidden, scale=1.5, bias=qkv_bias)
        matrix(f"{prefix}.self_attn.v_proj", kv_size, hidden, bias=qkv_bias)
        matrix(f"{prefix}.self_attn.o_proj", hidden, q_size, scale=2.0, bias=output_bias)
        if model_type == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        matrix(f"{prefix}.mlp.gate_proj", intermediate, hidden, scale=2.0, bias=mlp_bias)
        matrix(f"{prefix}.mlp.up_proj", intermediate, hidden, bias=mlp_bias)
        matrix(f"{prefix}.mlp.down_proj", hidden, intermediate, scale=2.0, bias=mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", integer(config, "vocab_size"), hidden, scale=2.0)
    return tensors


def write_safetensors(
    folder: Path, tensors: Mapping[str, NDArray[np.float32]], *, dtype: str = "float32", shards: int = 1
) -> None:
    """Write model.safetensors, or so many shards and their index."""
    stored = {name: np.ascontiguousarray(tensor).astype(_NUMPY_DTYPES[dtype]) for name, tensor in tensors.items()}
    if shards == 1:
        safetensors.numpy.save_file(stored, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(stored)[shard::shards]
        safetensors.numpy.save_file({name: stored[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(array.nbytes for array in stored.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tiny_tokenizer(*, vocab_size: int = 384) -> Tokenizer:
    """A byte-level BPE tokenizer: four special tokens, the 256 bytes, then merges of English. BOS is prepended."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TOKENIZER_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS_ID)]
    )
    return tokenizer


def integer(config: Mapping[str, object], key: str) -> int:
    """A key of config.json that holds an integer."""
    value = config[key]
    assert isinstance(value, int)
    return value
