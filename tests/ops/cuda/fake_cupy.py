"""As much of CuPy as a backend with kernels of its own needs, over the fake GPU.

Names and meanings are CuPy's; what is not here, `ops/cuda.py` should not use. Arrays do no arithmetic: kernels do.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.ops.cuda.emulated import DTYPES, Kernel, Module
from tests.ops.cuda.fake_gpu import CudaError, Gpu, KernelRun, OutOfMemoryError, Queue, Wait, Work, host_bytes
from tests.ops.cuda.fake_nvrtc import read_code

HostArray = NDArray[np.generic]
Shape = int | tuple[int, ...]
Index = int | slice | tuple[int | slice, ...]


class Memory(Protocol):
    """cupy.cuda.BaseMemory."""

    gpu: Gpu
    ptr: int


class Buffer:
    """Device memory of the pool, freed with the last array that looks at it."""

    def __init__(self, gpu: Gpu, size: int) -> None:
        self.gpu = gpu
        self.ptr = gpu.allocate(size)
        weakref.finalize(self, gpu.free, self.ptr, gpu.queue).atexit = False


class UnownedMemory:
    """cupy.cuda.UnownedMemory: somebody else's, who lives at least as long. CuPy believes what it is told."""

    def __init__(self, gpu: Gpu, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.gpu = gpu
        self.ptr = ptr
        self.size = size
        self._owner = owner


class MemoryPointer:
    """`array.data`."""

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset


class DeviceArray:
    """cupy.ndarray: a view of device memory. `layout` describes it and is never read."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, memptr: MemoryPointer) -> None:
        kind = np.dtype(dtype)
        memory = host_bytes(memptr.ptr, math.prod(shape) * kind.itemsize)
        self._describe(memptr.mem, memory.view(kind).reshape(shape))

    @classmethod
    def _over(cls, memory: Memory, layout: HostArray) -> DeviceArray:
        array = cls.__new__(cls)
        array._describe(memory, layout)
        return array

    def _describe(self, memory: Memory, layout: HostArray) -> None:
        self._memory = memory
        self._layout = layout
        self.shape = layout.shape
        self.dtype = layout.dtype
        self.ndim = layout.ndim
        self.size = layout.size
        self.itemsize = layout.itemsize
        self.nbytes = layout.nbytes
        self.flags = layout.flags

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(self._memory, self._layout.ctypes.data - self._memory.ptr)

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, index: Index) -> DeviceArray:
        part = self._layout[index if isinstance(index, tuple) else (index,)]
        assert isinstance(part, np.ndarray), "CuPy gives an array of no dimensions for one element; use a slice"
        return DeviceArray._over(self._memory, part)

    def reshape(self, *shape: Shape) -> DeviceArray:
        sizes = [size for each in shape for size in (each if isinstance(each, tuple) else (each,))]
        reshaped = self._layout.reshape(sizes)
        assert np.shares_memory(reshaped, self._layout) or self.size == 0, "this reshape would copy"
        return DeviceArray._over(self._memory, reshaped)

    def view(self, dtype: DTypeLike) -> DeviceArray:
        return DeviceArray._over(self._memory, self._layout.view(dtype))

    def fill(self, value: float) -> None:
        """On the current stream."""
        layout = self._layout
        self._memory.gpu.put(lambda: layout.fill(value))

    def set(self, array: HostArray, stream: Stream | None = None) -> None:
        """Copy from the host, on a stream; page-locked memory is read when the copy runs."""
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(f"an array of {array.dtype} {array.shape} does not fit {self.dtype} {self.shape}")
        self._contiguous(array)
        self._memory.gpu.copy(self.data.ptr, array.ctypes.data, self.nbytes, None if stream is None else stream.queue)

    def get(self, stream: Stream | None = None, out: HostArray | None = None, blocking: bool = True) -> HostArray:
        """Copy to the host, on a stream; without `blocking`, `out` is valid when the stream has been waited for.

        Without `out` CuPy gives the memory itself, and waits for nothing, where the host can read it.
        """
        if out is None and self._memory.gpu.is_unified:
            return self._layout
        queue = self._memory.gpu.queue if stream is None else stream.queue
        result = np.empty(self.shape, self.dtype) if out is None else out
        if result.shape != self.shape or result.dtype != self.dtype:
            raise ValueError(f"{self.dtype} {self.shape} does not fit out, {result.dtype} {result.shape}")
        self._contiguous(result)
        self._memory.gpu.copy(result.ctypes.data, self.data.ptr, self.nbytes, queue)
        if blocking:
            self._memory.gpu.refuse_during_capture("a blocking copy")
            self._memory.gpu.run_until(queue, queue.end)
        return result

    def __array__(self, *_: object, **__: object) -> HostArray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def _contiguous(self, host: HostArray) -> None:
        assert self.flags.c_contiguous, "CuPy would copy this array first"
        assert host.flags.c_contiguous, "CuPy would copy the host's array first"


ON_DEVICE = {1: (True, False), 2: (False, True), 3: (True, True)}
"""By a copy's kind: whether its destination and source are on the device."""

Argument = DeviceArray | np.generic | bool | int | float | None
"""Of a kernel."""


class Stream:
    """cupy.cuda.Stream."""

    def __init__(self, gpu: Gpu, queue: Queue | None = None) -> None:
        self._gpu = gpu
        self.queue = queue or Queue()
        if queue is None:
            gpu.queues.append(self.queue)
        self.ptr = id(self.queue)
        self._previous: list[Queue] = []

    def __enter__(self) -> Stream:
        self._previous.append(self._gpu.queue)
        self._gpu.queue = self.queue
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._gpu.queue = self._previous.pop()

    def use(self) -> Stream:
        self._gpu.queue = self.queue
        return self

    @property
    def done(self) -> bool:
        return _advance(self._gpu, self.queue, self.queue.end)

    def synchronize(self) -> None:
        self._gpu.refuse_during_capture("synchronisation with a stream")
        self._gpu.run_until(self.queue, self.queue.end)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What is put on this stream later runs after what was on the event's stream when it was recorded."""
        if event.recorded is not None:
            self._gpu.put(Wait(*event.recorded), self.queue)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.queue is self._gpu.default_queue:
            raise CudaError("cudaErrorStreamCaptureUnsupported: the default stream cannot be captured")
        if self.queue.captured is not None:
            raise CudaError("cudaErrorIllegalState: the stream is being captured already")
        self.queue.captured = []

    def end_capture(self) -> Graph:
        if self.queue.captured is None:
            raise CudaError("cudaErrorIllegalState: the stream is not being captured")
        captured, self.queue.captured = self.queue.captured, None
        return Graph(self._gpu, captured)


class Graph:
    """cupy.cuda.Graph: what a stream was given while it was captured."""

    def __init__(self, gpu: Gpu, work: Sequence[Work]) -> None:
        self._gpu = gpu
        self._work = work

    def launch(self, stream: Stream | None = None) -> None:
        for work in self._work:
            self._gpu.put(work, None if stream is None else stream.queue)

    def upload(self, stream: Stream | None = None) -> None:
        """Nothing to prepare."""


class Event:
    """cupy.cuda.Event."""

    def __init__(self, gpu: Gpu, disable_timing: bool = False) -> None:
        self._gpu = gpu
        self.is_timed = not disable_timing
        self.recorded: tuple[Queue, int] | None = None
        self.seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        queue = self._gpu.queue if stream is None else stream.queue
        self.recorded = (queue, queue.end)
        self.seconds = time.perf_counter()

    @property
    def done(self) -> bool:
        return self.recorded is None or _advance(self._gpu, *self.recorded)

    def synchronize(self) -> None:
        self._gpu.refuse_during_capture("synchronisation with an event")
        if self.recorded is not None:
            self._gpu.run_until(*self.recorded)


def get_elapsed_time(start: Event, end: Event) -> float:
    """Milliseconds, of no meaning: those between the calls that recorded the events."""
    if not (start.is_timed and end.is_timed and start.recorded and end.recorded):
        raise CudaError("cudaErrorInvalidResourceHandle: an event was not recorded, or made without timing")
    if any(event.recorded and event.recorded[0].done < event.recorded[1] for event in (start, end)):
        raise CudaError("cudaErrorNotReady: device not ready")
    return 1e3 * (end.seconds - start.seconds)


def _advance(gpu: Gpu, queue: Queue, end: int) -> bool:
    """Whether so much is done; if not, one piece more is now, so that polling comes to an end."""
    gpu.refuse_during_capture("a query")
    done = queue.done >= end
    if not done:
        gpu.run_until(queue, queue.done + 1)
    return done


class Device:
    """cupy.cuda.Device."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.id = 0
        self.compute_capability = gpu.compute_capability
        self.attributes = {
            "MaxSharedMemoryPerBlockOptin": gpu.shared_limit,
            "MultiProcessorCount": 4,
            "WarpSize": 32,
            "L2CacheSize": 4096,
        }

    @property
    def mem_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        gpu = self._gpu
        return gpu.memory_bytes - gpu.used_bytes - gpu.cached_bytes - gpu.unpooled_bytes, gpu.memory_bytes

    def use(self) -> None:
        """There is one."""

    def synchronize(self) -> None:
        self._gpu.synchronize()


class MemoryPool:
    """cupy.get_default_memory_pool()."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def used_bytes(self) -> int:
        return self._gpu.used_bytes

    def total_bytes(self) -> int:
        return self._gpu.used_bytes + self._gpu.cached_bytes

    def free_all_blocks(self) -> None:
        self._gpu.cached_bytes = 0


class PinnedMemory(bytearray):
    """cupy.cuda.PinnedMemoryPointer: a buffer for np.frombuffer, poisoned."""

    def __init__(self, gpu: Gpu, size: int) -> None:
        super().__init__(b"\xff" * size)
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self)) if size else 0
        gpu.pinned[self.ptr] = size
        weakref.finalize(self, gpu.pinned.pop, self.ptr, None).atexit = False


class Function:
    """What RawModule.get_function gives."""

    def __init__(self, gpu: Gpu, kernel: Kernel) -> None:
        self._gpu = gpu
        self._kernel = kernel
        self._is_loaded = False

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._kernel.max_dynamic_shared_size_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        if size > self._gpu.shared_limit:
            raise CudaError(
                f"CUDA_ERROR_INVALID_VALUE: {size} bytes of shared memory; {self._gpu.shared_limit} at most"
            )
        self._kernel.max_dynamic_shared_size_bytes = size

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Argument],
        *,
        shared_mem: int = 0,
        stream: Stream | None = None,
    ) -> None:
        """Launch on a stream. Arguments and sizes are checked at once, all else when the kernel runs."""
        assert isinstance(grid, tuple), "CuPy takes the grid as a tuple"
        assert isinstance(block, tuple), "CuPy takes the block as a tuple"
        arguments = [self._argument(argument, index) for index, argument in enumerate(args)]
        self._kernel.check(grid, block, arguments, shared_mem)
        if not self._is_loaded:  # CUDA loads a kernel when it is launched for the first time
            self._gpu.refuse_during_capture(f"loading of {self._kernel.name}")
            self._is_loaded = True

        def run() -> None:
            for argument in arguments:
                if isinstance(argument, np.ndarray):
                    self._gpu.bytes_at(argument.ctypes.data, argument.nbytes)
            self._kernel(
                grid, block, arguments, shared_mem, execution=self._gpu.execution, allocations=self._gpu.allocations
            )

        self._gpu.put(KernelRun(run), None if stream is None else stream.queue)

    def _argument(self, argument: Argument, index: int) -> HostArray | np.generic | bool | int | float | None:
        if argument is None:
            raise TypeError("for None, CuPy before version 14 gives the driver no argument at all; give np.uint64(0)")
        parameter = self._kernel.parameters[index] if index < len(self._kernel.parameters) else None
        is_pointer = parameter is not None and parameter.kind == "pointer"
        if not isinstance(argument, DeviceArray):
            return None if is_pointer and isinstance(argument, np.uint64) and argument == 0 else argument
        layout = argument._layout
        # Before version 14, CuPy has no bfloat16; its arrays say that they are uint16.
        is_bfloat16 = parameter is not None and DTYPES.get(parameter.type) == ml_dtypes.bfloat16
        return layout.view(ml_dtypes.bfloat16) if is_bfloat16 and layout.dtype == np.uint16 else layout


class RawModule:
    """cupy.RawModule. A file is read by `compile`, or when the first function is asked for."""

    def __init__(
        self, gpu: Gpu, *, code: str | None = None, path: str | None = None, options: tuple[str, ...] = ()
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        self._gpu = gpu
        self._code = code
        self._path = path
        self._options = options

    def compile(self) -> None:
        self._module  # noqa: B018 (compiles)

    @functools.cached_property
    def _module(self) -> Module:
        name, code, options = "module.cu", self._code, self._options
        if self._path is not None:
            name, code, options = read_code(Path(self._path).read_bytes())
        assert code is not None
        known = [option for option in options if option.startswith(("-D", "-I"))]
        return Module(code, name, known, checked=self._gpu.checked)

    def get_function(self, name: str) -> Function:
        kernel = self._module.kernels.get(name)
        if kernel is None:
            raise CudaError(f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}")
        return Function(self._gpu, kernel)


def fake_cupy(gpu: Gpu) -> dict[str, types.ModuleType]:
    """Modules for sys.modules, by name."""

    def empty(shape: Shape, dtype: DTypeLike = float) -> DeviceArray:
        sizes = shape if isinstance(shape, tuple) else (shape,)
        kind = np.dtype(dtype)
        size = math.prod(sizes) * kind.itemsize
        buffer = Buffer(gpu, size)
        return DeviceArray(sizes, kind, MemoryPointer(buffer, 0))

    def zeros(shape: Shape, dtype: DTypeLike = float) -> DeviceArray:
        array = empty(shape, dtype)
        array.fill(0)
        return array

    def asarray(host: HostArray, dtype: DTypeLike | None = None) -> DeviceArray:
        host = np.ascontiguousarray(host, dtype)
        array = empty(host.shape, host.dtype)
        array.set(host)
        return array

    def memcpy_async(destination: int, source: int, size: int, kind: int, stream: int) -> None:
        if (gpu.is_device(destination), gpu.is_device(source)) != ON_DEVICE[kind]:
            raise CudaError(f"cudaErrorInvalidValue: a copy of kind {kind} from {source:#x} to {destination:#x}")
        gpu.copy(destination, source, size, next(queue for queue in gpu.queues if id(queue) == stream))

    class NewStream(Stream):
        null = Stream(gpu, gpu.default_queue)

        def __init__(self, non_blocking: bool = False) -> None:
            assert non_blocking, "a blocking stream waits for the default one, which is seldom meant and not emulated"
            super().__init__(gpu)

    def memset_async(address: int, value: int, size: int, stream: int) -> None:
        queue = next(queue for queue in gpu.queues if id(queue) == stream)
        gpu.put(lambda: gpu.bytes_at(address, size).fill(value), queue)

    runtime = _module(
        "cupy.cuda.runtime",
        malloc=gpu.malloc,
        free=gpu.cuda_free,
        hostAlloc=lambda size, flags: gpu.lock_memory(size),
        freeHost=gpu.free_locked,
        getDevice=lambda: 0,
        memsetAsync=memset_async,
        memcpyAsync=memcpy_async,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
        getDeviceCount=lambda: 1,
        runtimeGetVersion=lambda: 12090,
        driverGetVersion=lambda: 12090,
        streamCaptureModeThreadLocal=1,
        CUDARuntimeError=CudaError,
    )
    driver = _module("cupy.cuda.driver", CUDADriverError=CudaError)
    memory = _module("cupy.cuda.memory", OutOfMemoryError=OutOfMemoryError)
    cuda = _module(
        "cupy.cuda",
        Stream=NewStream,
        Event=lambda block=False, disable_timing=False: Event(gpu, disable_timing),
        get_elapsed_time=get_elapsed_time,
        Graph=Graph,
        Device=lambda device=0: Device(gpu),
        MemoryPointer=MemoryPointer,
        UnownedMemory=functools.partial(UnownedMemory, gpu),
        alloc_pinned_memory=lambda size: PinnedMemory(gpu, size),
        get_current_stream=lambda: Stream(gpu, gpu.queue),
        driver=driver,
        runtime=runtime,
        memory=memory,
    )
    pool = MemoryPool(gpu)
    cupy = _module(
        "cupy",
        ndarray=DeviceArray,
        empty=empty,
        zeros=zeros,
        asarray=asarray,
        RawModule=functools.partial(RawModule, gpu),
        get_default_memory_pool=lambda: pool,
        cuda=cuda,
    )
    return {module.__name__: module for module in (cupy, cuda, driver, runtime, memory)}


def _module(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(contents)
    return module
