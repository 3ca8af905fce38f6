"""Rotation, the paged cache and attention of every backend on the host against dense formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.kv.layout import ElementType, KVLayout, grouped_query_layout
from minipaged.ops.base import KVPool
from minipaged.ops.cpu.ops import CpuOps
from minipaged.ops.reference.numpy_ops import Array
from minipaged.ops.reference.ops import ReferenceOps
from tests.batches import TokenSpan, make_batch, shuffled_tables, slots_of

NUM_BLOCKS = 24
NUM_LAYERS = 2
LAYER = 1
THETA = 100.0
REFERENCE = ReferenceOps()
"""Makes the batches, which are the same NumPy arrays for every backend here."""

KV_DTYPES: list[ElementType] = ["float32", "float16", "bfloat16"]

HostOps = ReferenceOps | CpuOps


@dataclass(frozen=True)
class Case:
    """A random step: for each sequence how many tokens it has KV for, and how many are computed now."""

    num_kv_heads: int
    group: int
    half: int
    block_size: int
    past: list[int]
    new: list[int]
    seed: int

    @property
    def head_dim(self) -> int:
        return 2 * self.half

    def layout(self, element_type: ElementType) -> KVLayout:
        return layout_of(self.num_kv_heads, self.block_size, self.head_dim, element_type)

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def num_tokens(self) -> int:
        return sum(self.new)

    @property
    def spans(self) -> list[TokenSpan]:
        """In another order than the rows of the block table."""
        spans = [
            TokenSpan(row, past, [0] * new) for row, (past, new) in enumerate(zip(self.past, self.new, strict=True))
        ]
        return spans[::-1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly small; now and then as large as the CPU kernels take, or of a size that fills no whole vector."""
    num_sequences = draw(st.integers(1, 3))
    block_size = draw(st.integers(1, 6) | st.sampled_from((15, 16, 33, 64)))
    most = NUM_BLOCKS // num_sequences // 2 * min(block_size, 4)
    counts = st.lists(st.integers(0, min(most, 40) - 1), min_size=num_sequences, max_size=num_sequences)
    return Case(
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4) | st.sampled_from((8, 9, 17))),
        half=draw(st.integers(1, 4) | st.sampled_from((12, 19, 32, 128))),
        block_size=block_size,
        past=draw(counts),
        new=[1 + count for count in draw(counts)],
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@dataclass(frozen=True)
class SlotOrder:
    """How a backend orders the elements of K and V within a block and head.

    Cells, int64 [block_size, head_dim]: where element i of a slot is.
    """

    key_cells: NDArray[np.int64]
    value_cells: NDArray[np.int64]

    def by_slot(self, cache: KVPool[Array]) -> tuple[Array, Array]:
        """Copies of K and V [num_blocks, num_layers, num_kv_heads, block_size, head_dim]."""
        flat = elements(cache)
        flat = flat.reshape(*flat.shape[:4], -1)
        return flat[:, :, 0][..., self.key_cells], flat[:, :, 1][..., self.value_cells]

    def write(self, cache: KVPool[Array], block: int, slot: int, keys: Array, values: Array) -> None:
        """Keys and values [num_kv_heads, head_dim] of layer LAYER."""
        flat = elements(cache)
        flat = flat.reshape(*flat.shape[:4], -1)
        assert np.shares_memory(flat, cache.data)
        flat[block, LAYER, 0][:, self.key_cells[slot]] = keys
        flat[block, LAYER, 1][:, self.value_cells[slot]] = values


def layout_of(num_kv_heads: int, block_size: int, head_dim: int, element_type: ElementType) -> KVLayout:
    return grouped_query_layout(
        num_layers=NUM_LAYERS,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        element_type=element_type,
    )


def elements(cache: KVPool[Array]) -> Array:
    """The pool's own memory as [num_blocks, num_layers, K and V, num_kv_heads, block_size, head_dim]."""
    layout = cache.layout
    shape = (layout.num_layers, 2, layout.keys.num_heads, layout.block_size, layout.keys.width)
    return cache.data.view(dtype_of(layout)).reshape(-1, *shape)


def dtype_of(layout: KVLayout) -> np.dtype[np.generic]:
    name = layout.keys.element_type
    dtype: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return dtype


def slot_order(ops: HostOps, cache: KVPool[Array]) -> SlotOrder:
    """The CPU's keys are transposed; its bfloat16 has pairs: of elements in K, of slots in V (cpu/rows.h)."""
    size, dim = cache.layout.block_size, cache.layout.keys.width
    cells = np.arange(size * dim)
    if isinstance(ops, ReferenceOps):
        return SlotOrder(cells.reshape(size, dim), cells.reshape(size, dim))
    if cache.layout.keys.element_type != "bfloat16":
        return SlotOrder(cells.reshape(dim, size).T, cells.reshape(size, dim))
    keys = cells.reshape(dim // 2, size, 2).transpose(1, 0, 2).reshape(size, dim)
    paired = size // 2 * 2
    pairs, alone = cells[: paired * dim], cells[paired * dim :].reshape(-1, dim)
    values = np.concatenate([pairs.reshape(size // 2, dim, 2).transpose(0, 2, 1).reshape(paired, dim), alone])
    return SlotOrder(keys, values)


def fill_at_random(cache: KVPool[Array], generator: np.random.Generator) -> None:
    every = elements(cache)
    every[...] = generator.standard_normal(every.shape).astype(every.dtype)


def make_tables(case: Case, generator: np.random.Generator) -> NDArray[np.int32]:
    lengths = [past + new for past, new in zip(case.past, case.new, strict=True)]
    return shuffled_tables(generator, lengths, case.block_size, num_blocks=NUM_BLOCKS)


@given(
    case=cases(),
    window=st.none() | st.integers(1, 40),
    dtype=st.sampled_from(KV_DTYPES),
    poisoned=st.sampled_from(["nothing", "last token", "first block"]),
)
def test_attention_is_dense_causal_softmax(
    host_ops: HostOps, case: Case, window: int | None, dtype: ElementType, poisoned: str
) -> None:
    """Every slot that no token of the step may read holds NaN. NaN in what a token does read comes out."""
    generator = np.random.default_rng(case.seed)
    tables = make_tables(case, generator)
    cache = host_ops.allocate_cache(case.layout(dtype), NUM_BLOCKS)
    host_ops.fill_blocks(cache, range(NUM_BLOCKS), np.nan)
    order = slot_order(host_ops, cache)
    query = generator.standard_normal((case.num_tokens, case.num_query_heads, case.head_dim), dtype=np.float32)
    if dtype == "bfloat16":
        query = query.astype(dtype_of(cache.layout)).astype(np.float32)  # as it is multiplied
    scale = 0.7 / case.half**0.5

    expected: list[NDArray[np.float64]] = []
    for span in case.spans:
        length = span.start + len(span.token_ids)
        first_read = 0 if window is None else max(0, span.start + 1 - window)
        keys, values = generator.standard_normal((2, length, case.num_kv_heads, case.head_dim)).astype(
            dtype_of(cache.layout)
        )
        if poisoned != "nothing":
            where = slice(-1, None) if poisoned == "last token" else slice(first_read, first_read + case.block_size)
            keys[where], values[where] = np.nan, np.nan
        for position in range(first_read, length):
            block, offset = tables[span.row, position // case.block_size], position % case.block_size
            order.write(cache, block, offset, keys[position], values[position])
        keys, values = keys.astype(np.float64), values.astype(np.float64)
        for position in range(span.start, length):
            first = 0 if window is None else max(0, position + 1 - window)
            heads = []
            for head, q in enumerate(query[len(expected)].astype(np.float64)):
                kv_head = head // case.group
                weights = np.exp(scale * keys[first : position + 1, kv_head] @ q)
                heads.append(weights / weights.sum() @ values[first : position + 1, kv_head])
            expected.append(np.concatenate(heads))

    batch = make_batch(REFERENCE, case.spans, tables, case.block_size)
    attended = host_ops.paged_attention(query, cache, LAYER, batch, scale, window)
    assert attended.dtype == np.float32
    assert poisoned != "nothing" or np.isfinite(expected).all()
    # The weights are rounded as V is, to 8 bits.
    rtol, atol = (4e-3, 1.2e-2) if dtype == "bfloat16" else (1e-4, 1e-5)
    np.testing.assert_allclose(host_ops.download(attended), np.array(expected), rtol=rtol, atol=atol)


@given(case=cases(), has_norms=st.booleans(), dtype=st.sampled_from(KV_DTYPES))
def test_rope_and_cache_rotates_and_writes_exactly_its_slots(
    host_ops: HostOps, case: Case, has_norms: bool, dtype: ElementType
) -> None:
    generator = np.random.default_rng(case.seed)
    tables = make_tables(case, generator)
    cache = host_ops.allocate_cache(case.layout(dtype), NUM_BLOCKS)
    fill_at_random(cache, generator)
    before = replace(cache, data=cache.data.copy())

    frequencies = THETA ** (-np.arange(case.half) / case.half)
    angles = np.outer(np.arange(100), frequencies)
    rope = host_ops.load_rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    num_heads = case.num_query_heads + 2 * case.num_kv_heads
    qkv = generator.standard_normal((case.num_tokens, num_heads * case.head_dim), dtype=np.float32)
    q_norm, k_norm = generator.standard_normal((2, case.head_dim), dtype=np.float32)
    batch = make_batch(REFERENCE, case.spans, tables, case.block_size)
    norms = (q_norm, k_norm, 1e-3) if has_norms else None
    query = host_ops.rope_and_cache(qkv.copy(), rope, cache, LAYER, batch, case.num_query_heads, norms)

    def rotated(x: NDArray[np.float64], norm: NDArray[np.float32], position: int) -> NDArray[np.float64]:
        """[heads, head_dim], each pair (i, i + half) turned as a complex number."""
        if has_norms:
            x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-3) * norm
        turned = (x[:, : case.half] + 1j * x[:, case.half :]) * np.exp(1j * position * frequencies)
        return np.concatenate([turned.real, turned.imag], axis=1)

    token = 0
    order = slot_order(host_ops, cache)
    expected_keys, expected_values = (array.astype(np.float64) for array in order.by_slot(before))
    for span in case.spans:
        for position in range(span.start, span.start + len(span.token_ids)):
            heads = qkv[token].astype(np.float64).reshape(num_heads, case.head_dim)
            q, k, v = np.split(heads, [case.num_query_heads, case.num_query_heads + case.num_kv_heads])
            np.testing.assert_allclose(
                host_ops.download(query)[token], rotated(q, q_norm, position), rtol=1e-4, atol=1e-5
            )
            block, offset = tables[span.row, position // case.block_size], position % case.block_size
            expected_keys[block, LAYER, :, offset] = rotated(k, k_norm, position)
            expected_values[block, LAYER, :, offset] = v
            token += 1
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    keys, values = order.by_slot(cache)
    np.testing.assert_allclose(keys.astype(np.float64), expected_keys, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(values.astype(np.float64), expected_values, rtol=tolerance, atol=tolerance)

    slots = np.concatenate(
        [
            slots_of(
                tables[span.row],
                np.arange(span.start, span.start + len(span.token_ids), dtype=np.int32),
                case.block_size,
            )
            for span in case.spans
        ]
    )
    untouched = np.ones((NUM_BLOCKS, NUM_LAYERS, case.block_size), np.bool_)
    untouched[slots // case.block_size, LAYER, slots % case.block_size] = False
    for after, original in zip((keys, values), order.by_slot(before), strict=True):
        by_slot = (0, 1, 3, 2, 4)
        assert after.transpose(by_slot)[untouched].tobytes() == original.transpose(by_slot)[untouched].tobytes()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_blocks_travel_to_the_host_and_back_bit_for_bit(host_ops: HostOps, dtype: ElementType) -> None:
    layout = layout_of(num_kv_heads=3, block_size=4, head_dim=6, element_type=dtype)
    cache = host_ops.allocate_cache(layout, 5)
    host = host_ops.allocate_host_cache(layout, 5)
    assert host.shape == (5, elements(cache)[0].nbytes)
    generator = np.random.default_rng(0)
    raw = generator.integers(256, size=host.shape, dtype=np.uint8)  # NaN payloads among them
    elements(cache).reshape(5, -1).view(np.uint8)[:] = raw

    pending = host_ops.blocks_to_host(cache, host, [(0, 3), (4, 1)])
    pending.wait()
    assert pending.done()
    assert host[3].tobytes() == raw[0].tobytes()
    assert host[1].tobytes() == raw[4].tobytes()
    assert not host[[0, 2, 4]].any()

    host_ops.fill_blocks(cache, range(5), 1.0)
    pending = host_ops.blocks_from_host(host, cache, [(3, 2), (1, 0)])
    pending.wait()
    assert pending.done()
    assert elements(cache)[2].tobytes() == raw[0].tobytes()
    assert elements(cache)[0].tobytes() == raw[4].tobytes()
    assert (elements(cache)[[1, 3, 4]].astype(np.float32) == 1).all()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_copying_and_filling_blocks_touches_no_others(host_ops: HostOps, dtype: ElementType) -> None:
    cache = host_ops.allocate_cache(layout_of(1, 2, 2, dtype), 6)
    for block in range(6):
        host_ops.fill_blocks(cache, [block], float(block))
    host_ops.copy_blocks(cache, [(1, 4), (0, 2), (1, 5)])
    host_ops.fill_blocks(cache, [3], np.nan)
    assert np.isnan(elements(cache)[3].astype(np.float32)).all()
    values = [np.unique(elements(cache)[block].astype(np.float32)).tolist() for block in (0, 1, 2, 4, 5)]
    assert values == [[0], [1], [0], [1], [1]]
    host_ops.copy_blocks(cache, [])
    host_ops.fill_blocks(cache, [], 9.0)


@pytest.mark.parametrize(("num_kv_heads", "dtype"), [(2, "float32"), (9, "float16"), (16, "bfloat16")])
def test_many_sequences_are_each_as_alone(cpu: CpuOps, num_kv_heads: int, dtype: ElementType) -> None:
    """To the last bit. Among many, a thread takes several KV heads at a time."""
    generator = np.random.default_rng(num_kv_heads)
    lengths = generator.integers(1, 150, 30).tolist()
    block_size, head_dim = 16, 20
    tables = shuffled_tables(generator, lengths, block_size, num_blocks=10 * len(lengths))
    cache = cpu.allocate_cache(layout_of(num_kv_heads, block_size, head_dim, dtype), 10 * len(lengths))
    fill_at_random(cache, generator)
    query = generator.standard_normal((len(lengths), 2 * num_kv_heads, head_dim), dtype=np.float32)
    spans = [TokenSpan(row, length - 1, [0]) for row, length in enumerate(lengths)]
    together = cpu.paged_attention(
        query, cache, LAYER, make_batch(REFERENCE, spans, tables, block_size), head_dim**-0.5, None
    )
    for row, span in enumerate(spans):
        batch = make_batch(REFERENCE, [span], tables, block_size)
        alone = cpu.paged_attention(query[row, None].copy(), cache, LAYER, batch, head_dim**-0.5, None)
        assert alone.tobytes() == together[row].tobytes()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_is_cached_is_rounded_to_nearest(host_ops: HostOps, dtype: ElementType) -> None:
    """Ties to even; over the whole range of float32, with infinity and NaN."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:2048] &= 0xFFFFF000  # many that lie in the middle between two
    edges = np.array([0, 65519, 65520, 6e-8, 3e-8, 2.98e-8, 6.1e-5, 3.39e38, np.inf, np.nan], np.float32)
    exponents = np.random.default_rng(1).integers(-26, 17, 4096)
    halfway = np.ldexp(np.random.default_rng(2).integers(2048, 4096, 4096) / 2048, exponents).astype(np.float32)
    numbers = np.concatenate([bits.view(np.float32), edges, -edges, halfway])
    head_dim = 20
    values = np.resize(numbers, (-(-numbers.size // head_dim), head_dim))
    num_tokens, block_size = len(values), 16
    num_blocks = -(-num_tokens // block_size)
    cache = host_ops.allocate_cache(layout_of(1, block_size, head_dim, dtype), num_blocks)
    rope = host_ops.load_rope(
        np.ones((num_tokens, head_dim // 2), np.float32), np.zeros((num_tokens, head_dim // 2), np.float32)
    )
    keys = np.where(np.isfinite(values), values, 1).astype(np.float32)  # rotation would make NaN of infinity
    tables = np.arange(num_blocks, dtype=np.int32)[None]
    batch = make_batch(REFERENCE, [TokenSpan(0, 0, [0] * num_tokens)], tables, block_size)
    host_ops.rope_and_cache(np.concatenate([keys, keys, values], axis=1), rope, cache, LAYER, batch, 1, None)
    with np.errstate(over="ignore", invalid="ignore"):
        for cached, given in zip(slot_order(host_ops, cache).by_slot(cache), (keys, values), strict=True):
            rows = cached[:, LAYER, 0].reshape(-1, head_dim)[:num_tokens]
            np.testing.assert_array_equal(
                rows.astype(np.float64), given.astype(dtype_of(cache.layout)).astype(np.float64)
            )


@given(
    case=cases(), evicted=st.integers(1, 60), window=st.none() | st.integers(1, 40), dtype=st.sampled_from(KV_DTYPES)
)
def test_attention_goes_by_the_kv_extent_and_rotation_by_the_position(
    host_ops: HostOps, case: Case, evicted: int, window: int | None, dtype: ElementType
) -> None:
    """Of sequences whose beginning has no KV any more: the same bits as without it, but for the rotation of q and k."""
    generator = np.random.default_rng(case.seed)
    tables = make_tables(case, generator)
    longest = evicted + max(past + new for past, new in zip(case.past, case.new, strict=True))
    angles = np.outer(np.arange(longest), THETA ** (-np.arange(case.half) / case.half)).astype(np.float32)
    qkv = generator.standard_normal(
        (case.num_tokens, (case.num_query_heads + 2 * case.num_kv_heads) * case.head_dim), dtype=np.float32
    )
    before = host_ops.allocate_cache(case.layout(dtype), NUM_BLOCKS)
    fill_at_random(before, generator)

    def attend(spans: list[TokenSpan], first_angle: int) -> tuple[bytes, bytes]:
        """With the angles from `first_angle` on as those of positions 0, 1, 2 and so on."""
        cache = host_ops.allocate_cache(case.layout(dtype), NUM_BLOCKS)
        cache.data[:] = before.data
        rope = host_ops.load_rope(np.cos(angles[first_angle:]), np.sin(angles[first_angle:]))
        batch = make_batch(REFERENCE, spans, tables, case.block_size)
        query = host_ops.rope_and_cache(qkv.copy(), rope, cache, LAYER, batch, case.num_query_heads, None)
        return host_ops.paged_attention(query, cache, LAYER, batch, 0.3, window).tobytes(), cache.data.tobytes()

    later = [TokenSpan(span.row, span.start + evicted, span.token_ids, evicted) for span in case.spans]
    assert attend(later, 0) == attend(case.spans, evicted)
