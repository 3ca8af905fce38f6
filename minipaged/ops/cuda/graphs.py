"""Graphs: decode steps that were captured once and are launched as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minipaged.ops.base import Batch
from minipaged.ops.cuda.batch import device_part
from minipaged.ops.cuda.errors import cuda_errors, error_classes, is_out_of_memory
from minipaged.ops.cuda.workspace import Workspace
from minipaged.ops.workspace import WorkspaceFullError

if TYPE_CHECKING:
    import cupy

    Function = Callable[[Batch[cupy.ndarray]], cupy.ndarray]
    Key = tuple[Function, int, int]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and where in the workspace its result is."""

    graph: cupy.cuda.Graph
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


class Graphs:
    """One for each function, number of sequences and number of splits that has occurred twice.

    The first time the kernels are launched one by one, which loads those that CUDA loads when they are first used; it
    must not do that during a capture.
    """

    def __init__(self, stream: cupy.cuda.Stream, workspace: Workspace) -> None:
        self._stream = stream
        self._workspace = workspace
        self._launched: set[Key] = set()
        self._captured: dict[Key, _Captured | None] = {}
        """Captured graphs; None for what cannot be captured."""
        self.is_capturing = False

    def run(self, function: Function, batch: Batch[cupy.ndarray], num_sequences: int) -> cupy.ndarray | None:
        """What the function returns for the first sequences of the batch; None: there is no graph, call it.

        The result is in the workspace, valid until that is reset.
        """
        key = (function, len(batch.rows), device_part(batch).num_splits)
        if key not in self._launched:
            self._launched.add(key)
            return None
        self._workspace.reset()
        if key not in self._captured:
            self._captured[key] = self._capture(function, batch)
        captured = self._captured[key]
        if captured is None:
            return None
        with cuda_errors("launch a graph"):
            captured.graph.launch(self._stream)
        return self._workspace.take_again(captured.address, (num_sequences, *captured.shape[1:]), captured.dtype)

    def _capture(self, function: Function, batch: Batch[cupy.ndarray]) -> _Captured | None:
        """None if memory is short: one by one the kernels need none of a graph's own, and may find theirs elsewhere."""
        with cuda_errors("capture a graph"):
            self._stream.begin_capture()
            self.is_capturing = True
            try:
                output = function(batch)
            except WorkspaceFullError:
                output = None
            finally:
                self.is_capturing = False
                graph = self._end_capture()
        if output is None or graph is None:
            return None
        captured = _Captured(graph, output.data.ptr, output.shape, output.dtype)
        del output
        self._workspace.reset()
        return captured

    def _end_capture(self) -> cupy.cuda.Graph | None:
        try:
            return self._stream.end_capture()
        except error_classes() as error:
            if is_out_of_memory(error):
                return None
            raise

    def close(self) -> None:
        """Forget all of them."""
        self._launched.clear()
        self._captured.clear()


def graph_size(num_sequences: int) -> int:
    """How many sequences the graph for so many takes: 1, 2, 4, 8, then multiples of 8."""
    return 1 << (num_sequences - 1).bit_length() if num_sequences <= 8 else -(-num_sequences // 8) * 8
