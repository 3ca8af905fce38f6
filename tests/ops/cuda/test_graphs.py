"""Graphs by themselves: when a decode is captured, what is a graph of its own, and where its result lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from minipaged.ops.base import Batch
from minipaged.ops.cuda.batch import DevicePart
from minipaged.ops.cuda.graphs import Graphs
from minipaged.ops.cuda.memory import CudaMemory
from minipaged.ops.cuda.workspace import Workspace
from minipaged.ops.workspace import WorkspaceFullError
from tests.ops.cuda.fake_gpu import Gpu
from tests.ops.cuda.machine import use_fake_gpu

if TYPE_CHECKING:
    import cupy

    Function = Callable[[Batch[cupy.ndarray]], cupy.ndarray]


class Captured:
    """Graphs over a workspace, and functions that write a number to an array of it."""

    def __init__(self) -> None:
        import cupy

        self.memory = CudaMemory()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.workspace = Workspace(self.memory)
        self.workspace.allocate(4096, "a test")
        self.graphs = Graphs(self.stream, self.workspace)
        self.calls: list[int] = []
        self.functions: dict[int, Function] = {}

    def function(self, number: int, size: int = 4) -> Function:
        """The same one for the same number."""

        def write(batch: Batch[cupy.ndarray]) -> cupy.ndarray:
            self.calls.append(number)
            assert self.graphs.is_capturing
            scratch = self.workspace.take((64,), np.int32)
            out = self.workspace.take((size, 2), np.int32)
            with self.stream:
                scratch.fill(-7)
                out.fill(number)
            return out

        return self.functions.setdefault(number, write)

    def run(self, number: int, num_sequences: int = 4, num_splits: int = 1, asked: int = 3) -> cupy.ndarray | None:
        rows = self.memory.array(4096, (num_sequences,), np.int32, None)
        part = DevicePart(np.zeros(1, np.int32), num_splits)
        batch: Batch[cupy.ndarray] = Batch(rows, rows, rows, rows, rows, rows, rows, rows, rows, part)
        return self.graphs.run(self.function(number), batch, asked)


@pytest.fixture
def captured() -> Iterator[Captured]:
    with use_fake_gpu(Gpu(memory_bytes=1 << 20)):
        made = Captured()
        yield made
        made.graphs.close()
        made.memory.close()


def test_it_is_captured_the_second_time_and_only_launched_from_then_on(captured: Captured) -> None:
    assert captured.run(1) is None
    assert captured.calls == []
    for asked in (3, 1, 4):
        result = captured.run(1, asked=asked)
        assert result is not None
        assert result.get(stream=captured.stream).tolist() == [[1, 1]] * asked
        assert captured.calls == [1]
    assert not captured.graphs.is_capturing


def test_functions_sequences_and_splits_have_graphs_of_their_own(captured: Captured) -> None:
    kinds = [(1, 4, 1), (2, 4, 1), (1, 8, 1), (1, 4, 2)]
    for kind in kinds:
        assert captured.run(*kind) is None
    for kind in kinds * 2:
        result = captured.run(*kind)
        assert result is not None
        assert result.get(stream=captured.stream).tolist() == [[kind[0]] * 2] * 3
    assert captured.calls == [1, 2, 1, 1]


def test_the_result_of_a_graph_is_in_use_and_nothing_else_is(captured: Captured) -> None:
    """What the workspace held before the graph was captured or launched is free."""
    for _ in range(3):
        before = captured.workspace.take((64,), np.int32)
        result = captured.run(1)
        del before
    assert result is not None
    held = [captured.workspace.take((64,), np.int32) for _ in range(4096 // 256 - 1)]
    with pytest.raises(WorkspaceFullError):
        captured.workspace.take((1,), np.int32)
    assert result.data.ptr not in [array.data.ptr for array in held]


def test_what_the_workspace_has_no_room_for_is_not_captured_again(captured: Captured) -> None:
    captured.function(1, size=1024)
    assert [captured.run(1) for _ in range(3)] == [None] * 3
    assert captured.calls == [1]
    assert not captured.graphs.is_capturing
    with captured.stream:
        captured.workspace.reset()
        out = captured.workspace.take((4,), np.int32)
        out.fill(5)
    assert out.get(stream=captured.stream).tolist() == [5] * 4
