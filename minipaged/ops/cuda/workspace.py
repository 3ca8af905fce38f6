"""Workspace: arrays that come and go, in one span of device memory that never moves."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from minipaged.ops.cuda.memory import CudaMemory
from minipaged.ops.free_spans import FreeSpans

if TYPE_CHECKING:
    import cupy

ALIGNMENT = 256
"""Bytes; what CUDA's own allocations have at least."""
NO_MEMORY = ALIGNMENT
"""An address for arrays that nothing may use but their shapes."""
ENDLESS = 2**62


class WorkspaceFullError(Exception):
    """There is no room for an array."""


class Span:
    """Owner of a piece: it is free again when no array over it is referenced."""


class Workspace:
    """Hands out pieces: the same requests in the same order get the same addresses.

    A piece that is free again may still be read by work that was launched before; as all work that uses the workspace
    is on one stream, what is written there next is written afterwards.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._address = NO_MEMORY
        self._size = 0
        self._highest = 0
        self.reset()

    def count(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes at most at a time. Its arrays have no memory: it must launch nothing."""
        self._address, self._size, self._highest = NO_MEMORY, ENDLESS, 0
        self.reset()
        try:
            run()
            return self._highest
        finally:
            self._size = 0
            self.reset()

    def allocate(self, num_bytes: int, what: str) -> None:
        """The memory, `what` it is for. Raises `DeviceError`."""
        array = self._memory.allocate((num_bytes,), np.uint8, what)
        self._address, self._size = array.data.ptr, num_bytes
        self.reset()

    def reset(self) -> None:
        """Everything is free; arrays handed out before must not be used again."""
        self._returned: deque[tuple[int, int]] = deque()
        self._free = FreeSpans(self._size)

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        """An array, its content undefined. Raises `WorkspaceFullError`."""
        self._collect()
        size = _aligned_size(shape, dtype)
        start = self._free.take(size)
        if start is None:
            raise WorkspaceFullError
        self._highest = max(self._highest, start + size)
        return self._array(start, size, shape, dtype)

    def take_again(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        """The array that was handed out at this address; its place must be free."""
        self._collect()
        size, start = _aligned_size(shape, dtype), address - self._address
        self._free.take_at(start, size)
        return self._array(start, size, shape, dtype)

    def _array(self, start: int, size: int, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        span = Span()
        # Only noted: garbage is collected on any thread.
        weakref.finalize(span, self._returned.append, (start, start + size)).atexit = False
        return self._memory.array(self._address + start, shape, dtype, span)

    def _collect(self) -> None:
        """Pieces that were given back are free."""
        while self._returned:
            self._free.give_back(*self._returned.popleft())


def _aligned_size(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return -(-prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
