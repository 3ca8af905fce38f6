"""Mistral: Llama with a sliding window. Its GGUF files call themselves "llama"."""

from __future__ import annotations

from minipaged.models.architecture import Architecture, HuggingFaceKeys
from minipaged.models.llama import load_llama
from minipaged.models.llama_tensors import expected_shapes

MISTRAL = Architecture(
    name="mistral",
    huggingface=HuggingFaceKeys(sliding_window="all layers", default_eos_token_id=2),
    gguf=None,
    expected_shapes=expected_shapes,
    load=load_llama,
)
