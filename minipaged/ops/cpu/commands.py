"""CommandRunner: runs operations on the C kernels (the folder cpu/), each at once, or those of a forward pass together.

Inside `replay` the operations of a whole forward pass are recorded, and run in one call, without the GIL; a step of a
size seen before runs the same commands again, so that Python's share of a step does not grow with the number of layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import DTypeLike

from minipaged.errors import DeviceError
from minipaged.ops.base import Batch
from minipaged.ops.cpu import _kernels
from minipaged.ops.cpu.graph import ALIGNMENT, RECORDS, Graph, Node, UnplacedArrays, address
from minipaged.ops.reference.numpy_ops import Array

MAX_RECORDED = 256
"""Recorded passes that are kept, one for each number of tokens and of rows that sample; some 60 kB each."""

WORKSPACE_BYTES = 1 << 20
"""Size of the workspace at first; it grows as passes need."""

Function = Callable[[Batch[Array]], Array]

ARRAYS = tuple(field.name for field in fields(Batch) if field.name != "device_part")
"""The arrays of a batch."""


class _Recording:
    """A forward pass while it is recorded: what has been done so far, to a batch that stands for every one."""

    def __init__(self, batch: Batch[Array]) -> None:
        self.nodes: list[Node] = []
        self.arrays = UnplacedArrays()
        arrays: dict[str, Array] = {name: getattr(batch, name) for name in ARRAYS}
        self.batch: Batch[Array] = Batch(
            **{name: self.arrays.empty(array.shape, array.dtype) for name, array in arrays.items()}
        )


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A forward pass that can be run again."""

    commands: bytes
    output: Array


class CommandRunner:
    """A team of threads, the workspace that recorded passes share, and those passes.

    Raises `DeviceError` if the threads cannot be started or the instruction set is not supported.
    """

    def __init__(self, num_threads: int, instruction_set: str | None) -> None:
        supported = _kernels.supported()
        if instruction_set is not None and instruction_set not in supported:
            raise DeviceError(
                f"Instruction set {instruction_set!r} is not supported here; expected one of {supported}."
            )
        self.instruction_set = instruction_set or supported[-1]
        self.kernel_seconds = 0.0
        """Time spent inside the kernels so far."""
        try:
            self._team = _kernels.create_team(num_threads)
        except OSError as error:
            raise DeviceError(f"{error}; give a smaller num_threads.") from error
        self._header: dict[str, int] = dict.fromkeys(RECORDS["BatchHeader"].fields, 0)
        self._header_bytes = np.zeros(len(RECORDS["BatchHeader"].pack(self._header)), np.uint8)
        self._workspace = _aligned(WORKSPACE_BYTES)
        self._recording: _Recording | None = None
        self._recorded: dict[tuple[Function, int, int], _Recorded] = {}

    def close(self) -> None:
        """Forget the recorded passes; threads end when the last reference to this object does."""
        self._recorded.clear()
        self._workspace = _aligned(WORKSPACE_BYTES)

    # Whole passes

    def replay(self, function: Function, batch: Batch[Array]) -> Array:
        """`function(batch)`, recorded and run in one call."""
        key = (function, len(batch.token_ids), len(batch.sampled))
        recorded = self._recorded.pop(key, None) or self._record(function, batch)
        self._recorded[key] = recorded  # the latest last
        if len(self._recorded) > MAX_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        self._describe({name: getattr(batch, name) for name in ARRAYS})
        self._run(recorded.commands)
        return recorded.output

    def _record(self, function: Function, batch: Batch[Array]) -> _Recorded:
        recording = self._recording = _Recording(batch)
        try:
            output = function(recording.batch)
        finally:
            self._recording = None
        graph = Graph(recording.nodes, recording.arrays, output)
        if graph.num_bytes > len(self._workspace):
            self._recorded.clear()  # their commands hold addresses of the memory that is replaced
            self._workspace = _aligned(max(graph.num_bytes, 2 * len(self._workspace)))
        return _Recorded(graph.encode(address(self._workspace)), graph.result(self._workspace))

    def _run(self, commands: bytes) -> None:
        started = time.perf_counter()
        _kernels.run(self._team, self.instruction_set, commands)
        self.kernel_seconds += time.perf_counter() - started

    # Single operations

    @property
    def is_recording(self) -> bool:
        """Whether operations are recorded, not run at once."""
        return self._recording is not None

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An array for what an operation makes."""
        return np.empty(shape, dtype) if self._recording is None else self._recording.arrays.empty(shape, dtype)

    def add(self, node: Node) -> Array:
        """Record an operation, or run it at once; returns its output."""
        if self._recording is not None:
            self._recording.nodes.append(node)
        else:
            graph = Graph([node], UnplacedArrays(), node.output)
            workspace = _aligned(graph.num_bytes)
            self._run(graph.encode(address(workspace)))
        return node.output

    def header(self, **arrays: Array) -> int:
        """Address of the header through which a command finds these arrays of the batch, given by their names in it.

        Raises `ValueError` where a recorded function uses another array, which no later batch would replace.
        """
        if self._recording is None:
            self._describe(arrays)
            return address(self._header_bytes)
        for name, array in arrays.items():
            if address(array) != address(getattr(self._recording.batch, name)):
                raise ValueError(f"A recorded function used an array that is not the batch's {name}.")
        return address(self._header_bytes)

    def _describe(self, arrays: Mapping[str, Array]) -> None:
        self._header.update({name: address(array) for name, array in arrays.items() if name in self._header})
        if "block_tables" in arrays:
            self._header["table_stride"] = arrays["block_tables"].shape[1]
        if "rows" in arrays:
            self._header["num_sequences"] = len(arrays["rows"])
        self._header_bytes[:] = np.frombuffer(RECORDS["BatchHeader"].pack(self._header), np.uint8)


def _aligned(num_bytes: int) -> Array:
    """Memory that begins where a line of the processor's cache does, its content undefined."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -address(raw) % ALIGNMENT
    return raw[start : start + num_bytes]
