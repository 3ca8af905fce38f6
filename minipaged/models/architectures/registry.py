"""The architectures that can be loaded.

Another one is a module of this folder and a line below. Where its models differ from these in a property, the property
becomes a field of `Architecture` or `ModelConfig`, which every architecture then states and the forward pass reads: an
activation, a norm behind a layer, a cap on logits. Where its forward pass is another, it brings a function that says
which tensors it reads, and one that loads them; nothing outside this folder asks for an architecture by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from minipaged.models.architecture import Architecture
from minipaged.models.architectures.llama import LLAMA
from minipaged.models.architectures.mistral import MISTRAL
from minipaged.models.architectures.qwen2 import QWEN2
from minipaged.models.architectures.qwen3 import QWEN3

ARCHITECTURES: Mapping[str, Architecture] = {each.name: each for each in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""By `model_type`."""

GGUF_ARCHITECTURES: Mapping[str, Architecture] = {
    each.gguf.architecture: each for each in ARCHITECTURES.values() if each.gguf is not None
}
"""By `general.architecture`."""
