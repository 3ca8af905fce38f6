"""Checkpoint: the tensors of a model under their Hugging Face names, still in their memory-mapped files."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from minipaged.errors import ModelLoadError
from minipaged.ops.tensor import HostTensor

_GIT_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file's header says of a tensor, and where its bytes are."""

    name: str
    """The name that it has in Hugging Face checkpoints."""
    stored_name: str
    """The name that it has in its file."""
    shape: tuple[int, ...]
    """Sizes in elements, outermost first."""
    encoding: str
    """As in `HostTensor`."""
    data: NDArray[np.uint8]
    """[num_bytes], a view of the mapped file."""
    decode: Callable[[NDArray[np.uint8]], NDArray[np.float32]]
    """As in `HostTensor`."""
    num_permuted_heads: int | None = None
    """GGUF files of Llama-like models keep q and k with the rows of each of so many heads interleaved."""

    @property
    def num_bytes(self) -> int:
        """How many bytes it has in the file."""
        return self.data.nbytes


class Checkpoint:
    """The tensors of one or more files. As a context manager it closes itself.

    Attributes:
        path: what error messages call it: a folder or a file.
        tensors: by Hugging Face name; nothing has been read but the headers.
    """

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self.tensors = dict(tensors)

    def tensor(self, name: str) -> HostTensor:
        """A tensor's raw rows, a view of the file where it lies there in order. Raises KeyError."""
        stored = self.tensors[name]
        rows = stored.data.reshape(stored.shape[0] if len(stored.shape) > 1 else 1, -1)
        if stored.num_permuted_heads is not None:
            rows = _uninterleave(stored.data.reshape(stored.shape[0], -1), stored.num_permuted_heads)
            rows = rows.reshape(1, -1) if len(stored.shape) == 1 else rows
        return HostTensor(name, stored.shape, stored.encoding, rows, stored.decode)

    def release(self, name: str) -> None:
        """Let the pages of a tensor leave memory: it has been copied. They come back from the file if read again."""
        data = self.tensors[name].data
        whole = data
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        mapped = getattr(whole.base, "obj", whole.base)  # NumPy holds a buffer by a memoryview
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            start = data.ctypes.data - whole.ctypes.data
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: others share the last ones
            end = (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if first < end:
                mapped.madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        """Let go of the files. Tensors taken out before stay valid, and keep their file mapped while they live."""
        self.tensors = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, read-only and mapped. Raises `ModelLoadError`."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_GIT_LFS_POINTER))
            if not start:
                raise ModelLoadError(f"{path} is empty; download it again.")
            if start == _GIT_LFS_POINTER:
                raise ModelLoadError(
                    f"{path} is a Git LFS pointer and not the file itself; run `git lfs pull` in its repository."
                )
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error


def _uninterleave(rows: NDArray[np.uint8], num_heads: int) -> NDArray[np.uint8]:
    """Even rows of each head first, then the odd ones: llama.cpp rotates neighbours, Hugging Face halves."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
