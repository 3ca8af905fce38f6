"""CudaMemory: what a backend allocates on the device, and page-locked on the host."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.ops.cuda.errors import HOST_MEMORY, cuda_errors, error_classes

if TYPE_CHECKING:
    import cupy


class CudaMemory:
    """Allocations that live until `close`, which frees them whatever array still refers to them.

    Those of an engine that nobody closed go with this object.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._device_id: int = cupy.cuda.runtime.getDevice()
        self._device: list[int] = []
        self._pinned: list[int] = []
        lost = (cupy.cuda.runtime, self._device, self._pinned, error_classes())
        weakref.finalize(self, _free_lost, *lost).atexit = False

    def available(self) -> tuple[int, int]:
        """Free and total bytes of the device; other programs use it too."""
        with cuda_errors("ask for the free memory"):
            free, total = self._cupy.cuda.Device(self._device_id).mem_info
        return free, total

    def allocate(self, shape: tuple[int, ...], dtype: DTypeLike, what: str) -> cupy.ndarray:
        """An array on the device, its content undefined. `what` it is for, errors say."""
        num_bytes = prod(shape) * np.dtype(dtype).itemsize
        with cuda_errors(f"allocate {num_bytes} bytes for {what}"):
            address = self._cupy.cuda.runtime.malloc(max(1, num_bytes))
        self._device.append(address)
        return self.array(address, shape, dtype, None)

    def array(self, address: int, shape: tuple[int, ...], dtype: DTypeLike, owner: object) -> cupy.ndarray:
        """An array over memory that is there; it keeps its owner alive."""
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(address, prod(shape) * np.dtype(dtype).itemsize, owner, self._device_id)
        return self._cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))

    def allocate_pinned(self, num_bytes: int, what: str) -> NDArray[np.uint8]:
        """Page-locked memory of the host, which copies run at full speed from and to, its content undefined."""
        with cuda_errors(f"lock {num_bytes} bytes of host memory for {what}", HOST_MEMORY):
            address = self._cupy.cuda.runtime.hostAlloc(max(1, num_bytes), 0)
        self._pinned.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def close(self) -> None:
        """Free everything; no work that uses it may be under way. Idempotent. Raises CUDA's errors as they are."""
        _free(self._cupy.cuda.runtime, self._device, self._pinned)
        self._cupy.get_default_memory_pool().free_all_blocks()


def _free(runtime: ModuleType, device: list[int], pinned: list[int]) -> None:
    """Device memory first: that waits for copies from and to the host's."""
    while device:
        runtime.free(device.pop())
    while pinned:
        runtime.freeHost(pinned.pop())


def _free_lost(runtime: ModuleType, device: list[int], pinned: list[int], errors: tuple[type[Exception], ...]) -> None:
    with suppress(*errors):
        _free(runtime, device, pinned)
