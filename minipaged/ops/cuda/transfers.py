"""BlockTransfers: KV blocks on their way between device and host pool, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from minipaged.ops.cuda.errors import cuda_errors

if TYPE_CHECKING:
    import cupy


class EventCopy:
    """A copy that is finished when an event is reached."""

    def __init__(self, event: cupy.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether it has finished. Never blocks."""
        with cuda_errors("copy KV blocks"):
            return bool(self._event.done)

    def wait(self) -> None:
        """Block until it has finished."""
        with cuda_errors("copy KV blocks"):
            self._event.synchronize()


class BlockTransfers:
    """Copies in both directions, in the order in which they were asked for, beside what `compute` does."""

    def __init__(self, compute: cupy.cuda.Stream) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._compute = compute
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def to_host(self, cache: cupy.ndarray, host: NDArray[np.uint8], pairs: Sequence[tuple[int, int]]) -> EventCopy:
        """(device, host) pairs. The device blocks must not be written to by what is launched until it is finished."""
        size, device_address, host_address = host.shape[1], cache.data.ptr, host.ctypes.data
        with cuda_errors("copy KV blocks to the host"):
            self._wait_for_compute()
            for source, target, count in runs(pairs):
                self._copy(host_address + target * size, device_address + source * size, count * size, to_host=True)
            return EventCopy(self._record(self._stream))

    def from_host(self, host: NDArray[np.uint8], cache: cupy.ndarray, pairs: Sequence[tuple[int, int]]) -> EventCopy:
        """(host, device) pairs. What is launched later on `compute` runs after it."""
        size, device_address, host_address = host.shape[1], cache.data.ptr, host.ctypes.data
        with cuda_errors("copy KV blocks from the host"):
            self._wait_for_compute()  # the device blocks may have been another sequence's a moment ago
            for source, target, count in runs(pairs):
                self._copy(device_address + target * size, host_address + source * size, count * size, to_host=False)
            event = self._record(self._stream)
            self._compute.wait_event(event)
        return EventCopy(event)

    def _copy(self, destination: int, source: int, num_bytes: int, *, to_host: bool) -> None:
        runtime = self._cuda.runtime
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        runtime.memcpyAsync(destination, source, num_bytes, kind, self._stream.ptr)

    def _wait_for_compute(self) -> None:
        self._stream.wait_event(self._record(self._compute))

    def _record(self, stream: cupy.cuda.Stream) -> cupy.cuda.Event:
        event = self._cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        return event

    def close(self) -> None:
        """Wait for what is under way."""
        self._stream.synchronize()


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Pairs that follow each other on both sides, as one: (first, second, how many)."""
    start = 0
    for index in range(1, len(pairs) + 1):
        if index == len(pairs) or pairs[index] != (pairs[index - 1][0] + 1, pairs[index - 1][1] + 1):
            yield *pairs[start], index - start
            start = index
