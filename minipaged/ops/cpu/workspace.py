"""Workspace: the buffers of a forward pass on the CPU, in one span of memory that all recorded passes share."""

from __future__ import annotations

import math
import weakref

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.ops.free_spans import FreeSpans

ALIGNMENT = 64


class WorkspaceFullError(Exception):
    """The span is too small; `grow` and start over."""


class Span:
    """Owner of a piece of the workspace: it is free again when neither the span nor a view of it is referenced."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__
        self.companion: object = None
        """Whatever is to live exactly as long."""


class Workspace:
    """Hands out pieces: the same requests in the same order get the same places."""

    def __init__(self, num_bytes: int) -> None:
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._memory = raw[start : start + num_bytes]
        self.reset()

    def reset(self) -> None:
        """Everything is free; what was handed out before must not be used again."""
        self._free = FreeSpans(len(self._memory))

    def grow(self) -> None:
        """Twice the memory, everything free. Addresses handed out before are void."""
        self._allocate(2 * len(self._memory))

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """An array, its content undefined. Raises `WorkspaceFullError`."""
        dtype = np.dtype(dtype)
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        start = self._free.take(size)
        if start is None:
            raise WorkspaceFullError
        span = Span(self._memory[start : start + size])
        weakref.finalize(span, self._free.give_back, start, start + size)
        flat = np.asarray(span).view(dtype)
        return flat[:count].reshape(shape)
