"""cuda/attention.cu against dense softmax in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.ops.cuda import HEAD_DIMS
from tests.batches import shuffled_tables
from tests.cuda.emulated import Argument, Execution, Order, load
from tests.cuda.toolchain import CUDA

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
        shape = (num_blocks, NUM_LAYERS, 2, self.num_kv_heads, self.block_size, self.head_dim)
        cache = np.zeros(shape, dtype)  # pages that are never touched take no memory
        cache[tables[tables < num_blocks]] = np.nan
        for span in spans:
            _, keys, values = self.vectors(span.row)
            for position in range(self.first_seen(span.start), span.end):
                block, offset = tables[span.row, position // self.block_size], position % self.block_size
                cache[block, LAYER, 0, :, offset], cache[block, LAYER, 1, :, offset] = keys[position], values[position]

        query = np.concatenate([self.vectors(span.row)[0][span.start : span.end] for span in spans])
        positions = np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans])
        query_starts = np.cumsum([0, *(span.end - span.start for span in spans)]).astype(np.int32)
        rows = np.array([span.row for span in spans], np.int32)
        max_splits = max(-(-span.end // SPLIT) for span in spans)
        partials = np.full((len(spans), self.num_query_heads, max_splits, self.head_dim + 4), np.nan, np.float32)
        out = np.full(query.shape, np.nan, dtype)

        warps = 1 if kernel == "attention_decode" else 4 if self.head_dim <= 128 else 2
        tile_rows, tile = warps * 16, 32 if self.head_dim <= 128 else 16
        pitch, stages = self.head_dim + 8, 3 if warps == 1 else 2
        shared = 2 * pitch * (stages * 2 * tile + tile_rows) + 4 * tile_rows * (self.head_dim + 4)
        options = (f"-DELEMENT={self.element}", f"-DHEAD_DIM={self.head_dim}", f"-DKV_SPLIT={SPLIT}")
        kernels = load(CUDA / "attention.cu", options, checked=checked).kernels
        kernels[kernel].max_dynamic_shared_size_bytes = shared
        execution = Execution(order=order)
        window = np.int32(self.window or 0)
        arguments: list[Argument] = [query, cache, positions, query_starts, rows, tables, out, partials]
        arguments += map(np.int32, (len(spans), self.num_query_heads, self.num_kv_heads, NUM_LAYERS, LAYER))
        arguments += map(np.int32, (self.block_size, tables.shape[1], window, max_splits))
        grid = [
            len(query) // max(1, tile_rows // self.group) + len(spans),
            self.num_kv_heads * -(-self.group // tile_rows),
            max_splits,
        ]
        kernels[kernel](grid, [warps * 32], [*arguments, np.float32(self.scale)], shared, execution=execution)
        kernels["attention_combine"](
            [len(spans), self.num_query_heads],
            [self.head_dim // 4],
            [partials, positions, query_starts, out, np.int32(self.num_query_heads), window, np.int32(max_splits)],
            execution=execution,
        )
        return np.split(out.astype(np.float32), query_starts[1:-1])

    def assert_close(self, spans: list[Span], attended: list[Floats]) -> None:
        for span, out in zip(spans, attended, strict=True):
            np.testing.assert_allclose(out, self.expected(span), rtol=0, atol=TOLERANCES[self.element])


@st.composite
def models(draw: st.DrawFn, head_dim: int, element: str) -> Model:
    """Lengths around multiples of blocks, tiles and splits."""
    near = st.builds(
        lambda size, over: max(1, size + over), st.sampled_from([16, 32, 64, 128, 192]), st.integers(-2, 2)
    )
    return Model(
        element=element,
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 20, 71])),
        head_dim=head_dim,
        block_size=draw(st.sampled_from([1, 7, 16, 16, 32])),
        lengths=tuple(draw(st.lists(near | st.integers(1, 70), min_size=1, max_size=3))),
        window=draw(st.none() | st.integers(1, 100)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def drawn_spans(data: st.DataObject, model: Model, *, longest: int) -> list[Span]:
    """A step: of each sequence its last token, or a chunk that ends with it."""
    spans = []
    for row, length in enumerate(model.lengths):
        size = data.draw(st.just(1) | st.integers(1, min(length, longest)))
        spans.append(Span(row, length - size, length))
    return data.draw(st.permutations(spans))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@settings(max_examples=6)
@given(data=st.data())
def test_decode_and_prefill_in_one_launch_in_two_orders_of_threads(
    head_dim: int, element: str, data: st.DataObject
) -> None:
    model = data.draw(models(head_dim, element))
    spans = drawn_spans(data, model, longest=40)
    attended = model.attend(spans)
    model.assert_close(spans, attended)
    for one, other in zip(attended, model.attend(spans, order=Order.SHUFFLED), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@settings(max_examples=4)
@given(data=st.data())
def test_a_token_has_the_same_bits_in_prefill_and_decode_and_any_company(head_dim: int, data: st.DataObject) -> None:
    model = data.draw(models(head_dim, data.draw(st.sampled_from(list(ELEMENTS)))))
    length = model.lengths[0]
    whole = model.attend([Span(0, 0, length)])[0]
    # In chunks, each in the company of other sequences.
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=2))) if length > 1 else []
    for start, end in zip([0, *cuts], [*cuts, length], strict=True):
        others = [Span(row, max(0, other - 3), other) for row, other in enumerate(model.lengths) if row]
        spans = data.draw(st.permutations([Span(0, start, end), *others]))
        chunk = model.attend(spans)[[span.row for span in spans].index(0)]
        assert chunk.tobytes() == whole[start:end].tobytes()
    # By themselves, as decoding does; many at once, for a difference in float32 seldom survives the rounding.
    decoded = [Span(0, position, position + 1) for position in data.draw(st.permutations(range(length)))[:50]]
    for kernel in ("attention_decode", "attention"):
        for span, alone in zip(decoded, model.attend(decoded, kernel), strict=True):
            assert alone.tobytes() == whole[span.start : span.end].tobytes()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_fault_in_check_mode(head_dim: int, element: str) -> None:
    model = Model(element, 2, 3, head_dim, 16, (SPLIT + 17, 2 * SPLIT, 5), window=SPLIT + 20, seed=1)
    mixed = [Span(1, 2 * SPLIT - 1, 2 * SPLIT), Span(0, SPLIT - 10, SPLIT + 17), Span(2, 0, 5)]
    model.assert_close(mixed, model.attend(mixed, order=Order.SHUFFLED, checked=True))
    decoded = [Span(row, length - 1, length) for row, length in enumerate(model.lengths)]
    model.assert_close(decoded, model.attend(decoded, "attention_decode", Order.SHUFFLED, checked=True))


def test_nan_that_is_seen_comes_out_in_its_own_rows_alone() -> None:
    class Poisoned(Model):
        def vectors(self, row: int) -> tuple[Array, Array, Array]:
            query, key, value = super().vectors(row)
            if row == 1:
                key[40] = np.nan
            return query, key, value

    model = Poisoned("__half", 2, 3, 64, 16, (90, 70), window=None, seed=3)
    healthy, poisoned = model.attend([Span(0, 80, 90), Span(1, 35, 70)])
    np.testing.assert_allclose(healthy, model.expected(Span(0, 80, 90)), rtol=0, atol=TOLERANCES["__half"])
    assert np.isfinite(poisoned[:5]).all()
    assert np.isnan(poisoned[5:]).all()


def test_offsets_into_a_large_cache_do_not_overflow() -> None:
    model = Model("__half", 2, 2, 64, 16, (70, 40, 90), window=None, seed=4)
    elements_per_block = NUM_LAYERS * 2 * model.num_kv_heads * model.block_size * model.head_dim
    spans = [Span(0, 60, 70), Span(1, 39, 40), Span(2, 89, 90)]
    model.assert_close(spans, model.attend(spans, spare_blocks=2**32 // elements_per_block))
