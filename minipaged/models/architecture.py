"""Architecture: all that sets one kind of model apart from the others, as data and as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from minipaged.models.checkpoint import Checkpoint
from minipaged.models.config import ModelConfig
from minipaged.ops.base import Array, Batch, KVPool, Ops, Weight
from minipaged.progress import Progress


class Model(Protocol[Array]):
    """A forward pass, as the runner sees it. T tokens are computed; the logits of N of them are wanted."""

    def forward(self, batch: Batch[Array], cache: KVPool[Array]) -> Array:
        """Write the KV of the batch's T tokens; returns what `logits` needs of them, [T, hidden]."""

    def logits(self, hidden: Array, batch: Batch[Array]) -> Array:
        """Float32 logits [N, vocab_size] of the N tokens `batch.sampled`, at least one."""


class LoadModel(Protocol):
    """Puts a model onto a device."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        ops: Ops[Array, Weight],
        max_model_len: int,
        progress: Progress,
    ) -> Model[Array]:
        """Load a model for sequences of up to `max_model_len` tokens.

        Raises `ModelLoadError` if the checkpoint does not fit.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceKeys:
    """How config.json is read, where architectures differ in that."""

    has_optional_biases: bool = False
    """`attention_bias` may add biases to q, k, v and the attention's output."""
    has_optional_mlp_bias: bool = False
    """`mlp_bias` may add biases to the MLP."""
    sliding_window: Literal["none", "all layers", "later layers"] = "none"
    """Which layers `sliding_window` is for: all of them, or those from `max_window_layers` on, if it is switched on."""
    default_eos_token_id: int | None = None
    """The id that ends a sequence where `eos_token_id` is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFNames:
    """How the architecture appears in GGUF files."""

    architecture: str
    """`general.architecture`."""
    modules: Mapping[str, str]
    """Names of modules outside layers there, and in a Hugging Face checkpoint."""
    layer_modules: Mapping[str, str]
    """Names of modules within a layer there, and in a Hugging Face checkpoint."""
    has_permuted_heads: bool
    """Whether the rows of q and k stand in the order for rotating neighbours, which loading undoes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One kind of model; see `registry` for how another is added."""

    name: str
    """`model_type` in config.json, and `ModelConfig.architecture`."""
    has_qkv_bias: bool = False
    """Queries, keys and values always have biases."""
    has_qk_norm: bool = False
    """Each head of queries and keys is normalised before it is rotated."""
    huggingface: HuggingFaceKeys
    gguf: GGUFNames | None
    """None: GGUF files of these models call themselves by another architecture's name."""
    expected_shapes: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]
    """Every tensor that the model reads, by its name in a Hugging Face checkpoint, with its shape."""
    load: LoadModel
