"""Launches of the simple kernels, as the backend does them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from minipaged.kv.layout import grouped_query_layout
from minipaged.ops.cuda import launches
from minipaged.ops.cuda.launches import Launch
from tests.ops.cuda.emulated import Argument, Execution, Kernel, load
from tests.ops.cuda.kv_layouts import KV_TYPES
from tests.ops.cuda.toolchain import CUDA

Array = NDArray[np.generic]

ELEMENTS: dict[str, DTypeLike] = {"__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16, "float": np.float32}
"""By the type's name in C++."""


def poisoned(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """What a kernel must overwrite: NaN in every floating-point type."""
    return np.full(np.prod(shape, dtype=int) * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)


def vectors_of(dtype: DTypeLike) -> int:
    """Elements in 16 bytes."""
    return 16 // np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Kernels:
    """The kernels for one element type."""

    element: str
    execution: Execution = field(default_factory=Execution)
    checked: bool = False

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(ELEMENTS[self.element])

    def kernel(self, name: str, *options: str) -> Kernel:
        module = load(CUDA / f"{name}.cu", (f"-DELEMENT={self.element}", *options), checked=self.checked)
        return module.kernels[name]

    def run(self, kernel: Kernel, launch: Launch, arguments: Sequence[Argument]) -> None:
        kernel(launch.grid, (launch.threads,), arguments, launch.shared_bytes, execution=self.execution)

    def embed(self, table: Array, indices: NDArray[np.int32]) -> Array:
        out = poisoned((len(indices), table.shape[1]), self.dtype)
        arguments = (table, indices, out, np.int32(table.shape[1]))
        self.run(self.kernel("embed"), launches.embed(len(indices)), arguments)
        return out

    def rms_norm(self, x: Array, weight: NDArray[np.float32], eps: float) -> Array:
        num_tokens, size = x.shape
        out = poisoned(x.shape, self.dtype)
        arguments = (x, weight, out, np.int32(size), np.float32(eps))
        self.run(self.kernel("rms_norm"), launches.rms_norm(num_tokens, size, self.dtype.itemsize), arguments)
        return out

    def rope_and_cache(
        self,
        qkv: Array,
        rope: NDArray[np.float32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int64],
        cache: Array,
        layer: int,
        num_query_heads: int,
        norms: tuple[NDArray[np.float32], NDArray[np.float32], float] | None,
    ) -> Array:
        """`rope` is [max_model_len, head_dim / 2, 2].

        `cache` is [num_blocks, num_layers, K and V, num_kv_heads, block_size, head_dim].
        """
        _, num_layers, _, num_kv_heads, block_size, head_dim = cache.shape
        num_tokens, num_heads = len(qkv), num_query_heads + 2 * num_kv_heads
        query = poisoned((num_tokens, num_query_heads, head_dim), self.dtype)
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        layout = grouped_query_layout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            element_type=KV_TYPES[self.element],
        )
        arguments = (
            *(qkv, rope, positions, slots, q_norm, k_norm, query, cache),
            *map(np.int32, (num_query_heads, num_kv_heads, block_size)),
            *launches.kv_strides(layout, layer),
            np.float32(eps),
        )
        kernel = self.kernel("rope_and_cache", f"-DHEAD_DIM={head_dim}")
        self.run(kernel, launches.rope_and_cache(num_tokens, num_heads), arguments)
        return query

    def take(self, x: NDArray[np.float32], indices: NDArray[np.int32]) -> NDArray[np.float32]:
        words = x.shape[1]
        out = np.zeros((len(indices), words), np.int32)
        arguments = (x.view(np.int32), indices, out, np.int32(words))
        self.run(self.kernel("take"), launches.take(len(indices), words), arguments)
        return out.view(np.float32)

    def update_tables(self, tables: NDArray[np.int32], places: NDArray[np.int64], blocks: NDArray[np.int32]) -> None:
        """In place."""
        arguments = (tables, places, blocks, np.int32(len(places)))
        self.run(self.kernel("update_tables"), launches.update_tables(len(places)), arguments)

    def copy_blocks(self, cache: Array, pairs: NDArray[np.int32]) -> None:
        """In place."""
        vectors = cache[0].nbytes // 16
        # The kernel knows no element type; its pointer is to 16-byte vectors.
        arguments = (cache, pairs, np.int32(vectors))
        self.run(self.kernel("copy_blocks"), launches.kv_blocks(len(pairs), vectors), arguments)

    def fill_blocks(self, cache: Array, blocks: NDArray[np.int32], value: float) -> None:
        """In place."""
        vectors = cache[0].nbytes // 16
        arguments = (cache, blocks, np.float32(value), np.int32(vectors))
        self.run(self.kernel("fill_blocks"), launches.kv_blocks(len(blocks), vectors), arguments)
