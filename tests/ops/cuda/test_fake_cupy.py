"""The fake GPU behaves like one: it runs late, forgets what is freed, refuses what a GPU refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import numpy as np
import pytest

from tests.ops.cuda.emulated import EmulatorFault
from tests.ops.cuda.fake_cupy import fake_cupy
from tests.ops.cuda.fake_gpu import CudaError, Gpu, OutOfMemoryError, Timing

ADD = """
extern "C" __global__ void add(float* x, float amount, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += amount;
}
extern "C" __global__ void set(float* x, const float* y) { x[0] = y ? y[0] : -1; }
extern "C" __global__ void wide(float* x) { extern __shared__ float s[]; s[20000] = 1; x[0] = s[20000]; }
"""


def modules(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, module in fake_cupy(gpu).items():
        monkeypatch.setitem(sys.modules, name, module)
    import cupy

    assert isinstance(cupy, ModuleType)
    return cupy


@pytest.fixture
def gpu() -> Gpu:
    return Gpu(memory_bytes=1 << 20, checked=True)


@pytest.fixture
def cupy(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield modules(gpu, monkeypatch)
    assert gpu.queue is gpu.default_queue


def adder(cupy: ModuleType) -> Callable[..., None]:
    kernel: Callable[..., None] = cupy.RawModule(code=ADD, options=("--std=c++17",)).get_function("add")
    return kernel


def add(cupy: ModuleType, x: object, amount: float, n: int = 4) -> None:
    adder(cupy)((1,), (32,), (x, np.float32(amount), np.int32(n)))


def test_arrays(cupy: ModuleType) -> None:
    x = cupy.asarray(np.arange(12, dtype=np.float32))
    assert (x.shape, x.dtype, x.nbytes, x.size, len(x)) == ((12,), np.float32, 48, 12, 12)
    assert x[4:8].get().tolist() == [4, 5, 6, 7]
    assert x[4:8].data.ptr == x.data.ptr + 16
    assert x.reshape(3, 4)[1].get().tolist() == [4, 5, 6, 7]
    assert x.view(np.uint32).get()[1] == 0x3F800000
    x.set(np.ones(12, np.float32))
    assert x.get().tolist() == [1] * 12
    assert np.isnan(cupy.empty(4, np.float32).get()).all()
    assert cupy.zeros((2, 2), np.int32).get().tolist() == [[0, 0], [0, 0]]
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with pytest.raises(ValueError, match="does not fit"):
        x.set(np.ones(12))


def test_kernels_run_when_somebody_waits(cupy: ModuleType) -> None:
    x = cupy.zeros(4, np.float32)
    out = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Stream.null.synchronize()
    with stream:
        add(cupy, x, 2)
        x.get(out=out, blocking=False)
    assert np.isnan(out).all()
    stream.synchronize()
    assert out.tolist() == [2] * 4


def test_without_a_wait_between_streams_old_data_is_read(cupy: ModuleType) -> None:
    x = cupy.zeros(4, np.float32)
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Stream.null.synchronize()
    with first:
        add(cupy, x, 2)
        event = first.record()
    assert x.get(stream=second).tolist() == [0] * 4
    second.wait_event(event)
    assert x.get(stream=second).tolist() == [2] * 4


def test_pinned_memory_is_read_late_and_other_memory_at_once(cupy: ModuleType) -> None:
    x = cupy.zeros(4, np.float32)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float32)
    for source, expected in ((pinned, 5.0), (np.zeros(4, np.float32), 1.0)):
        source.fill(1)
        x.set(source)
        source.fill(5)
        assert x.get().tolist() == [expected] * 4


def test_copies_by_address(cupy: ModuleType) -> None:
    runtime = cupy.cuda.runtime
    x, y = cupy.asarray(np.arange(4, dtype=np.float32)), cupy.zeros(4, np.float32)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    runtime.memcpyAsync(y.data.ptr, x.data.ptr + 4, 12, runtime.memcpyDeviceToDevice, stream.ptr)
    runtime.memcpyAsync(pinned.ctypes.data, y.data.ptr, 16, runtime.memcpyDeviceToHost, stream.ptr)
    event = stream.record()
    polls = 0
    while not event.done:
        polls += 1
    assert polls == 2
    assert pinned.tolist() == [1, 2, 3, 0]
    with pytest.raises(CudaError, match="a copy of kind 1 from"):
        runtime.memcpyAsync(y.data.ptr, x.data.ptr, 16, runtime.memcpyHostToDevice, stream.ptr)
    runtime.memcpyAsync(y.data.ptr + 4, x.data.ptr, 16, runtime.memcpyDeviceToDevice, stream.ptr)
    with pytest.raises(CudaError, match="are no device memory"):
        stream.synchronize()


def test_memory_is_accounted_for_and_gets_reused(cupy: ModuleType, gpu: Gpu) -> None:
    pool, device = cupy.get_default_memory_pool(), cupy.cuda.Device()
    assert device.mem_info == (1 << 20, 1 << 20)
    x = cupy.empty(100 << 10, np.float32)
    assert pool.used_bytes() == pool.total_bytes() == 400 << 10
    assert device.mem_info[0] == (1 << 20) - (400 << 10)
    y = cupy.empty(100 << 10, np.float32)
    with pytest.raises(OutOfMemoryError, match="out of memory allocating 409600 bytes"):
        cupy.empty(100 << 10, np.float32)
    part = x[:10]
    del x
    assert pool.used_bytes() == 800 << 10
    del part
    assert (pool.used_bytes(), pool.total_bytes()) == (400 << 10, 800 << 10)
    z = cupy.empty(100 << 10, np.float32)
    del y, z
    pool.free_all_blocks()
    assert pool.total_bytes() == 0
    assert device.mem_info == (1 << 20, 1 << 20)


def test_what_is_on_a_stream_may_still_use_what_is_freed(cupy: ModuleType) -> None:
    x, y = cupy.asarray(np.ones(4, np.float32)), cupy.empty(4, np.float32)
    runtime = cupy.cuda.runtime
    runtime.memcpyAsync(y.data.ptr, x.data.ptr, 16, runtime.memcpyDeviceToDevice, cupy.cuda.Stream.null.ptr)
    del x
    assert y.get().tolist() == [1] * 4


def test_graphs(cupy: ModuleType) -> None:
    x = cupy.zeros(4, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    kernel, kernel_never_launched = adder(cupy), adder(cupy)
    kernel((1,), (32,), (x, np.float32(0), np.int32(4)))
    cupy.cuda.Stream.null.synchronize()
    with stream:
        stream.begin_capture()
        for amount in (1, 2):
            kernel((1,), (32,), (x, np.float32(amount), np.int32(4)))
        for forbidden in (
            stream.synchronize,
            cupy.cuda.Device().synchronize,
            x.get,
            partial(kernel_never_launched, (1,), (32,), (x, np.float32(1), np.int32(4))),
            lambda: cupy.empty(4, np.float32),
        ):
            with pytest.raises(CudaError, match="cudaErrorStreamCaptureUnsupported"):
                forbidden()
        graph = stream.end_capture()
        assert x.get().tolist() == [0] * 4
        graph.launch()
        graph.launch()
        assert x.get().tolist() == [6] * 4
    del x
    cupy.cuda.Stream.null.synchronize()
    graph.launch(stream)
    with pytest.raises(CudaError, match="are no device memory, or no longer"):
        stream.synchronize()


def test_the_default_stream_cannot_be_captured(cupy: ModuleType) -> None:
    with pytest.raises(CudaError, match="the default stream"):
        cupy.cuda.Stream.null.begin_capture()


def test_faults_of_kernels_show_at_the_wait_and_wrong_arguments_at_the_launch(cupy: ModuleType) -> None:
    x = cupy.zeros(4, np.float32)
    add(cupy, x, 1, n=5)
    with pytest.raises(EmulatorFault, match="0 bytes past the end of device memory"):
        x.get()
    with pytest.raises(TypeError, match=r"must be numpy\.float32, not float64"):
        adder(cupy)((1,), (32,), (x, 1.0, np.int32(4)))
    with pytest.raises(CudaError, match="named symbol not found"):
        cupy.RawModule(code=ADD).get_function("subtract")


def test_a_pointer_to_nothing_is_a_number(cupy: ModuleType) -> None:
    x, kernel = cupy.zeros(1, np.float32), cupy.RawModule(code=ADD).get_function("set")
    kernel((1,), (1,), (x, np.uint64(0)))
    assert x.get().tolist() == [-1]
    with pytest.raises(TypeError, match="CuPy before version 14"):
        kernel((1,), (1,), (x, None))
    with pytest.raises(TypeError, match="must be an array of float32, not uint64"):
        kernel((1,), (1,), (x, np.uint64(4)))


@pytest.mark.parametrize(("capability", "limit"), [("80", 163 << 10), ("86", 99 << 10), ("90", 227 << 10)])
def test_shared_memory_by_architecture(capability: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = modules(Gpu(compute_capability=capability), monkeypatch)
    device = cupy.cuda.Device()
    assert device.compute_capability == capability
    assert device.attributes["MaxSharedMemoryPerBlockOptin"] == limit
    kernel = cupy.RawModule(code=ADD).get_function("wide")
    x = cupy.zeros(1, np.float32)
    with pytest.raises(ValueError, match="max_dynamic_shared_size_bytes"):
        kernel((1,), (1,), (x,), shared_mem=90 << 10)
    with pytest.raises(CudaError, match="at most"):
        kernel.max_dynamic_shared_size_bytes = limit + 1
    kernel.max_dynamic_shared_size_bytes = limit
    kernel((1,), (1,), (x,), shared_mem=90 << 10)
    assert x.get().tolist() == [1]


def test_work_may_be_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = modules(Gpu(timing=Timing.AT_ONCE), monkeypatch)
    x = cupy.zeros(4, np.float32)
    out = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float32)
    add(cupy, x, 3)
    x.get(out=out, blocking=False)
    assert out.tolist() == [3] * 4


def test_copies_overtake_the_kernels_of_other_streams_unless_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = modules(Gpu(timing=Timing.EARLY_COPIES), monkeypatch)
    for waits, expected in ((False, 9.0), (True, 7.0)):
        x = cupy.zeros(4, np.float32)
        pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float32)
        pinned.fill(7)
        kernels, copies = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with kernels:
            add(cupy, x, 2)
            if waits:
                copies.wait_event(kernels.record())
        x.set(pinned, stream=copies)
        kernels.synchronize()
        assert x.get(stream=copies).tolist() == [expected] * 4


def test_a_random_order_is_one_that_the_events_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three streams add to the same array; who waits finds what was put before, the others find anything."""
    found = set()
    for seed in range(30):
        cupy = modules(Gpu(timing=Timing.SHUFFLED, seed=seed), monkeypatch)
        x, y = cupy.zeros(4, np.float32), cupy.zeros(4, np.float32)
        pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float32)
        first, second, third = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
        cupy.cuda.Stream.null.synchronize()
        with first:
            add(cupy, x, 1)
            add(cupy, y, 1)
            event = first.record()
        with second:
            second.wait_event(event)
            add(cupy, x, 2)
        with third:
            y.get(out=pinned, blocking=False)
            add(cupy, y, 0)
        assert x.get(stream=second).tolist() == [3] * 4
        third.synchronize()
        found.add(float(pinned[0]))
    assert found == {0, 1}
