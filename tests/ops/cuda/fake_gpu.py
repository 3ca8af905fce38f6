"""The fake GPU: device memory, an allocator, and streams that do their work when it hurts most.

By default, what is put on a stream runs when somebody waits for it, so that a missing wait shows as old or poisoned
data. What runs too early shows with the other timings, which let one stream overtake another where no event forbids it.
Memory is poisoned when it is allocated and when it is freed. Work on a stream knows addresses, not arrays: like a real
graph, a captured one does not keep alive what it reads.
"""

from __future__ import annotations

import ctypes
import enum
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.ops.cuda.emulated import Allocation, Execution

Bytes = NDArray[np.uint8]
Work = Callable[[], None]

ALIGNMENT = 512
RED_ZONE = 512
"""Bytes between two allocations that belong to neither."""
POISON = 0xFF
"""NaN in every floating-point type, -1 in integers."""

SHARED_LIMITS = {"80": 163 << 10, "86": 99 << 10, "89": 99 << 10, "90": 227 << 10, "100": 227 << 10, "120": 99 << 10}
"""Bytes of shared memory that a block may take after opting in, by compute capability."""


class CudaError(RuntimeError):
    """What CuPy raises as CUDARuntimeError or CUDADriverError."""


class OutOfMemoryError(MemoryError):
    """As cupy.cuda.memory.OutOfMemoryError."""


class Timing(enum.Enum):
    """When work that was put on a stream runs. Always in the stream's order, and after the events it waits for."""

    LATE = enum.auto()
    """When somebody waits for it."""
    AT_ONCE = enum.auto()
    """Before the call that asks for it returns."""
    EARLY_COPIES = enum.auto()
    """Kernels when somebody waits for them, all else as soon as no kernel is before it."""
    SHUFFLED = enum.auto()
    """At any time, drawn at random."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Work that is done when another stream has got so far."""

    queue: Queue
    end: int

    def __call__(self) -> None:
        self.queue.run_until(self.end)


@dataclass(frozen=True, slots=True)
class KernelRun:
    """Work that takes long."""

    run: Work

    def __call__(self) -> None:
        self.run()


@dataclass(eq=False)
class Queue:
    """The work of one stream."""

    pending: list[Work] = field(default_factory=list)
    done: int = 0
    """How much work has run since the beginning."""
    captured: list[Work] | None = None
    """What was put on it since a capture began."""

    @property
    def end(self) -> int:
        return self.done + len(self.pending)

    def run_until(self, end: int) -> None:
        while self.done < end:
            work = self.pending.pop(0)
            self.done += 1
            work()

    def is_ready(self, *, without_kernels: bool = False) -> bool:
        """Whether its next piece of work could run now."""
        if not self.pending:
            return False
        work = self.pending[0]
        if isinstance(work, Wait):
            return work.queue.done >= work.end
        return not (without_kernels and isinstance(work, KernelRun))


class Gpu:
    """One device."""

    def __init__(
        self,
        *,
        compute_capability: str = "80",
        memory_bytes: int = 64 << 20,
        checked: bool = False,
        timing: Timing = Timing.LATE,
        seed: int = 0,
        most_pinned_bytes: int = 1 << 30,
        is_unified: bool = False,
        execution: Execution | None = None,
    ) -> None:
        self.compute_capability = compute_capability
        self.memory_bytes = memory_bytes
        self.checked = checked
        self.timing = timing
        self._random = random.Random(seed)
        self.is_unified = is_unified
        """Whether the host can read its memory, and CuPy was told to make use of that: CUPY_ENABLE_UMP=1."""
        self.execution = execution or Execution()
        self.shared_limit = SHARED_LIMITS[compute_capability]
        self._memory = np.empty(memory_bytes + ALIGNMENT, np.uint8)
        self.base = -(-self._memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._sizes: dict[int, int] = {}
        self.used_bytes = 0
        self.cached_bytes = 0
        """Freed, but not given back to the device."""
        self.unpooled_bytes = 0
        """Allocated without the pool."""
        self.pinned: dict[int, int] = {}
        """Sizes of page-locked host memory by address."""
        self._most_pinned_bytes = most_pinned_bytes
        self._locked: dict[int, Bytes] = {}
        self.num_uploads = 0
        """Copies from the host that were asked for."""
        self.default_queue = Queue()
        self.queues = [self.default_queue]
        self._local = threading.local()

    # ---- Memory ----

    @property
    def allocations(self) -> list[Allocation]:
        """By address."""
        return [
            Allocation(address, size, f"device memory {address:#x} ({size} bytes)")
            for address, size in sorted(self._sizes.items())
        ]

    def allocate(self, size: int) -> int:
        """The address of poisoned memory."""
        self.refuse_during_capture("allocation")
        address = self._gap(size)
        if address is None:
            self.synchronize()  # memory may have been freed on a stream
            address = self._gap(size)
        if address is None:
            raise OutOfMemoryError(f"out of memory allocating {size} bytes (allocated so far: {self.used_bytes} bytes)")
        self._sizes[address] = size
        self.used_bytes += size
        self.cached_bytes = max(0, self.cached_bytes - size)
        self._view(address, size).fill(POISON)
        return address

    def free(self, address: int, queue: Queue) -> None:
        """As in CuPy's pool, what was put before on the stream that it was allocated for may still use the memory."""
        size = self._sizes[address]
        self.used_bytes -= size
        self.cached_bytes += size

        def drop() -> None:
            del self._sizes[address]
            self._view(address, size).fill(POISON)

        queue.pending.append(drop)  # garbage is collected at any time, also while other work runs
        if self.timing is Timing.AT_ONCE:
            queue.run_until(queue.end)

    def malloc(self, size: int) -> int:
        """cudaMalloc: memory that is not the pool's."""
        cached = self.cached_bytes
        try:
            address = self.allocate(size)
        except OutOfMemoryError as error:
            raise CudaError(f"cudaErrorMemoryAllocation: {error}") from error
        self.used_bytes -= size
        self.cached_bytes = cached
        self.unpooled_bytes += size
        return address

    def cuda_free(self, address: int) -> None:
        """cudaFree waits for all work."""
        self.synchronize()
        size = self._sizes.pop(address)
        self.unpooled_bytes -= size
        self._view(address, size).fill(POISON)

    def lock_memory(self, size: int) -> int:
        """cudaHostAlloc: page-locked memory, poisoned."""
        if sum(self.pinned.values()) + size > self._most_pinned_bytes:
            raise CudaError("cudaErrorMemoryAllocation: out of memory")
        memory = np.full(size, POISON, np.uint8)
        address: int = memory.ctypes.data
        self.pinned[address] = size
        self._locked[address] = memory
        return address

    def free_locked(self, address: int) -> None:
        """cudaFreeHost. What still looks there finds poison."""
        del self.pinned[address]
        self._locked[address].fill(POISON)

    def _gap(self, size: int) -> int | None:
        """The first that is large enough."""
        address = self.base
        for begin in [*sorted(self._sizes), self.base + self.memory_bytes]:
            if address + size + RED_ZONE <= begin:
                return address
            address = begin + -(-self._sizes.get(begin, 0) // ALIGNMENT) * ALIGNMENT + RED_ZONE
        return None

    def bytes_at(self, address: int, size: int) -> Bytes:
        """A view of device memory. Raises CudaError unless it lies within one allocation."""
        for begin, length in self._sizes.items():
            if begin <= address and address + size <= begin + length:
                return self._view(address, size)
        raise CudaError(f"cudaErrorInvalidValue: {size} bytes at {address:#x} are no device memory, or no longer")

    def is_device(self, address: int) -> bool:
        return self.base <= address < self.base + self.memory_bytes

    def is_pinned(self, address: int) -> bool:
        return any(begin <= address < begin + size for begin, size in self.pinned.items())

    def _view(self, address: int, size: int) -> Bytes:
        offset = address - self._memory.ctypes.data
        return self._memory[offset : offset + size]

    # ---- Streams ----

    @property
    def queue(self) -> Queue:
        """Of the calling thread's current stream."""
        queue: Queue = getattr(self._local, "queue", self.default_queue)
        return queue

    @queue.setter
    def queue(self, queue: Queue) -> None:
        self._local.queue = queue

    def put(self, work: Work, queue: Queue | None = None) -> None:
        """On a stream; None: the current one."""
        queue = queue or self.queue
        if queue.captured is not None:
            queue.captured.append(work)
            return
        self._append(work, queue)

    def _append(self, work: Work, queue: Queue) -> None:
        queue.pending.append(work)
        self._advance(queue)

    def _advance(self, queue: Queue) -> None:
        """Run what runs without being waited for, now that there is something new on the queue."""
        match self.timing:
            case Timing.LATE:
                pass
            case Timing.AT_ONCE:
                queue.run_until(queue.end)
            case Timing.EARLY_COPIES:
                while ready := [each for each in self.queues if each.is_ready(without_kernels=True)]:
                    ready[0].run_until(ready[0].done + 1)
            case Timing.SHUFFLED:
                for _ in range(self._random.choice((0, 0, 0, 1, 2, 5, 20))):
                    if ready := [each for each in self.queues if each.is_ready()]:
                        chosen = self._random.choice(ready)
                        chosen.run_until(chosen.done + 1)

    def run_until(self, queue: Queue, end: int) -> None:
        """Somebody waits until the queue has got so far."""
        queue.run_until(end)
        self._advance(queue)

    def synchronize(self) -> None:
        """Wait for every stream."""
        self.refuse_during_capture("synchronisation with the device")
        for queue in self.queues:
            queue.run_until(queue.end)

    def refuse_during_capture(self, what: str) -> None:
        if any(queue.captured is not None for queue in self.queues):
            raise CudaError(f"cudaErrorStreamCaptureUnsupported: {what} while a stream is captured")

    # ---- Copies ----

    def copy(self, destination: int, source: int, size: int, queue: Queue | None = None) -> None:
        """Between addresses of any kind, on a stream.

        Page-locked memory is read and written when the copy runs; other host memory at once, for which a copy to it
        waits, as on a real device.
        """
        if self.is_device(source):
            if self.is_device(destination):
                self.put(lambda: self._move(self.bytes_at(destination, size), self.bytes_at(source, size)), queue)
                return
            host = host_bytes(destination, size)
            target = queue or self.queue
            pinned = self.is_pinned(destination)
            if not pinned:
                self.refuse_during_capture("a copy to pageable memory")
            elif target.captured is None:
                host.fill(POISON)
            self.put(lambda: self._move(host, self.bytes_at(source, size)), target)
            if not pinned:
                self.run_until(target, target.end)
            return
        self.num_uploads += 1
        given = host_bytes(source, size)
        if not self.is_pinned(source):
            self.refuse_during_capture("a copy from pageable memory")
            given = given.copy()
        self.put(lambda: self._move(self.bytes_at(destination, size), given), queue)

    @staticmethod
    def _move(destination: Bytes, source: Bytes) -> None:
        destination[:] = source


def host_bytes(address: int, size: int) -> Bytes:
    """A view of host memory that does not keep it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
