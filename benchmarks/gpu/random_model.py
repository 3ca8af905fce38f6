"""A model folder of which only the shapes are real: its weights are a hole in a file, which `RandomOps` never reads."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minipaged.models.config import DefaultRope, ModelConfig
from minipaged.models.llama_tensors import expected_shapes


def write_random_model(folder: Path, model: ModelConfig) -> Path:
    """In Hugging Face layout; takes next to no room on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(transformers_config(model)), encoding="utf-8")
    _write_weights(folder / "model.safetensors", model)
    _tokenizer(model.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def transformers_config(model: ModelConfig) -> dict[str, object]:
    """As transformers writes it."""
    assert model.architecture == "llama"
    assert isinstance(model.rope_scaling, DefaultRope)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_query_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": 0,
        "eos_token_id": model.eos_token_ids[0],
    }


def _write_weights(path: Path, model: ModelConfig) -> None:
    """A safetensors file: the length of its header, the header, and a hole (https://github.com/huggingface/safetensors)."""
    header, end = {}, 0
    for name, shape in expected_shapes(model).items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Every byte is a token; the others are words that no text is made of."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"word{index}" for index in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
