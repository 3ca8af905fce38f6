"""Llama 1 to 3, SmolLM2 and what else was made in their image."""

from __future__ import annotations

from minipaged.models.architecture import Architecture, GGUFNames, HuggingFaceKeys
from minipaged.models.llama import load_llama
from minipaged.models.llama_tensors import GGUF_LAYER_MODULES, GGUF_MODULES, expected_shapes

LLAMA = Architecture(
    name="llama",
    huggingface=HuggingFaceKeys(has_optional_biases=True, has_optional_mlp_bias=True, default_eos_token_id=2),
    gguf=GGUFNames(
        architecture="llama", modules=GGUF_MODULES, layer_modules=GGUF_LAYER_MODULES, has_permuted_heads=True
    ),
    expected_shapes=expected_shapes,
    load=load_llama,
)
