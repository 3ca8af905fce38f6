"""Reading the header of a GGUF file: its metadata, and where its tensors are.

The layout is that of the GGUF specification in the ggml repository (docs/gguf.md). The `gguf` package supplies what
the numbers mean, and the decoders. Its own reader is not used: it makes several arrays for every token and merge, which
takes two seconds for a vocabulary of 49,000, where this takes 0.1.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from minipaged.errors import ModelLoadError
from minipaged.models.checkpoint import StoredTensor, map_file

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
"""struct's letters."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The content of one file."""

    metadata: dict[str, object]
    """Strings, booleans, numbers, and lists of them."""
    tensors: list[StoredTensor]
    """Under their own names, shapes outermost first (the file has them innermost first)."""


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file of version 2 or 3; the tensors' data stay mapped.

    Raises `ModelLoadError`: it is no GGUF file, damaged or cut short, or holds a tensor that cannot be decoded.
    """
    data = map_file(path)
    try:
        return _read(_Cursor(data))
    except _Malformed as problem:
        raise ModelLoadError(f"{path} {problem}") from problem
    except (struct.error, IndexError, ValueError, OverflowError, RecursionError) as error:
        raise ModelLoadError(f"{path} is cut short or damaged ({error}); download it again.") from error


class _Malformed(Exception):
    """Says what is wrong with the file, in words that follow its name."""


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self.offset = 0
        self._buffer = data.data

    def scalars(self, letter: str, count: int) -> list[bool | int | float]:
        self._check_left(count)
        layout = struct.Struct(f"<{count}{letter}")  # struct.unpack_from would keep it, and a megabyte around it
        values = layout.unpack_from(self._buffer, self.offset)
        self.offset += layout.size
        return list(values)

    def integer(self, letter: str) -> int:
        return int(self.scalars(letter, 1)[0])

    def string(self) -> str:
        length = self.integer("Q")
        self._check_left(length)
        start = self.offset
        self.offset += length
        return str(self._buffer[start : self.offset], "utf-8")

    def value(self, kind: GGUFValueType) -> object:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is not GGUFValueType.ARRAY:
            return self.scalars(_SCALARS[kind], 1)[0]
        element, count = GGUFValueType(self.integer("I")), self.integer("Q")
        if element in _SCALARS:
            return self.scalars(_SCALARS[element], count)
        self._check_left(count)
        return [self.value(element) for _ in range(count)]

    def _check_left(self, count: int) -> None:
        """Every element takes a byte or more, so that a damaged length is found before anything is allocated."""
        if count > len(self._buffer) - self.offset:
            raise ValueError(f"a length of {count} at byte {self.offset}, past the end at byte {len(self._buffer)}")


def _read(cursor: _Cursor) -> GGUFFile:
    _check_magic(cursor)
    num_tensors, num_fields = cursor.integer("Q"), cursor.integer("Q")
    metadata: dict[str, object] = {}
    for _ in range(num_fields):
        key = cursor.string()
        if key in metadata:
            raise _Malformed(f"holds the metadata key {key} twice; take another conversion of the model.")
        metadata[key] = cursor.value(GGUFValueType(cursor.integer("I")))
    headers = [_read_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _Malformed(f"has the general.alignment {alignment!r}; expected a positive integer.")
    data = cursor.data[math.ceil(cursor.offset / alignment) * alignment :]
    return GGUFFile(metadata, [_place(header, data) for header in headers])


def _check_magic(cursor: _Cursor) -> None:
    magic = cursor.integer("I")
    if magic != gguf.GGUF_MAGIC:
        raise _Malformed("is no GGUF file: it does not begin with the letters GGUF. Convert the model to GGUF first.")
    version = cursor.integer("I")
    if version in (2, 3):
        return
    if version & 0xFFFF == 0:
        raise _Malformed("is a big-endian GGUF file; expected a little-endian one. Take another conversion.")
    raise _Malformed(f"is a GGUF file of version {version}; expected 2 or 3. Take another conversion of the model.")


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


def _read_tensor_header(cursor: _Cursor) -> _TensorHeader:
    name = cursor.string()
    sizes = [int(size) for size in cursor.scalars("Q", cursor.integer("I"))]
    number = cursor.integer("I")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise _Malformed(f"holds {name} in a quantisation numbered {number}, which is unknown here.") from None
    if kind.name not in ("F32", "F16") and not hasattr(gguf.quants, kind.name):
        raise _Malformed(f"holds {name} as {kind.name}, which cannot be decoded; take another quantisation.")
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if not sizes or not math.prod(sizes) or sizes[0] % block:
        raise _Malformed(
            f"holds {name} as {kind.name} in rows of {sizes[0] if sizes else 0} elements; expected a multiple of "
            f"{block}. Download it again."
        )
    return _TensorHeader(name, tuple(reversed(sizes)), kind, cursor.integer("Q"))


def _place(header: _TensorHeader, data: NDArray[np.uint8]) -> StoredTensor:
    block, block_bytes = gguf.GGML_QUANT_SIZES[header.kind]
    num_bytes = math.prod(header.shape) // block * block_bytes
    if header.offset + num_bytes > len(data):
        raise _Malformed(
            f"is cut short: {header.name} ends {header.offset + num_bytes - len(data)} bytes after the end of the "
            "file. Download it again."
        )
    return StoredTensor(
        name=header.name,
        stored_name=header.name,
        shape=header.shape,
        encoding=header.kind.name,
        data=data[header.offset : header.offset + num_bytes],
        decode=partial(_decode, header.kind),
    )


def _decode(kind: GGMLQuantizationType, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    decoded: NDArray[np.float32] = gguf.quants.dequantize(rows, kind)
    return decoded
