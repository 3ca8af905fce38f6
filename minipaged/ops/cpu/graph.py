"""Operations as a graph: recorded as nodes, then given memory, then encoded as commands for the C kernels.

While a forward pass is recorded, the arrays that it makes have shapes and addresses but no memory (`UnplacedArrays`):
views of them are NumPy's own, and by its address an array is known again.
`Graph` then finds who reads what: the floats of an array, its quantised form, or both. What nobody reads is not made.
From that follows from when until when each array must exist, and so where in the workspace it can be.

An array that has memory, such as a weight, is simply an address. An operation outside a recorded pass is a graph of one
node, whose arrays all have memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from minipaged.ops.cpu import _kernels
from minipaged.ops.cpu.packing import GROUP
from minipaged.ops.reference.numpy_ops import Array
from minipaged.ops.workspace import Places

ALIGNMENT = 64
"""Bytes: a line of the processor's cache."""
REGION_BYTES = 1 << 30
"""Addresses that are set aside at a time for arrays without memory."""
ENDLESS = 1 << 62


class Record:
    """A struct of cpu/command.h, as the compiled kernels describe it."""

    def __init__(self, name: str) -> None:
        self._op, num_bytes, places = _kernels.layouts()[name]
        ordered = sorted((offset, kind, field) for field, (offset, kind) in places.items())
        self.fields = tuple(field for _, _, field in ordered)
        layout, end = "=", 0
        for offset, kind, _ in ordered:
            layout += f"{offset - end}x{kind}"
            end = offset + struct.calcsize(f"={kind}")
        self._struct = struct.Struct(f"{layout}{num_bytes - end}x")

    def pack(self, values: Mapping[str, float]) -> bytes:
        """The struct; its operation, if it is a command, is known. Raises `KeyError` where a field has no value."""
        values = {"op": self._op, **values}
        return self._struct.pack(*(values[name] for name in self.fields))


RECORDS = {name: Record(name) for name in _kernels.layouts()}


@dataclass(slots=True)
class _Buffer:
    """Memory that an array, or the quantised form of rows, takes while nodes [first, last] of the graph run."""

    address: int
    """Address of the array while it has no memory; 0 for a quantised form."""
    num_bytes: int
    first: int = -1
    """-1: no node writes or reads it."""
    last: int = -1
    start: int = 0
    """Its offset in the workspace."""

    def use(self, index: int) -> None:
        """The node with this index writes or reads it."""
        if self.first < 0:
            self.first = index
        self.last = index


@dataclass(slots=True)
class Node:
    """An operation, to become a command. Fields are those of the struct of the same name in cpu/command.h."""

    record: str
    output: Array
    """float32 [rows, width], or another array that the operation writes."""
    reads: dict[str, Array | None]
    """Arrays that it reads as they are, by field; None for one that is left out."""
    numbers: dict[str, float]
    """Fields that are numbers, and addresses of memory that is not the graph's."""
    rows_of_bytes: Array | None = None
    """An array of which it reads the quantised form."""
    can_quantise: bool = False
    """Whether it can make the quantised form of the output's rows."""
    needs_floats: bool = True
    """Whether it writes the output as floats even if nobody reads them."""

    source: Node | None = None
    """Found later: the node that makes the quantised form it reads."""
    made: _Buffer | None = None
    """Found later: where it puts the quantised form of its output, if that is read."""


class UnplacedArrays:
    """Makes arrays that have addresses of their own but no memory, and knows them again by address.

    They can be looked at: they are read-only, and full of zeros. What is computed from that means nothing.
    """

    def __init__(self) -> None:
        self.buffers: list[_Buffer] = []
        self._starts: list[int] = []
        """Address of each buffer's array, ascending."""
        self._region: Array = np.empty(0, np.uint8)
        """Addresses that the system has set aside; a page of them takes memory only if it is looked at."""
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """An array of this shape, to be given memory later if an operation writes it."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        size = max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT  # also an empty array has an address that no other has
        if self._used + size > self._region.size:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._region = np.frombuffer(mmap.mmap(-1, max(size, REGION_BYTES), flags, mmap.PROT_READ), np.uint8)
            self._used = 0
        raw = self._region[self._used : self._used + num_bytes]
        start = address(self._region) + self._used
        self._used += size
        index = bisect_right(self._starts, start)
        self._starts.insert(index, start)
        self.buffers.insert(index, _Buffer(start, num_bytes))
        return raw.view(dtype).reshape(shape)

    def find(self, array: Array) -> _Buffer | None:
        """What an array, or a view of one, was made with; None if it has memory."""
        if not self.buffers:
            return None  # spares looking up the address, which takes microseconds
        start = address(array)
        index = bisect_right(self._starts, start) - 1
        if index < 0 or start - self._starts[index] >= max(1, self.buffers[index].num_bytes):
            return None
        return self.buffers[index]


class Graph:
    """Nodes in the order in which they run, the arrays without memory that they use, and what they compute."""

    def __init__(self, nodes: list[Node], arrays: UnplacedArrays, output: Array) -> None:
        self._arrays = arrays
        self._output = output
        self._nodes = self._with_quantised(nodes)
        self._find_readers()
        self.num_bytes = self._allocate()
        """Size of the workspace that it needs."""

    def _with_quantised(self, recorded: list[Node]) -> list[Node]:
        """Each node that reads a quantised form gets its source: the node that makes the floats, or one more."""
        # An array may be written to after it was made, so what counts is who wrote it last.
        writers: dict[int, Node] = {}
        nodes: list[Node] = []
        for node in recorded:
            x = node.rows_of_bytes
            if x is not None:
                source = writers.get(self._key(x))
                if source is None or not source.can_quantise or not _is_same(source.output, x):
                    source = _quantise(x)
                    nodes.append(source)
                node.source = source
            nodes.append(node)
            writers[self._key(node.output)] = node
        return nodes

    def _find_readers(self) -> None:
        """Find out from when until when floats and quantised forms must exist."""
        for index, node in enumerate(self._nodes):
            for array in node.reads.values():
                self._use(array, index)
            if node.source is not None:
                if node.source.made is None:
                    node.source.made = _Buffer(0, _quantised_parts(node.source.output)[-1])
                node.source.made.use(index)
            if node.needs_floats:
                self._use(node.output, index)
        self._use(self._output, len(self._nodes))
        for index, node in enumerate(self._nodes):
            buffer = self._arrays.find(node.output)
            if buffer is not None and buffer.first >= 0:
                buffer.first = min(buffer.first, index)
            if node.made is not None:
                node.made.first = index

    def _use(self, array: Array | None, index: int) -> None:
        buffer = None if array is None else self._arrays.find(array)
        if buffer is not None:
            buffer.use(index)

    def _key(self, array: Array) -> int:
        """Names the memory that an array is, or will be, part of."""
        buffer = self._arrays.find(array)
        return address(array) if buffer is None else buffer.address

    def _allocate(self) -> int:
        """First fit, in the order in which the nodes run."""
        used = [buffer for buffer in self._arrays.buffers if buffer.first >= 0]
        used += [node.made for node in self._nodes if node.made is not None]
        begins: list[list[_Buffer]] = [[] for _ in range(len(self._nodes) + 1)]
        ends: list[list[_Buffer]] = [[] for _ in range(len(self._nodes) + 1)]
        for buffer in used:
            begins[buffer.first].append(buffer)
            ends[buffer.last].append(buffer)
        places = Places(ENDLESS, ALIGNMENT)
        for beginning, ending in zip(begins, ends, strict=True):
            for buffer in beginning:
                buffer.start = places.take(buffer.num_bytes)
            for buffer in ending:
                places.give_back(buffer.start, buffer.num_bytes)
        return places.highest

    def encode(self, workspace: int) -> bytes:
        """The commands, for a workspace of `num_bytes` at this address."""
        return b"".join(self._encode(node, workspace).ljust(_kernels.COMMAND_BYTES, b"\0") for node in self._nodes)

    def _encode(self, node: Node, workspace: int) -> bytes:
        values: dict[str, float] = {"rows": len(node.output), **node.numbers}
        for name, array in node.reads.items():
            values[name] = 0 if array is None else self._place(array, workspace)
        values["output"] = self._place(node.output, workspace)
        record = RECORDS[node.record]
        if "made.q" in record.fields:
            values.update(_quantised_fields("made", node, workspace))
        if "quantised.q" in record.fields:
            values.update(_quantised_fields("quantised", node.source, workspace))
        return record.pack(values)

    def _place(self, array: Array, workspace: int) -> int:
        """Where an array is while the commands run; 0 if it is not made."""
        start, buffer = address(array), self._arrays.find(array)
        if buffer is None:
            return start
        return workspace + buffer.start + start - buffer.address if buffer.first >= 0 else 0

    def result(self, workspace: Array) -> Array:
        """The output, in the workspace that the commands were encoded for."""
        x, buffer = self._output, self._arrays.find(self._output)
        if buffer is None:
            return x
        offset = self._place(x, 0)
        return np.ndarray(x.shape, x.dtype, workspace.data, offset, x.strides)


def address(array: Array) -> int:
    """The address of an array's first element."""
    start: int = array.__array_interface__["data"][0]
    return start


def _is_same(one: Array, other: Array) -> bool:
    """Whether both are the same part of memory, and look at it the same way."""
    return address(one) == address(other) and one.shape == other.shape and one.strides == other.strides


def _quantise(x: Array) -> Node:
    """An operation of its own that makes the quantised form of x."""
    numbers = {"width": x.shape[1], "stride": x.strides[0] // 4}
    return Node("Quantise", x, {"input": x}, numbers, can_quantise=True, needs_floats=False)


def _quantised_parts(x: Array) -> tuple[int, int, int, int]:
    """Offsets of q, scale and sum in the quantised form of x, and bytes of the whole."""
    rows, width = x.shape
    bytes_ = -(-rows * width // ALIGNMENT) * ALIGNMENT
    numbers = -(-rows * (width // GROUP) * 4 // ALIGNMENT) * ALIGNMENT
    return 0, bytes_, bytes_ + numbers, bytes_ + 2 * numbers


def _quantised_fields(name: str, node: Node | None, workspace: int) -> dict[str, int]:
    """A `Quantised` of cpu/command.h: the form that a node makes, or none."""
    q = scale = total = 0
    if node is not None and node.made is not None:
        q, scale, total = (workspace + node.made.start + part for part in _quantised_parts(node.output)[:3])
    return {f"{name}.q": q, f"{name}.scale": scale, f"{name}.sum": total}
