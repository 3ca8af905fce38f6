"""Kernels on the CPU: compile CUDA source for the emulator, launch kernels on NumPy arrays as CuPy would.

One launch at a time in a process.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import math
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.ops.cuda.compiler import compile_source

Argument = NDArray[np.generic] | np.generic | bool | int | float | None

DTYPES = {
    "6__half": np.dtype(np.float16),
    "13__nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "f": np.dtype(np.float32),
    "d": np.dtype(np.float64),
    "b": np.dtype(np.bool_),
    "c": np.dtype(np.int8),
    "a": np.dtype(np.int8),
    "h": np.dtype(np.uint8),
    "s": np.dtype(np.int16),
    "t": np.dtype(np.uint16),
    "i": np.dtype(np.int32),
    "j": np.dtype(np.uint32),
    "l": np.dtype(np.int64),
    "m": np.dtype(np.uint64),
    "x": np.dtype(np.int64),
    "y": np.dtype(np.uint64),
}
"""By the name that g++ gives a C++ type."""

DEFAULT_SHARED_LIMIT = 48 << 10
"""Bytes of dynamic shared memory that need no opt-in."""
REPORT_BYTES = 64 << 10


class EmulatorFault(Exception):
    """A kernel did what it must not do. `faults` describes each, with its place in the source."""

    def __init__(self, kernel: str, faults: Sequence[str]) -> None:
        super().__init__("\n".join([f"{kernel}:", *faults]))
        self.faults = tuple(faults)


class Order(enum.IntEnum):
    """In which order blocks, and the threads of a block that can run, do run."""

    FORWARD = 0
    REVERSE = 1
    SHUFFLED = 2


@dataclass(frozen=True, slots=True)
class Execution:
    """How a launch runs."""

    order: Order = Order.FORWARD
    seed: int = 1
    """Of the shuffled order."""
    num_last_blocks: int | None = None
    """So many blocks at the grid's end alone run, of arrays too large to be computed whole; None: all."""
    cpu_seconds: float = 60.0
    """After so much time of the processor the launch is a fault: a kernel that waits for ever would hang the tests."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device memory that a kernel may touch."""

    address: int
    size: int
    """In bytes."""
    name: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of a kernel, from its C++ type."""

    size: int
    """In bytes."""
    kind: str
    """ "pointer", "signed", "unsigned", "float", "bool" or "struct"."""
    type: str
    """As g++ names it; of a pointer, what it points to."""


class _ParameterStruct(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint), ("kind", ctypes.c_char_p), ("type", ctypes.c_char_p))


class _KernelStruct(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("num_parameters", ctypes.c_uint),
        ("parameters", ctypes.POINTER(_ParameterStruct)),
        ("most_threads", ctypes.c_uint),
    )


class _AllocationStruct(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_size_t), ("size", ctypes.c_size_t), ("name", ctypes.c_char_p))


class _LaunchStruct(ctypes.Structure):
    """`Launch` in emulator/block.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("first_block", ctypes.c_size_t),
        ("end_block", ctypes.c_size_t),
        ("dynamic_shared", ctypes.c_size_t),
        ("shared_limit", ctypes.c_size_t),
        ("order", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
        ("cpu_seconds", ctypes.c_double),
        ("checks", ctypes.c_uint),
        ("allocations", ctypes.POINTER(_AllocationStruct)),
        ("num_allocations", ctypes.c_size_t),
        ("stacks", ctypes.POINTER(ctypes.c_void_p)),
        ("report", ctypes.c_char_p),
        ("report_size", ctypes.c_size_t),
        ("shared_used", ctypes.c_size_t),
    )


class Module:
    """Compiled CUDA source; `checked` compiles it for check mode."""

    def __init__(self, source: str, name: str, options: Sequence[str] = (), *, checked: bool = False) -> None:
        self.checked = checked
        self._path = compile_source(source, name, options, checked=checked)
        self._library = ctypes.CDLL(str(self._path))
        self._library.emulator_kernels.restype = ctypes.POINTER(_KernelStruct)
        self.kernels: dict[str, Kernel] = {}
        table = self._library.emulator_kernels()
        index = 0
        while table[index].name is not None:
            kernel = Kernel(self, table[index])
            self.kernels[kernel.name] = kernel
            index += 1

    def run(self, kernel: _KernelStruct, arguments: ctypes.Array[ctypes.c_void_p], launch: _LaunchStruct) -> list[str]:
        """The faults of a launch."""
        report = ctypes.create_string_buffer(REPORT_BYTES)
        launch.report = ctypes.cast(report, ctypes.c_char_p)
        launch.report_size = REPORT_BYTES
        launch.checks = self.checked
        if self._library.emulator_launch(ctypes.byref(kernel), arguments, ctypes.byref(launch)) == 0:
            return []
        return [self._with_places(line) for line in report.value.decode().splitlines()]

    def _with_places(self, line: str) -> str:
        return re.sub(r"\{(0x[0-9a-f]+)\}", lambda match: self._place(match[1]), line)

    def _place(self, offset: str) -> str:
        """Lines of the kernel's files, innermost first."""
        command = ["addr2line", "-i", "-e", str(self._path), offset]
        frames = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        places = [frame.split(" ")[0].rpartition("/")[2] for frame in frames]
        return " in ".join(place for place in places if re.search(r"\.cuh?:", place)) or places[0]


class Kernel:
    """One `extern "C" __global__` function."""

    def __init__(self, module: Module, struct: _KernelStruct) -> None:
        self._module = module
        self._struct = struct
        self.name: str = struct.name.decode()
        self.parameters = [
            Parameter(each.size, each.kind.decode(), each.type.decode())
            for each in struct.parameters[: struct.num_parameters]
        ]
        self.most_threads: int = struct.most_threads
        """Of a block, by the kernel's launch bounds."""
        self.max_dynamic_shared_size_bytes = DEFAULT_SHARED_LIMIT
        """To be raised before a launch with more, as on a GPU."""

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Argument],
        shared_mem: int = 0,
        *,
        execution: Execution | None = None,
        allocations: Sequence[Allocation] | None = None,
    ) -> int:
        """Run to completion; returns the bytes of shared memory that a block took.

        `allocations` are what the kernel may touch; None: the arrays among the arguments.

        Raises TypeError for arguments that are not the kernel's, ValueError for a launch that no GPU takes,
        EmulatorFault for what goes wrong while the kernel runs.
        """
        execution = execution or Execution()
        values = self.check(grid, block, arguments, shared_mem)
        pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        if allocations is None:
            allocations = _allocations_of(arguments)
        structs = (_AllocationStruct * max(1, len(allocations)))(
            *[_AllocationStruct(each.address, each.size, each.name.encode()) for each in allocations]
        )
        num_blocks = math.prod(grid)
        launch = _LaunchStruct(
            grid=tuple(_three(grid)),
            block=tuple(_three(block)),
            first_block=max(0, num_blocks - (execution.num_last_blocks or num_blocks)),
            end_block=num_blocks,
            dynamic_shared=shared_mem,
            shared_limit=max(DEFAULT_SHARED_LIMIT, self.max_dynamic_shared_size_bytes),
            order=execution.order,
            seed=execution.seed,
            cpu_seconds=execution.cpu_seconds,
            allocations=structs,
            num_allocations=len(allocations),
            stacks=ctypes.pointer(_stacks()),
        )
        faults = self._module.run(self._struct, pointers, launch)
        if faults:
            raise EmulatorFault(self.name, faults)
        return int(launch.shared_used)

    def check(
        self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Argument], shared_mem: int
    ) -> list[ctypes.Array[ctypes.c_char]]:
        """The arguments as the kernel takes them. Raises what is wrong before the launch."""
        grid, block = _three(grid), _three(block)
        is_block = min(block) >= 1 and math.prod(block) <= self.most_threads and block[2] <= 64
        if not is_block or min(grid) < 1 or grid[0] >= 2**31 or max(grid[1:]) >= 2**16:
            raise ValueError(f"{self.name}: no GPU takes a grid of {grid} blocks of {block} threads")
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise ValueError(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory are more than "
                f"max_dynamic_shared_size_bytes, {self.max_dynamic_shared_size_bytes}"
            )
        return self._marshal(arguments)

    def _marshal(self, arguments: Sequence[Argument]) -> list[ctypes.Array[ctypes.c_char]]:
        if len(arguments) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, not {len(arguments)}")
        return [
            ctypes.create_string_buffer(self._bytes_of(index, argument, parameter), max(8, parameter.size))
            for index, (argument, parameter) in enumerate(zip(arguments, self.parameters, strict=True))
        ]

    def _bytes_of(self, index: int, argument: Argument, parameter: Parameter) -> bytes:
        """What CuPy would pass, if that is what the kernel expects."""
        expected = f"{self.name}: argument {index} must be {_describe(parameter)}, not"
        if argument is None or isinstance(argument, np.ndarray):
            if parameter.kind != "pointer":
                raise TypeError(f"{expected} {'None' if argument is None else f'an array of {argument.dtype}'}")
            if argument is None:
                return bytes(parameter.size)
            if parameter.type in DTYPES and argument.dtype != DTYPES[parameter.type]:
                raise TypeError(f"{expected} an array of {argument.dtype}")
            if not argument.flags.c_contiguous:
                raise TypeError(f"{expected} an array with gaps, of which CuPy would pass only the address")
            return argument.ctypes.data.to_bytes(parameter.size, "little")
        # CuPy passes Python's numbers as 64 bits, whatever the kernel wants.
        if isinstance(argument, bool):
            value: np.generic = np.bool_(argument)
        elif isinstance(argument, int):
            value = np.int64(argument)
        elif isinstance(argument, float) and not isinstance(argument, np.generic):
            value = np.float64(argument)
        else:
            assert isinstance(argument, np.generic)
            value = argument
        kinds = {"i": "signed", "u": "unsigned", "f": "float", "b": "bool", "V": "struct"}
        if kinds[value.dtype.kind] != parameter.kind or value.dtype.itemsize != parameter.size:
            raise TypeError(f"{expected} {value.dtype} {argument!r}")
        return value.tobytes()


@functools.cache
def load(path: Path, options: tuple[str, ...] = (), *, checked: bool = False) -> Module:
    """A kernel file."""
    return Module(path.read_text(encoding="utf-8"), path.name, options, checked=checked)


@functools.cache
def _stacks() -> ctypes.c_void_p:
    """Where the libraries keep the address of the threads' stacks."""
    return ctypes.c_void_p()


def _three(sizes: Sequence[int]) -> list[int]:
    return [*sizes, *[1] * (3 - len(sizes))]


def _describe(parameter: Parameter) -> str:
    name = str(DTYPES.get(parameter.type, parameter.type))
    return f"an array of {name}" if parameter.kind == "pointer" else f"numpy.{name}"


def _allocations_of(arguments: Sequence[Argument]) -> list[Allocation]:
    """Sorted by address; arrays that overlap are one."""
    arrays = sorted(
        (
            Allocation(array.ctypes.data, array.nbytes, f"argument {index} ({array.dtype} {list(array.shape)})")
            for index, array in enumerate(arguments)
            if isinstance(array, np.ndarray)
        ),
        key=lambda allocation: allocation.address,
    )
    merged: list[Allocation] = []
    for array in arrays:
        if merged and array.address < merged[-1].address + merged[-1].size:
            last = merged.pop()
            end = max(last.address + last.size, array.address + array.size)
            array = Allocation(last.address, end - last.address, f"{last.name} and {array.name}")  # noqa: PLW2901
        merged.append(array)
    return merged
