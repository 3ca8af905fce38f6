"""Sequences whose attention is known, through the kernels of cuda/attention.cu and in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from minipaged.ops.cuda.launches import attention_combine, chunk_tile, decode_tile, kv_strides
from tests.batches import shuffled_tables
from tests.ops.cuda.emulated import Argument, Execution, Order, load
from tests.ops.cuda.kv_layouts import KV_TYPES, slots_of, uneven_layout
from tests.ops.cuda.toolchain import CUDA

SPLIT = 64
"""Positions in a split here: small, so that short sequences have several."""

NUM_LAYERS = 2
LAYER = 1
ELEMENTS = {"__half": np.dtype(np.float16), "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOLERANCES = {"__half": 2e-3, "__nv_bfloat16": 1.6e-2}
"""Of weights and results rounded to the type, for values of about 1."""

Array = NDArray[np.generic]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence to compute: positions start to end."""

    row: int
    start: int
    end: int


@dataclass(frozen=True)
class Model:
    """Sequences whose query, key and value are known at every position."""

    element: str
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    lengths: tuple[int, ...]
    window: int | None
    seed: int

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def vectors(self, row: int) -> tuple[Array, Array, Array]:
        """Query [length, num_query_heads, head_dim], key and value [length, num_kv_heads, head_dim]."""
        generator = np.random.default_rng([self.seed, row])
        length = self.lengths[row]
        query = generator.standard_normal((length, self.num_query_heads, self.head_dim))
        key, value = generator.standard_normal((2, length, self.num_kv_heads, self.head_dim))
        dtype = ELEMENTS[self.element]
        return query.astype(dtype), key.astype(dtype), value.astype(dtype)

    def first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def expected(self, span: Span) -> NDArray[np.float64]:
        """[tokens, num_query_heads, head_dim]"""
        query, key, value = (x.astype(np.float64) for x in self.vectors(span.row))
        out = np.empty((span.end - span.start, self.num_query_heads, self.head_dim))
        for position in range(span.start, span.end):
            seen = slice(self.first_seen(position), position + 1)
            for head in range(self.num_query_heads):
                kv_head = head // self.group
                weights = np.exp(self.scale * key[seen, kv_head] @ query[position, head])
                out[position - span.start, head] = weights / weights.sum() @ value[seen, kv_head]
        return out

    def attend(
        self,
        spans: list[Span],
        kernel: str = "attention",
        order: Order = Order.FORWARD,
        *,
        checked: bool = False,
        spare_blocks: int = 3,
    ) -> list[Floats]:
        """What the kernels make of a step, per span. Every slot that no token of the step sees holds NaN."""
        generator = np.random.default_rng(self.seed)
        dtype = ELEMENTS[self.element]
        num_blocks = sum(-(-length // self.block_size) for length in self.lengths) + spare_blocks
        tables = shuffled_tables(generator, self.lengths, self.block_size, num_blocks=num_blocks)
        tables[tables == tables[tables < num_blocks].max()] = num_blocks - 1  # always the last block of the pool
        layout = uneven_layout(
            num_layers=NUM_LAYERS,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            element_type=KV_TYPES[self.element],
        )
        # Pages that are never touched take no memory.
        cache = np.zeros((num_blocks, layout.bytes_per_block // dtype.itemsize), dtype)
        key_slots, value_slots = slots_of(cache, layout, LAYER)
        cache[tables[tables < num_blocks]] = np.nan
        for span in spans:
            _, keys, values = self.vectors(span.row)
            for position in range(self.first_seen(span.start), span.end):
                block, offset = tables[span.row, position // self.block_size], position % self.block_size
                key_slots[block, :, offset], value_slots[block, :, offset] = keys[position], values[position]

        query = np.concatenate([self.vectors(span.row)[0][span.start : span.end] for span in spans])
        kv_extents = np.concatenate([np.arange(span.start + 1, span.end + 1, dtype=np.int32) for span in spans])
        cu_seqlens = np.cumsum([0, *(span.end - span.start for span in spans)]).astype(np.int32)
        rows = np.array([span.row for span in spans], np.int32)
        max_splits = max(-(-span.end // SPLIT) for span in spans)
        partials = np.full((len(spans), self.num_query_heads, max_splits, self.head_dim + 4), np.nan, np.float32)
        out = np.full(query.shape, np.nan, dtype)

        tile = {each.kernel: each for each in (decode_tile(self.head_dim), chunk_tile(self.head_dim))}[kernel]
        launch = tile.launch(len(query), len(spans), self.num_kv_heads, self.group, max_splits)
        combine = attention_combine(len(spans), self.num_query_heads, self.head_dim)
        options = (f"-DELEMENT={self.element}", f"-DHEAD_DIM={self.head_dim}", f"-DKV_SPLIT={SPLIT}")
        kernels = load(CUDA / "attention.cu", options, checked=checked).kernels
        kernels[kernel].max_dynamic_shared_size_bytes = launch.shared_bytes
        execution = Execution(order=order)
        window = np.int32(self.window or 0)
        arguments: list[Argument] = [query, cache, kv_extents, cu_seqlens, rows, tables, out, partials]
        arguments += map(np.int32, (len(spans), self.num_query_heads, self.num_kv_heads))
        arguments += map(np.int32, (self.block_size, tables.shape[1], window, max_splits))
        arguments += [*kv_strides(layout, LAYER), np.float32(self.scale)]
        kernels[kernel](launch.grid, [launch.threads], arguments, launch.shared_bytes, execution=execution)
        kernels["attention_combine"](
            combine.grid,
            [combine.threads],
            [partials, kv_extents, cu_seqlens, out, np.int32(self.num_query_heads), window, np.int32(max_splits)],
            execution=execution,
        )
        return np.split(out.astype(np.float32), cu_seqlens[1:-1])

    def assert_close(self, spans: list[Span], attended: list[Floats]) -> None:
        for span, out in zip(spans, attended, strict=True):
            np.testing.assert_allclose(out, self.expected(span), rtol=0, atol=TOLERANCES[self.element])


class LowScores(Model):
    """Every score is near -200: a constant in the first element of the keys, its negative in that of the queries."""

    def vectors(self, row: int) -> tuple[Array, Array, Array]:
        """As for any model; the other elements still tell the positions apart."""
        query, key, value = super().vectors(row)
        size = (200 / self.scale) ** 0.5
        query[..., 0], key[..., 0] = -size, size
        return query, key, value
