"""Staging and transfers by themselves: what the host must wait for, and what it must not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from minipaged.ops.cuda.memory import CudaMemory
from minipaged.ops.cuda.staging import Staging
from minipaged.ops.cuda.transfers import BlockTransfers
from tests.ops.cuda.fake_gpu import Gpu
from tests.ops.cuda.machine import use_fake_gpu

BUFFERS = 3


@pytest.fixture
def memory() -> Iterator[CudaMemory]:
    with use_fake_gpu(Gpu(memory_bytes=1 << 20)):
        memory = CudaMemory()
        yield memory
        memory.close()


def test_as_many_copies_are_under_way_as_there_are_buffers(memory: CudaMemory) -> None:
    """Until then the host waits for none of them; then for the oldest alone."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    staging = Staging(memory, stream, num_bytes=16, num_buffers=BUFFERS)
    target = memory.allocate((BUFFERS + 1, 16), np.uint8, "a test")
    copied = [cupy.cuda.Event() for _ in range(BUFFERS + 1)]
    buffers = set()
    for number in range(BUFFERS):
        buffer = staging.buffer()
        buffers.add(buffer.ctypes.data)
        buffer[:] = number
        staging.send(target[number : number + 1].data.ptr, 16)
        copied[number].record(stream)
    assert len(buffers) == BUFFERS
    assert stream.queue.done == 0  # the fake stream's: nothing has run
    assert staging.buffer().ctypes.data in buffers
    assert stream.queue.done == 1
    assert target.get(stream=stream)[:BUFFERS].tolist() == [[number] * 16 for number in range(BUFFERS)]


def test_an_array_goes_in_pieces_and_may_be_changed_at_once(memory: CudaMemory) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    staging = Staging(memory, stream, num_bytes=16, num_buffers=2)
    for size in (1, 15, 16, 17, 32, 100):
        target = memory.allocate((size + 1,), np.uint8, "a test")
        given = np.arange(size, dtype=np.uint8)
        staging.send_array(target.data.ptr, given)
        given.fill(77)
        assert target.get(stream=stream).tolist() == [*range(size), 0xFF]


def test_closing_transfers_waits_for_them(memory: CudaMemory) -> None:
    import cupy

    transfers = BlockTransfers(cupy.cuda.Stream(non_blocking=True))
    cache, host = memory.allocate((4, 8), np.uint8, "a test"), memory.allocate_pinned(32, "a test").reshape(4, 8)
    host[:] = np.arange(32).reshape(4, 8)
    transfers.from_host(host, cache, [(0, 1), (1, 2)])
    copy = transfers.to_host(cache, host, [(1, 3)])
    transfers.close()
    assert copy.done()
    assert host[3].tolist() == [*range(8)]
