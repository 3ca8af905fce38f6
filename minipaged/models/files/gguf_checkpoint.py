"""Checkpoints in GGUF files: one, or the parts of a split one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minipaged.errors import ModelLoadError
from minipaged.models.architecture import GGUFNames
from minipaged.models.architectures.registry import ARCHITECTURES
from minipaged.models.checkpoint import Checkpoint, StoredTensor
from minipaged.models.config import ModelConfig
from minipaged.models.files.gguf_config import ROPE_FACTORS, parse_gguf_config
from minipaged.models.files.gguf_file import read_gguf

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """What a GGUF file, or a split one, holds."""

    config: ModelConfig
    checkpoint: Checkpoint
    metadata: Mapping[str, object]


def open_gguf(path: Path) -> GGUFModel:
    """Open a GGUF file; of a split one, `path` is the first part and the others lie beside it.

    Raises `ModelLoadError`: see `read_gguf` and `parse_gguf_config`; or a part is missing.
    """
    files = [read_gguf(part) for part in _parts(path)]
    metadata = files[0].metadata
    if len(files) == 1 and metadata.get("split.count") not in (None, 0, 1):
        raise ModelLoadError(
            f"{path} is one part of {metadata['split.count']}, but its name does not end in "
            "-00001-of-NNNNN.gguf, by which the others are found. Give all parts their original names."
        )
    tensors: dict[str, StoredTensor] = {}
    for tensor in (tensor for file in files for tensor in file.tensors):
        if tensor.name in tensors:
            raise ModelLoadError(f"{path} holds the tensor {tensor.name} twice; take another conversion of the model.")
        tensors[tensor.name] = tensor
    factors = tensors.pop(ROPE_FACTORS, None)
    rope_factors = None if factors is None else tuple(factors.decode(factors.data.reshape(1, -1))[0].tolist())
    config = parse_gguf_config(metadata, tensors.keys(), rope_factors, where=str(path))
    renamed = [_as_in_hugging_face(tensor, config) for tensor in tensors.values()]
    return GGUFModel(config, Checkpoint(path, {tensor.name: tensor for tensor in renamed}), metadata)


def _parts(path: Path) -> list[Path]:
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if path != parts[0]:
        raise ModelLoadError(f"{path} is a part of a split model; give its first part, {parts[0].name}.")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelLoadError(
            f"{path.parent} lacks {', '.join(missing)} of the {count} parts; download the model again."
        )
    return parts


def _as_in_hugging_face(tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
    """Under the name it has there; q and k with the number of their heads, if these are permuted."""
    names = ARCHITECTURES[config.architecture].gguf
    assert names is not None
    heads = {}
    if names.has_permuted_heads:
        heads = {"self_attn.q_proj": config.num_query_heads, "self_attn.k_proj": config.num_kv_heads}
    name = _hugging_face_name(tensor.name, names)
    module = re.sub(r"model\.layers\.\d+\.|\.(weight|bias)$", "", name)
    return dataclasses.replace(tensor, name=name, num_permuted_heads=heads.get(module))


def _hugging_face_name(name: str, names: GGUFNames) -> str:
    """The tensor's name in a Hugging Face checkpoint, or the same name if it is none of these models'."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is not None and layer[2] in names.layer_modules:
        return f"model.layers.{layer[1]}.{names.layer_modules[layer[2]]}.{layer[3]}"
    module, _, kind = name.rpartition(".")
    return f"{names.modules[module]}.{kind}" if module in names.modules else name
