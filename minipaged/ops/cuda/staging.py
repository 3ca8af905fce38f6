"""Staging: page-locked buffers through which host data goes to the device, without waiting for it to arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minipaged.ops.cuda.errors import cuda_errors
from minipaged.ops.cuda.memory import CudaMemory

if TYPE_CHECKING:
    import cupy


class Staging:
    """A ring of buffers. Fill the next one, send it, fill the one after that while the copy runs."""

    def __init__(self, memory: CudaMemory, stream: cupy.cuda.Stream, *, num_bytes: int, num_buffers: int) -> None:
        import cupy

        self._stream = stream
        self._runtime = cupy.cuda.runtime
        self._buffers = [memory.allocate_pinned(num_bytes, "copies to the GPU") for _ in range(num_buffers)]
        self._copied = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(num_buffers)]
        self._next = 0
        self.num_bytes = num_bytes
        """Size of one buffer."""

    def buffer(self) -> NDArray[np.uint8]:
        """The next one, as soon as what it held has been copied."""
        with cuda_errors("copy to its memory"):
            self._copied[self._next].synchronize()
        return self._buffers[self._next]

    def send(self, destination: int, num_bytes: int) -> None:
        """Start copying the first bytes of that buffer to an address, after all that was launched before."""
        buffer, copied = self._buffers[self._next], self._copied[self._next]
        with cuda_errors("copy to its memory"):
            self._runtime.memcpyAsync(
                destination, buffer.ctypes.data, num_bytes, self._runtime.memcpyHostToDevice, self._stream.ptr
            )
            copied.record(self._stream)
        self._next = (self._next + 1) % len(self._buffers)

    def send_array(self, destination: int, array: NDArray[np.generic]) -> None:
        """Send any array, in as many pieces as it takes."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(data), self.num_bytes):
            piece = data[start : start + self.num_bytes]
            self.buffer()[: len(piece)] = piece
            self.send(destination + start, len(piece))
