"""Checkpoints in safetensors files: one, or several with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from minipaged.errors import ModelLoadError
from minipaged.models.checkpoint import Checkpoint, StoredTensor, map_file
from minipaged.models.files.json_file import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_safetensors(folder: Path) -> Checkpoint:
    """Open model.safetensors, or the shards that model.safetensors.index.json names; other files do not matter.

    Raises `ModelLoadError`: a file is missing, damaged or of an unknown element type, or the index is wrong.
    """
    if (folder / INDEX_FILE).is_file():
        return Checkpoint(folder, _open_shards(folder, _read_index(folder / INDEX_FILE)))
    if (folder / SINGLE_FILE).is_file():
        return Checkpoint(folder, {tensor.name: tensor for tensor in _open_file(folder / SINGLE_FILE)})
    found = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pth", ".pt"))
    raise ModelLoadError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; found {', '.join(found) or 'no weights at all'}. "
        "Download the model again; weights in other formats must be converted to safetensors first."
    )


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map is {weight_map!r:.80}; expected an object of tensor and file names.")
    for name, file in weight_map.items():
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{path}: {name} is in {file!r}; expected the name of a file beside the index.")
    return weight_map


def _open_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {', '.join(missing)}, of the {len(files)} files that {INDEX_FILE} names; "
            "download the model again."
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _open_file(folder / file):
            if weight_map.get(tensor.name) != file:
                raise ModelLoadError(
                    f"{folder / file} holds {tensor.name}, which {INDEX_FILE} puts in "
                    f"{weight_map.get(tensor.name, 'no file')}; the files are not of one model. Download it again."
                )
            tensors[tensor.name] = tensor
    for name in weight_map.keys() - tensors.keys():
        raise ModelLoadError(
            f"{folder / weight_map[name]} lacks {name}, which {INDEX_FILE} puts there; the files are not of one model. "
            "Download it again."
        )
    return tensors


def _open_file(path: Path) -> Iterator[StoredTensor]:
    data = map_file(path)
    try:
        # The library checks the header: its length, the offsets without holes or overlaps, the file's size.
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is no safetensors file, or damaged ({error}); download it again.") from error
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in _DECODERS:
            raise ModelLoadError(
                f"{path}: {name} has elements of type {entry['dtype']}; expected one of {', '.join(_DECODERS)}. "
                "Take the model's files in such a type, or a GGUF file of it."
            )
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not shape or not math.prod(shape):
            raise ModelLoadError(f"{path}: {name} has the shape {list(shape)}; expected a vector or matrix.")
        yield StoredTensor(
            name=name,
            stored_name=name,
            shape=shape,
            encoding=entry["dtype"],
            data=data[start + begin : start + end],
            decode=_DECODERS[entry["dtype"]],
        )


def _decode_f32(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    decoded: NDArray[np.float32] = rows.view(np.float32)
    return decoded


def _decode_f16(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    return rows.view(np.float16).astype(np.float32)


def _decode_bf16(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    decoded: NDArray[np.float32] = rows.view(ml_dtypes.bfloat16).astype(np.float32)
    return decoded


_DECODERS: Mapping[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
}
