"""The tiny models of `tests.tiny` as GGUF files, laid out as llama.cpp's converter does."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.tiny import BOS_ID, CHAT_TEMPLATE, EOS_ID, SPECIAL_TOKENS, integer, tiny_config, tiny_tensors, tiny_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(path: Path, *, seed: int = 0, quantization: str = "F32", **config_overrides: object) -> Path:
    """Write the model of `write_tiny_model(..., seed=seed, **config_overrides)` as a GGUF file and return its path.

    Vectors stay F32; matrices take the type `quantization`.
    """
    return write_model_gguf(path, tiny_config(**config_overrides), seed=seed, quantization=quantization)


def write_model_gguf(path: Path, config: Mapping[str, object], *, seed: int = 0, quantization: str = "F32") -> Path:
    """The same from a whole config.json."""
    architecture = {"mistral": "llama"}.get(str(config["model_type"]), str(config["model_type"]))
    writer = gguf.GGUFWriter(path, architecture)
    _add_hyperparameters(writer, config)
    _add_tokenizer(writer, vocab_size=integer(config, "vocab_size"))
    tensors = {gguf_name(name): tensor for name, tensor in tiny_tensors(config, seed=seed).items()}
    if architecture == "llama":
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        for name, tensor in tensors.items():
            key = heads.get(name.split(".")[-2])
            tensors[name] = tensor if key is None else _interleave_halves(tensor, integer(config, key))
    rope_factors = _llama3_factors(config)
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = rope_factors
    for name, tensor in tensors.items():
        matrix_type = gguf.GGMLQuantizationType[quantization if tensor.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if layer is not None:
        return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{layer[3]}"
    stem, kind = name.rsplit(".", 1)
    return f"{_NAMES[stem]}.{kind}"


def _interleave_halves(tensor: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows 0..d/2 and d/2..d of each head become its even and its odd rows: llama.cpp rotates neighbours."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def _add_hyperparameters(writer: gguf.GGUFWriter, config: Mapping[str, object]) -> None:
    writer.add_context_length(integer(config, "max_position_embeddings"))
    writer.add_embedding_length(integer(config, "hidden_size"))
    writer.add_block_count(integer(config, "num_hidden_layers"))
    writer.add_feed_forward_length(integer(config, "intermediate_size"))
    writer.add_head_count(integer(config, "num_attention_heads"))
    writer.add_head_count_kv(integer(config, "num_key_value_heads"))
    writer.add_key_length(integer(config, "head_dim"))
    writer.add_value_length(integer(config, "head_dim"))
    writer.add_rope_dimension_count(integer(config, "head_dim"))
    writer.add_vocab_size(integer(config, "vocab_size"))
    writer.add_layer_norm_rms_eps(_number(config, "rms_norm_eps"))
    writer.add_rope_freq_base(_number(config, "rope_theta"))
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _llama3_factors(config: Mapping[str, object]) -> NDArray[np.float32] | None:
    """Divisors of the rotation frequencies, which a conversion of a Llama 3.1 model stores as a tensor."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling["rope_type"] != "llama3":
        return None
    head_dim, original = integer(config, "head_dim"), scaling["original_max_position_embeddings"]
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * _number(config, "rope_theta") ** (index / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _add_tokenizer(writer: gguf.GGUFWriter, *, vocab_size: int) -> None:
    tokenizer = tiny_tokenizer(vocab_size=min(vocab_size, 384))
    vocabulary = {id: token for token, id in tokenizer.get_vocab().items()}
    tokens, types = [], []
    for id in range(vocab_size):
        tokens.append(vocabulary.get(id, f"[PAD{id}]"))
        special, known = id < len(SPECIAL_TOKENS), id in vocabulary
        kind = gguf.TokenType.CONTROL if special else gguf.TokenType.NORMAL if known else gguf.TokenType.UNUSED
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def _number(config: Mapping[str, object], key: str) -> float:
    value = config[key]
    assert isinstance(value, int | float)
    return value
