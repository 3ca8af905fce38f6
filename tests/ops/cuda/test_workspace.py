"""The workspace: pieces in use never overlap, and what was counted is enough."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.ops.cuda.memory import CudaMemory
from minipaged.ops.cuda.workspace import Workspace
from minipaged.ops.workspace import WorkspaceFullError
from tests.ops.cuda.fake_gpu import Gpu
from tests.ops.cuda.machine import use_fake_gpu

if TYPE_CHECKING:
    import cupy

Request = tuple[int, int]
"""How many elements, and which of the arrays in use to give back before (modulo how many they are; 0: none)."""


def serve(workspace: Workspace, requests: list[Request]) -> list[int]:
    """Addresses, in the order of the requests. Arrays in use must not overlap."""
    held: list[cupy.ndarray] = []
    addresses = []
    for size, dropped in requests:
        if held and dropped % (len(held) + 1):
            del held[dropped % (len(held) + 1) - 1]
        array = workspace.take((size,), np.float32)
        addresses.append(array.data.ptr)
        held.append(array[:])  # a view keeps its place
        del array
        ordered = sorted(held, key=lambda each: (each.data.ptr, each.nbytes))
        assert all(one.data.ptr + one.nbytes <= other.data.ptr for one, other in itertools.pairwise(ordered))
    return addresses


@settings(max_examples=25)
@given(requests=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 9)), max_size=20))
def test_pieces_in_use_do_not_overlap_and_what_was_counted_is_enough(requests: list[Request]) -> None:
    with use_fake_gpu(Gpu(memory_bytes=1 << 20)):
        memory = CudaMemory()
        workspace = Workspace(memory)
        counted = workspace.count(lambda: serve(workspace, requests))
        workspace.allocate(counted, "a test")
        addresses = serve(workspace, requests)
        workspace.reset()
        assert serve(workspace, requests) == addresses
        memory.close()


def test_one_byte_less_than_counted_is_not_enough() -> None:
    requests = [(100, 0), (64, 0), (1, 1), (200, 0)]
    with use_fake_gpu(Gpu(memory_bytes=1 << 20)):
        memory = CudaMemory()
        workspace = Workspace(memory)
        workspace.allocate(workspace.count(lambda: serve(workspace, requests)) - 1, "a test")
        with pytest.raises(WorkspaceFullError):
            serve(workspace, requests)
        memory.close()


def test_a_piece_that_is_claimed_again_is_in_use() -> None:
    with use_fake_gpu(Gpu(memory_bytes=1 << 20)):
        memory = CudaMemory()
        workspace = Workspace(memory)
        workspace.allocate(4096, "a test")
        workspace.take((64,), np.float32)
        address = workspace.take((128,), np.float32).data.ptr + 256
        workspace.reset()
        again = workspace.take_again(address, (64,), np.float32)
        others = [workspace.take((64,), np.float32) for _ in range(4096 // 256 - 1)]
        assert again.data.ptr == address
        assert address not in [other.data.ptr for other in others]
        with pytest.raises(WorkspaceFullError):
            workspace.take((1,), np.float32)
        memory.close()


def test_a_piece_that_was_given_back_is_whole() -> None:
    with use_fake_gpu(Gpu(memory_bytes=1 << 20)):
        memory = CudaMemory()
        workspace = Workspace(memory)
        workspace.allocate(1024, "a test")
        for _ in range(3):
            first, second = workspace.take((128,), np.float32), workspace.take((128,), np.float32)
            with pytest.raises(WorkspaceFullError):
                workspace.take((1,), np.float32)
            address = first.data.ptr
            del first
            assert workspace.take((128,), np.float32).data.ptr == address
            del second
        memory.close()
