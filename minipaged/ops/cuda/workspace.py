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
from minipaged.ops.workspace import Places

if TYPE_CHECKING:
    import cupy

ALIGNMENT = 256
"""Bytes; what CUDA's own allocations have at least."""
NO_MEMORY = ALIGNMENT
"""An address for arrays that nothing may use but their shapes."""
ENDLESS = 2**62


class _Owner:
    """Every array over a place keeps its owner alive; when that is gone, the place is free again."""


class Workspace:
    """Hands out arrays: the same requests in the same order get the same addresses.

    A place that is free again may still be read by work that was launched before; as all work that uses the workspace
    is on one stream, what is written there next is written afterwards.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._address = NO_MEMORY
        self._size = 0
        self.reset()

    def count(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes at most at a time. Its arrays have no memory: it must launch nothing."""
        self._address, self._size = NO_MEMORY, ENDLESS
        self.reset()
        try:
            run()
            return self._places.highest
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
        self._places = Places(self._size, ALIGNMENT)

    def take(self, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        """An array, its content undefined. Raises `WorkspaceFullError`."""
        self._collect()
        num_bytes = _num_bytes(shape, dtype)
        return self._array(self._places.take(num_bytes), num_bytes, shape, dtype)

    def take_again(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        """The array that was handed out at this address; its place must be free."""
        self._collect()
        start, num_bytes = address - self._address, _num_bytes(shape, dtype)
        self._places.take_at(start, num_bytes)
        return self._array(start, num_bytes, shape, dtype)

    def _array(self, start: int, num_bytes: int, shape: tuple[int, ...], dtype: DTypeLike) -> cupy.ndarray:
        owner = _Owner()
        # Only noted: garbage is collected on any thread.
        weakref.finalize(owner, self._returned.append, (start, num_bytes)).atexit = False
        return self._memory.array(self._address + start, shape, dtype, owner)

    def _collect(self) -> None:
        """Make free the places whose owners are gone."""
        while self._returned:
            self._places.give_back(*self._returned.popleft())


def _num_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return prod(shape) * np.dtype(dtype).itemsize
