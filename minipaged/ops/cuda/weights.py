"""Matrices from the mapped file to the device: converted piece by piece in page-locked buffers, and copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.errors import ModelLoadError
from minipaged.ops.cuda.memory import CudaMemory
from minipaged.ops.cuda.staging import Staging
from minipaged.ops.tensor import HostTensor

if TYPE_CHECKING:
    import cupy

STORED_AS = {"float16": "F16", "bfloat16": "BF16"}
"""`HostTensor.encoding` of each element type."""

HOST_TYPES: dict[str, DTypeLike] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
DEVICE_TYPES: dict[str, DTypeLike] = {"float16": np.float16, "bfloat16": np.uint16}
"""CuPy before version 14 knows no bfloat16; only the kernels need to."""


class WeightLoader:
    """Loads matrices of one element type."""

    def __init__(self, memory: CudaMemory, staging: Staging, element: str) -> None:
        self._memory = memory
        self._staging = staging
        self._element = element

    def stacked(self, tensors: Sequence[HostTensor]) -> cupy.ndarray:
        """[out_i, in] along their rows, [sum of out_i, in]. Raises `ModelLoadError`: a weight is out of range."""
        rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        matrix = self._allocate(rows, columns, tensors[0])
        row_bytes, first = 2 * columns, 0
        for tensor in tensors:
            step = self._rows_at_a_time(row_bytes)
            for start in range(0, tensor.shape[0], step):
                count = min(step, tensor.shape[0] - start)
                self._convert(tensor, start, self._buffer(count * row_bytes).reshape(count, row_bytes))
                self._staging.send(matrix.data.ptr + (first + start) * row_bytes, count * row_bytes)
            first += tensor.shape[0]
        return matrix

    def interleaved(self, first: HostTensor, second: HostTensor) -> cupy.ndarray:
        """[rows, in] each -> [2 rows, in]: the first's row i is row 2 i, the second's row 2 i + 1."""
        rows, columns = first.shape
        matrix = self._allocate(2 * rows, columns, first)
        row_bytes = 2 * columns
        step = self._rows_at_a_time(2 * row_bytes)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            pairs = self._buffer(2 * count * row_bytes).reshape(count, 2, row_bytes)
            self._convert(first, start, pairs[:, 0])
            self._convert(second, start, pairs[:, 1])
            self._staging.send(matrix.data.ptr + 2 * start * row_bytes, pairs.nbytes)
        return matrix

    def _allocate(self, rows: int, columns: int, tensor: HostTensor) -> cupy.ndarray:
        return self._memory.allocate((rows, columns), DEVICE_TYPES[self._element], f"the weight {tensor.name}")

    def _rows_at_a_time(self, row_bytes: int) -> int:
        step = self._staging.num_bytes // row_bytes
        assert step, f"a row of {row_bytes} bytes does not fit a buffer of {self._staging.num_bytes}"
        return step

    def _buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        return self._staging.buffer()[:num_bytes]

    def _convert(self, tensor: HostTensor, start: int, target: NDArray[np.uint8]) -> None:
        """Rows from `start` on, as many as the target [rows, bytes per row] has."""
        rows = tensor.rows[start : start + len(target)]
        if tensor.encoding == STORED_AS[self._element]:
            target[:] = rows
            return
        decoded = tensor.decode(rows)
        with np.errstate(over="ignore"):
            converted = decoded.astype(HOST_TYPES[self._element])
        if not np.isfinite(converted).all() and np.isfinite(decoded).all():
            raise ModelLoadError(
                f"The weight {tensor.name} holds {np.abs(decoded).max():g}, more than {self._element} can; "
                'give dtype="bfloat16".'
            )
        target[:] = converted.view(np.uint8)
