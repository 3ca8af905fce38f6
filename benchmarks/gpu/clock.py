"""How long kernels run, and how fast this card copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.gpu.measured_sizes import Effort

if TYPE_CHECKING:
    import cupy


class Clock:
    """Times work on a stream by events around a CUDA graph of many calls, so that launching them costs nothing."""

    def __init__(self, stream: cupy.cuda.Stream, effort: Effort) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._stream = stream
        self._effort = effort

    def seconds(self, launch: Callable[[int], object], buffers: int = 1) -> float:
        """Of one call, the median of several repeats.

        `launch(index)` puts the work of one call on the stream. It may use the index to take another of so many
        `buffers`, where one would stay in the card's cache.
        """
        calls = range(max(3, buffers))
        estimate = 0.0
        for _ in range(2):  # kernels are loaded the first time that they are launched
            estimate = self._elapsed(lambda: [launch(index) for index in calls]) / len(calls)
        effort = self._effort
        wanted = effort.seconds / effort.repeats / max(estimate, 1e-7)
        count = max(buffers, min(effort.most_calls, max(1, round(wanted))))

        self._stream.begin_capture()
        try:
            for index in range(count):
                launch(index)
        finally:
            graph = self._stream.end_capture()
        times = [self._elapsed(lambda: graph.launch(self._stream)) for _ in range(effort.repeats + 1)]
        return statistics.median(times[1:]) / count

    def _elapsed(self, work: Callable[[], object]) -> float:
        start, end = self._cuda.Event(), self._cuda.Event()
        start.record(self._stream)
        work()
        end.record(self._stream)
        end.synchronize()
        milliseconds: float = self._cuda.get_elapsed_time(start, end)
        return milliseconds / 1e3


def buffers_beyond_cache(num_bytes: int) -> int:
    """How many buffers of that size are more than the card's cache holds, several times over; 512 at most."""
    import cupy

    cache: int = cupy.cuda.Device().attributes["L2CacheSize"]
    return max(1, min(512, -(-4 * cache // num_bytes)))


def copy_bandwidth(effort: Effort, num_bytes: int) -> float:
    """Bytes per second, read and written, of a copy within the card's memory."""
    import cupy

    runtime = cupy.cuda.runtime
    stream = cupy.cuda.Stream(non_blocking=True)
    addresses = [runtime.malloc(num_bytes) for _ in range(2)]
    for address in addresses:
        runtime.memsetAsync(address, 1, num_bytes, stream.ptr)
    target, source = addresses
    seconds = Clock(stream, effort).seconds(
        lambda _: runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDeviceToDevice, stream.ptr)
    )
    for address in addresses:
        runtime.free(address)
    return 2 * num_bytes / seconds


def host_copy_bandwidth(num_bytes: int, repeats: int, *, to_host: bool) -> float:
    """Bytes per second between the card and page-locked memory of the host."""
    import cupy

    runtime = cupy.cuda.runtime
    stream = cupy.cuda.Stream(non_blocking=True)
    on_device, on_host = runtime.malloc(num_bytes), runtime.hostAlloc(num_bytes, 0)
    runtime.memsetAsync(on_device, 1, num_bytes, stream.ptr)
    target, source = (on_host, on_device) if to_host else (on_device, on_host)
    kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice

    def copy() -> None:
        runtime.memcpyAsync(target, source, num_bytes, kind, stream.ptr)
        stream.synchronize()

    seconds = wall_seconds(copy, repeats)
    runtime.free(on_device)
    runtime.freeHost(on_host)
    return num_bytes / seconds


def wall_seconds(work: Callable[[], object], repeats: int) -> float:
    """Of work that waits for its own end: the median of several times, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])
