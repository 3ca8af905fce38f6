"""From a path to a model that is ready to load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minipaged.errors import ModelLoadError
from minipaged.models.architecture import Architecture
from minipaged.models.architectures.registry import ARCHITECTURES
from minipaged.models.checkpoint import Checkpoint
from minipaged.models.config import ModelConfig
from minipaged.models.files.huggingface_config import parse_huggingface_config
from minipaged.models.files.json_file import read_json


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened model: its configuration has been read, its weights have not."""

    path: Path
    config: ModelConfig
    checkpoint: Checkpoint
    gguf_metadata: Mapping[str, object] | None
    """The tokenizer's source where the model is a GGUF file: plain strings, booleans, numbers, and lists of them."""
    folder: Path | None
    """The folder with tokenizer.json where the model is in Hugging Face layout."""

    @property
    def architecture(self) -> Architecture:
        """What kind of model it is."""
        return ARCHITECTURES[self.config.architecture]

    @property
    def num_parameters(self) -> int:
        """Elements in all tensors that the model reads; a tied head is the embedding table and counts once."""
        return sum(math.prod(shape) for shape in self.architecture.expected_shapes(self.config).values())

    @property
    def num_bytes(self) -> int:
        """Bytes in all tensors as they are stored; eight times this by `num_parameters` is the bits per weight."""
        return sum(tensor.num_bytes for tensor in self.checkpoint.tensors.values())


def open_model(path: Path) -> ModelSource:
    """Open a folder in Hugging Face layout, a .gguf file, or a folder that holds just one of those.

    Reads headers and configuration only. Raises `ModelLoadError`, which says what to do.
    """
    try:
        return _open(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error


def _open(path: Path) -> ModelSource:
    if path.is_file():
        return _open_gguf(path)
    if not path.is_dir():
        raise ModelLoadError(f"{path} does not exist; expected a folder in Hugging Face layout or a .gguf file.")
    if (path / "config.json").is_file():
        return _open_folder(path)
    files = sorted(file for file in path.glob("*.gguf") if "-of-" not in file.name or "-00001-of-" in file.name)
    if len(files) == 1:
        return _open_gguf(files[0])
    if files:
        raise ModelLoadError(f"{path} holds {len(files)} models, {', '.join(f.name for f in files)}; name one of them.")
    raise ModelLoadError(
        f"{path} holds neither config.json nor a .gguf file; expected a model in Hugging Face layout or in GGUF."
    )


def _open_folder(folder: Path) -> ModelSource:
    from minipaged.models.files.safetensors_checkpoint import open_safetensors

    generation = folder / "generation_config.json"
    config = parse_huggingface_config(
        read_json(folder / "config.json"),
        read_json(generation) if generation.is_file() else None,
        where=str(folder / "config.json"),
    )
    return ModelSource(folder, config, open_safetensors(folder), gguf_metadata=None, folder=folder)


def _open_gguf(path: Path) -> ModelSource:
    from minipaged.models.files.gguf_checkpoint import open_gguf

    if path.suffix in (".safetensors", ".json"):
        raise ModelLoadError(f"{path} is one file of a model in Hugging Face layout; give its folder, {path.parent}.")
    model = open_gguf(path)
    return ModelSource(path, model.config, model.checkpoint, gguf_metadata=model.metadata, folder=None)
