"""CommandRunner: runs commands of the C kernels (the folder cpu/), each at once, or those of a forward pass together.

A command is a record of addresses and sizes. Inside `replay` the commands of a whole forward pass are recorded and run
in one call, without the GIL; a step of a size seen before runs the same commands again, so that Python's share of a
step does not grow with the number of layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.errors import DeviceError
from minipaged.ops.base import Batch
from minipaged.ops.cpu import _kernels
from minipaged.ops.cpu.packing import GROUP
from minipaged.ops.cpu.workspace import Span, Workspace, WorkspaceFullError
from minipaged.ops.reference.numpy_ops import Array

MAX_RECORDED = 256
"""Recorded passes that are kept, one for each number of tokens and of rows that sample; some 60 kB each."""

WORKSPACE_BYTES = 1 << 20
"""At first: it grows."""


class Op(IntEnum):
    """What a command does; as in cpu/command.h."""

    EMBED = 0
    RMS_NORM = 1
    QUANTISE = 2
    LINEAR = 3
    GATED_LINEAR = 4
    ROPE_CACHE = 5
    ATTENTION = 6
    TAKE = 7
    SAMPLE = 8


COMMAND_DTYPE = np.dtype(
    [
        *((name, np.int32) for name in ("op", "kind", "rows", "in", "out", "in_stride")),
        *((name, np.int32) for name in ("num_query_heads", "num_kv_heads", "head_dim", "block_size", "window")),
        *((name, np.float32) for name in ("eps", "scale")),
        *((name, np.uint64) for name in ("input", "second", "weight", "bias", "third", "output", "extra", "scratch")),
        *((name, np.int64) for name in ("keys", "values", "block_stride", "key_head_stride", "value_head_stride")),
        *((name, np.uint64) for name in ("q", "q_scale", "q_sum", "made_q", "made_scale", "made_sum", "batch")),
    ],
    align=True,
)
"""`Command` of cpu/command.h."""

HEADER_FIELDS = ("token_ids", "positions", "kv_extents", "slots", "cu_seqlens", "rows", "block_tables", "sampled")
"""`BatchHeader` of cpu/command.h: these addresses, then the tables' width and the number of sequences."""

COMMAND_FIELDS = COMMAND_DTYPE.names or ()

Command = dict[str, int | float]
"""Fields of a command; those left out are 0."""
Commands = NDArray[np.void]
Function = Callable[[Batch[Array]], Array]


@dataclass(frozen=True, slots=True)
class Quantised:
    """Activations in 8 bits: x = scale * q; `sum` is scale times the sum of a group's q."""

    q: Array
    scale: Array
    sum: Array

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the three."""
        return address(self.q), address(self.scale), address(self.sum)


@dataclass(slots=True)
class _Product:
    """The command that makes rows, as floats at `address`, in quantised form, or both: whatever turns out to be read.

    Places for both are taken together: what is free later may be in use when the command runs.
    """

    command: Command
    address: int
    quantised: Quantised


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A forward pass that can be run again."""

    commands: Commands
    output: Array


class CommandRunner:
    """A team of threads, the memory that recorded commands share, and the passes recorded so far.

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
        self._header = np.zeros(len(HEADER_FIELDS) + 2, np.uint64)
        self._workspace = Workspace(WORKSPACE_BYTES)
        self._recording: list[Command] | None = None
        self._recorded: dict[tuple[Function, int, int], _Recorded] = {}
        self._batch: Batch[Array] | None = None

    def close(self) -> None:
        """Forget the recorded passes; threads end when the last reference to this object does."""
        self._recorded.clear()
        self._workspace = Workspace(WORKSPACE_BYTES)

    # Whole passes

    def replay(self, function: Function, batch: Batch[Array]) -> Array:
        """`function(batch)`, recorded and run in one call."""
        key = (function, len(batch.token_ids), len(batch.sampled))
        recorded = self._recorded.pop(key, None) or self._record(function, batch)
        self._recorded[key] = recorded  # the latest last
        if len(self._recorded) > MAX_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        self._fill_header(batch)
        self._run(recorded.commands)
        return recorded.output

    def _record(self, function: Function, batch: Batch[Array]) -> _Recorded:
        while True:
            self._workspace.reset()
            commands: list[Command] = []
            self._recording = commands
            self._batch = batch
            try:
                output = function(batch)
                self.read(output)
                return _Recorded(_as_array(commands), output)
            except WorkspaceFullError:
                self._recorded.clear()  # they point into the memory that is about to be replaced
                self._workspace.grow()
            finally:
                self._recording = self._batch = None

    def _run(self, commands: Commands) -> None:
        started = time.perf_counter()
        _kernels.run(self._team, self.instruction_set, commands)
        self.kernel_seconds += time.perf_counter() - started

    # What an operation is made of

    @property
    def is_recording(self) -> bool:
        """Whether commands are recorded, not run at once."""
        return self._recording is not None

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An array for what a command makes."""
        return np.empty(shape, dtype) if self._recording is None else self._workspace.take(shape, dtype)

    def emit(self, output: Array, **fields: int | float) -> Command:
        """A command that makes `output`: recorded, or run at once."""
        command: Command = {"output": address(output), **fields}
        if self._recording is None:
            self._run(_as_array([command]))
        else:
            self._recording.append(command)
        return command

    def emit_rows(self, output: Array, **fields: int | float) -> Array:
        """Likewise for operations that can quantise the rows they make; recorded, they write floats only if read."""
        rows, width = output.shape
        command = self.emit(output, **fields)
        span = _span(output)
        if self._recording is not None and span is not None and width % GROUP == 0:
            span.companion = _Product(command, address(output), self._empty_quantised(rows, width))
            command["output"] = 0
        return output

    def read(self, x: Array) -> int:
        """The address of floats, which must be there when a command reads them."""
        product = _product(x)
        if product is not None:
            product.command["output"] = product.address
        return address(x)

    def quantise(self, x: Array) -> Quantised:
        """The quantised form of x, made by the command that makes x if there is one that can."""
        product = _product(x)
        if product is not None and product.quantised.q.shape == x.shape:  # the whole of it
            product.command.update(_made_fields(product.quantised))
            return product.quantised
        rows, width = x.shape
        quantised = self._empty_quantised(rows, width)
        fields = {"op": Op.QUANTISE, "rows": rows, "in": width, "input": self.read(x), "in_stride": x.strides[0] // 4}
        self.emit(quantised.q, **fields, **_made_fields(quantised))
        return quantised

    def _empty_quantised(self, rows: int, width: int) -> Quantised:
        groups = (rows, width // GROUP)
        return Quantised(self.empty((rows, width), np.int8), self.empty(groups), self.empty(groups))

    def header(self, batch: Batch[Array]) -> int:
        """Address of the header, which describes this batch when the command runs."""
        if self._recording is None:
            self._fill_header(batch)
        else:
            assert batch is self._batch, "a recorded function used another batch"
        return address(self._header)

    def header_with(self, name: str, array: Array) -> int:
        """Likewise where a command reads one array of the batch alone, which the operation is given."""
        if self._recording is None:
            self._header[HEADER_FIELDS.index(name)] = address(array)
        else:
            assert array is getattr(self._batch, name), (
                f"a recorded function used an array that is not the batch's {name}"
            )
        return address(self._header)

    def _fill_header(self, batch: Batch[Array]) -> None:
        addresses = [address(getattr(batch, name)) for name in HEADER_FIELDS]
        self._header[:] = [*addresses, batch.block_tables.shape[1], len(batch.rows)]


def address(array: Array) -> int:
    """Where its elements begin."""
    start: int = array.__array_interface__["data"][0]
    return start


def _as_array(commands: list[Command]) -> Commands:
    return np.array([tuple(command.get(name, 0) for name in COMMAND_FIELDS) for command in commands], COMMAND_DTYPE)


def _span(array: Array) -> Span | None:
    """The piece of workspace that an array lies in."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Span) else None


def _product(array: Array) -> _Product | None:
    """How an array is made, if it is recorded rows."""
    span = _span(array)
    return span.companion if span is not None and isinstance(span.companion, _Product) else None


def _made_fields(quantised: Quantised) -> dict[str, int]:
    q, scale, total = quantised.addresses
    return {"made_q": q, "made_scale": scale, "made_sum": total}
