"""Qwen3: Llama with normalised queries and keys."""

from __future__ import annotations

from minipaged.models.architecture import Architecture, GGUFNames, HuggingFaceKeys
from minipaged.models.llama import load_llama
from minipaged.models.llama_tensors import GGUF_LAYER_MODULES, GGUF_MODULES, expected_shapes

QWEN3 = Architecture(
    name="qwen3",
    has_qk_norm=True,
    huggingface=HuggingFaceKeys(has_optional_biases=True, sliding_window="later layers"),
    gguf=GGUFNames(
        architecture="qwen3", modules=GGUF_MODULES, layer_modules=GGUF_LAYER_MODULES, has_permuted_heads=False
    ),
    expected_shapes=expected_shapes,
    load=load_llama,
)
