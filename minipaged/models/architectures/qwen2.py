"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from minipaged.models.architecture import Architecture, GGUFNames, HuggingFaceKeys
from minipaged.models.llama import load_llama
from minipaged.models.llama_tensors import GGUF_LAYER_MODULES, GGUF_MODULES, expected_shapes

QWEN2 = Architecture(
    name="qwen2",
    has_qkv_bias=True,
    huggingface=HuggingFaceKeys(sliding_window="later layers"),
    gguf=GGUFNames(
        architecture="qwen2", modules=GGUF_MODULES, layer_modules=GGUF_LAYER_MODULES, has_permuted_heads=False
    ),
    expected_shapes=expected_shapes,
    load=load_llama,
)
