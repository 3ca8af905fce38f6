"""StepBuffer: the arrays that describe a step, at fixed addresses on the device, brought there by one copy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.ops.base import Batch, HostArray, StepLimits
from minipaged.ops.cuda import launches
from minipaged.ops.cuda.kernels import CudaKernels
from minipaged.ops.cuda.memory import CudaMemory
from minipaged.ops.cuda.staging import Staging

if TYPE_CHECKING:
    import cupy

ALIGNMENT = 16
MOST_CHANGES = 2**14
"""Entries of block tables that travel with a step; more go ahead of it, in several copies."""

STEPS_UNDER_WAY = 4
"""Whose descriptions may wait to be copied, before the host waits too."""

FIELDS: tuple[tuple[str, DTypeLike], ...] = (
    ("slots", np.int64),
    ("token_ids", np.int32),
    ("positions", np.int32),
    ("kv_extents", np.int32),
    ("cu_seqlens", np.int32),
    ("rows", np.int32),
    ("sampled", np.int32),
    ("next_positions", np.uint32),
)

Sizes = tuple[int, int, int]
"""How many tokens a step has, how many sequences, and how many of these sample."""


@dataclass(frozen=True, slots=True)
class DevicePart:
    """What the host must know of a batch on the device to launch kernels: its `Batch.device_part`."""

    cu_seqlens: NDArray[np.int32]
    num_splits: int
    """How many splits of `CudaKernels.kv_split` positions the longest sequence has, or more."""
    padded: Batch[cupy.ndarray] | None = None
    """The same decode, filled up to the size of a graph, if that was asked for."""


def device_part(batch: Batch[cupy.ndarray]) -> DevicePart:
    """The device part of a batch that `StepBuffer` made, or of a copy of one."""
    assert isinstance(batch.device_part, DevicePart), "the batch was not uploaded"
    return batch.device_part


class StepBuffer:
    """Holds one step at a time: the next one's copy waits for the kernels of this one.

    Block tables have a row more than there may be sequences, for the tokens that fill up a decode: these are token 0 at
    position 0 of a block that nobody owns.
    """

    def __init__(
        self,
        memory: CudaMemory,
        kernels: CudaKernels,
        stream: cupy.cuda.Stream,
        limits: StepLimits,
        block_size: int,
    ) -> None:
        self._memory = memory
        self._kernels = kernels
        self._block_size = block_size
        self.limits = limits
        self._width = -(-limits.max_model_len // block_size)
        self.most_splits = -(-limits.max_model_len // kernels.kv_split)
        """That a sequence can have."""
        largest = (limits.max_tokens, limits.max_sequences, limits.max_sequences)
        num_bytes = _layout(largest, MOST_CHANGES).num_bytes
        self._staging = Staging(memory, stream, num_bytes=num_bytes, num_buffers=STEPS_UNDER_WAY)
        self._buffer = memory.allocate((num_bytes,), np.uint8, "the description of a step")
        self._tables = memory.allocate((limits.max_sequences + 1, self._width), np.int32, "block tables")
        self._staging.send_array(self._tables.data.ptr, np.full(self._tables.shape, -1, np.int32))
        self._scratch_block = 0
        self._decodes: dict[tuple[int, int], tuple[Batch[cupy.ndarray], Batch[cupy.ndarray]]] = {}

    def use_scratch_block(self, block: int) -> None:
        """Set the block into which the tokens that fill up a decode write their KV."""
        self._scratch_block = block
        last_row = self._tables.data.ptr + self.limits.max_sequences * self._width * self._tables.itemsize
        self._staging.send_array(last_row, np.array([block], np.int32))

    def of_size(self, sizes: Sizes) -> Batch[cupy.ndarray]:
        """A step of that size with the longest sequences, to see what it takes; its arrays hold nothing."""
        num_tokens, num_sequences, _ = sizes
        starts = np.minimum(np.arange(num_sequences + 1, dtype=np.int32), num_tokens)
        starts[-1] = num_tokens
        return replace(self._views(sizes, _layout(sizes, 0)), device_part=DevicePart(starts, self.most_splits))

    def send(self, batch: Batch[HostArray], changed: NDArray[np.int64], padded_size: int | None) -> Batch[cupy.ndarray]:
        """Start the copy, and update the block tables when it has arrived. `padded_size`: of a decode, or None."""
        num_tokens, num_sequences, num_sampled = sizes = (len(batch.token_ids), len(batch.rows), len(batch.sampled))
        assert num_tokens <= self.limits.max_tokens, f"{num_tokens} tokens in a step"
        assert num_sequences <= self.limits.max_sequences, f"{num_sequences} sequences in a step"
        arrays = {name: np.asarray(getattr(batch, name), dtype) for name, dtype in FIELDS}
        num_splits = -(-int(arrays["kv_extents"].max()) // self._kernels.kv_split)
        cu_seqlens = arrays["cu_seqlens"].astype(np.int32, copy=False)
        if padded_size is None:
            self._send(arrays, sizes, *self._changes(batch.block_tables, changed))
            return replace(self._views(sizes, _layout(sizes, 0)), device_part=DevicePart(cu_seqlens, num_splits))

        assert num_tokens == num_sequences == num_sampled <= padded_size, f"{sizes} is no decode of {padded_size}"
        arrays = self._padded(arrays, padded_size)
        padded_sizes = (padded_size, padded_size, padded_size)
        self._send(arrays, padded_sizes, *self._changes(batch.block_tables, changed))
        if (num_tokens, padded_size) not in self._decodes:
            layout = _layout(padded_sizes, 0)
            self._decodes[num_tokens, padded_size] = self._views(sizes, layout), self._views(padded_sizes, layout)
        exact, padded = self._decodes[num_tokens, padded_size]
        padded_splits = min(1 << (num_splits - 1).bit_length(), self.most_splits)  # few values, few graphs
        padded_starts = np.arange(padded_size + 1, dtype=np.int32)
        padded = replace(padded, device_part=DevicePart(padded_starts, padded_splits))
        return replace(exact, device_part=DevicePart(cu_seqlens, num_splits, padded))

    def _changes(self, tables: HostArray, changed: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Places in the device's tables, and what they hold now; what is too much for one copy has gone ahead."""
        assert tables.shape[0] <= self.limits.max_sequences, f"{tables.shape[0]} block tables"
        assert tables.shape[1] <= self._width, f"block tables of {tables.shape[1]} columns"
        rows, columns = np.divmod(changed, tables.shape[1])
        places, blocks = rows * self._width + columns, tables.reshape(-1)[changed].astype(np.int32)
        while len(places) > MOST_CHANGES:
            self._send({}, (0, 0, 0), places[:MOST_CHANGES], blocks[:MOST_CHANGES])
            places, blocks = places[MOST_CHANGES:], blocks[MOST_CHANGES:]
        return places, blocks

    def _send(
        self,
        arrays: dict[str, NDArray[np.generic]],
        sizes: Sizes,
        places: NDArray[np.int64],
        blocks: NDArray[np.int32],
    ) -> None:
        layout = _layout(sizes, len(places))
        staged = self._staging.buffer()
        for name, offset in layout.offsets.items():
            if name in arrays:
                put(staged, offset, arrays[name])
        put(staged, layout.places, places)
        put(staged, layout.blocks, blocks)
        self._staging.send(self._buffer.data.ptr, layout.num_bytes)
        if len(places):
            arguments = (
                self._tables,
                self._view(layout.places, len(places), np.int64),
                self._view(layout.blocks, len(places), np.int32),
                np.int32(len(places)),
            )
            self._kernels.start("update_tables", launches.update_tables(len(places)), arguments)

    def _padded(self, arrays: dict[str, NDArray[np.generic]], size: int) -> dict[str, NDArray[np.generic]]:
        count = size - len(arrays["rows"])
        filling = np.arange(size - count, size)
        slots = np.arange(count) % self._block_size  # no two write to the same place, if it has as many
        fill = {
            "slots": self._scratch_block * self._block_size + slots,
            "token_ids": np.zeros(count),
            "positions": np.zeros(count),
            "kv_extents": np.ones(count),
            "cu_seqlens": filling + 1,
            "rows": np.full(count, self.limits.max_sequences),
            "sampled": filling,
            "next_positions": np.zeros(count),
        }
        return {name: np.concatenate([arrays[name], fill[name].astype(dtype)]) for name, dtype in FIELDS}

    def _views(self, sizes: Sizes, layout: _Layout) -> Batch[cupy.ndarray]:
        views = {
            name: self._view(layout.offsets[name], count, dtype)
            for (name, dtype), count in zip(FIELDS, _counts(sizes), strict=True)
        }
        return Batch(block_tables=self._tables, **views)

    def _view(self, offset: int, count: int, dtype: DTypeLike) -> cupy.ndarray:
        return self._memory.array(self._buffer.data.ptr + offset, (count,), dtype, None)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where in the buffer the arrays of a step begin."""

    offsets: dict[str, int]
    places: int
    blocks: int
    num_bytes: int


def _layout(sizes: Sizes, num_changes: int) -> _Layout:
    offsets: dict[str, int] = {}
    end = 0
    for (name, dtype), count in zip(FIELDS, _counts(sizes), strict=True):
        offsets[name] = end
        end = aligned(end + count * np.dtype(dtype).itemsize)
    blocks = aligned(end + num_changes * 8)
    return _Layout(offsets, end, blocks, blocks + num_changes * 4)


def _counts(sizes: Sizes) -> tuple[int, ...]:
    """Elements of each of FIELDS."""
    num_tokens, num_sequences, num_sampled = sizes
    return num_tokens, num_tokens, num_tokens, num_tokens, num_sequences + 1, num_sequences, num_sampled, num_sampled


def aligned(offset: int) -> int:
    """The next place where an array may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def put(buffer: NDArray[np.uint8], offset: int, array: NDArray[np.generic]) -> None:
    """An array, into a buffer of bytes."""
    buffer[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
