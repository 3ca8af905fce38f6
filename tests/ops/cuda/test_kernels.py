"""The simple kernels on the CPU against the reference operations, on ragged random shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.kv.layout import grouped_query_layout
from minipaged.ops.base import Batch, KVPool
from minipaged.ops.cuda.ops import HEAD_DIMS
from minipaged.ops.reference.ops import ReferenceOps
from tests.ops.cuda.emulated import Execution, Order
from tests.ops.cuda.kernels import ELEMENTS, Array, Kernels, vectors_of

REFERENCE = ReferenceOps()
TOLERANCES = {"__half": 2e-3, "__nv_bfloat16": 1.6e-2, "float": 1e-5}
"""Relative; a little more than the rounding of the result."""

SEEDS = st.integers(0, 2**32 - 1)
TOKENS = st.integers(1, 5)


@pytest.fixture(scope="module", params=ELEMENTS)
def element(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Ways = Callable[[str, int], list[Kernels]]


@pytest.fixture(scope="module", params=["orders", "checked"])
def ways(request: pytest.FixtureRequest) -> Ways:
    """Kernels for an element type, seeded: in two orders of threads, or in check mode."""
    if request.param == "checked":
        return lambda element, seed: [Kernels(element, Execution(Order.SHUFFLED, seed=seed + 1), checked=True)]
    return lambda element, seed: [
        Kernels(element, Execution(Order.REVERSE)),
        Kernels(element, Execution(Order.SHUFFLED, seed=seed + 1)),
    ]


def normal(generator: np.random.Generator, shape: tuple[int, ...], element: str) -> Array:
    values: Array = generator.standard_normal(shape, dtype=np.float32).astype(ELEMENTS[element])
    return values


def float32(array: Array) -> NDArray[np.float32]:
    return array.astype(np.float32)


def assert_close(actual: Array, expected: Array, element: str) -> None:
    tolerance = TOLERANCES[element]
    np.testing.assert_allclose(float32(actual), float32(expected), rtol=tolerance, atol=tolerance / 10)


@settings(max_examples=10)
@given(tokens=TOKENS, vectors=st.integers(1, 300), rows=st.integers(1, 9), seed=SEEDS)
def test_embed(ways: Ways, element: str, tokens: int, vectors: int, rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    table = normal(generator, (rows, vectors * vectors_of(ELEMENTS[element])), element)
    indices = generator.integers(0, rows, tokens, dtype=np.int32)
    for kernels in ways(element, seed):
        np.testing.assert_array_equal(kernels.embed(table, indices), table[indices])


@settings(max_examples=10)
@given(tokens=TOKENS, vectors=st.integers(1, 1100), seed=SEEDS)
def test_rms_norm(ways: Ways, element: str, tokens: int, vectors: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = (tokens, vectors * vectors_of(ELEMENTS[element]))
    x = normal(generator, shape, element)
    weight = generator.standard_normal(shape[1], dtype=np.float32)
    expected = REFERENCE.rms_norm(float32(x), weight, 1e-5)
    for kernels in ways(element, seed):
        assert_close(kernels.rms_norm(x, weight, 1e-5), expected, element)


@settings(max_examples=15)
@given(
    tokens=TOKENS,
    head_dim=st.sampled_from(HEAD_DIMS),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    block_size=st.sampled_from((1, 5, 16)),
    has_norms=st.booleans(),
    factor=st.sampled_from((1.0, 1.3)),
    seed=SEEDS,
)
def test_rope_and_cache(
    ways: Ways,
    element: str,
    tokens: int,
    head_dim: int,
    num_kv_heads: int,
    group: int,
    block_size: int,
    has_norms: bool,
    factor: float,
    seed: int,
) -> None:
    """Every kind of RoPE is a table of angles; YaRN multiplies cosine and sine by a factor."""
    generator = np.random.default_rng(seed)
    num_blocks, num_layers, layer, longest = 7, 2, 1, 40
    num_query_heads = num_kv_heads * group
    qkv = normal(generator, (tokens, (num_query_heads + 2 * num_kv_heads) * head_dim), element)
    angles = generator.uniform(-np.pi, np.pi, (longest, head_dim // 2))
    cos, sin = (factor * np.cos(angles)).astype(np.float32), (factor * np.sin(angles)).astype(np.float32)
    positions = generator.integers(0, longest, tokens, dtype=np.int32)
    slots = generator.permutation(num_blocks * block_size)[:tokens]
    norms = None
    if has_norms:
        weights = generator.standard_normal((2, head_dim), dtype=np.float32)
        norms = (weights[0], weights[1], 1e-5)
    before = normal(generator, (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim), element)

    # The slots may be fewer than the tokens where blocks are small.
    tokens = len(slots)
    qkv, positions = qkv[:tokens].copy(), positions[:tokens].copy()
    nothing = np.empty(0, np.int32)
    batch: Batch[Array] = Batch(nothing, positions, nothing, slots, nothing, nothing, nothing, nothing, nothing)
    layout = grouped_query_layout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        element_type="float32",
    )
    expected_cache = float32(before)
    pool: KVPool[Array] = KVPool(layout, num_blocks, expected_cache.reshape(num_blocks, -1).view(np.uint8))
    expected = REFERENCE.rope_and_cache(
        float32(qkv), REFERENCE.load_rope(cos, sin), pool, layer, batch, num_query_heads, norms
    )
    for kernels in ways(element, seed):
        cache = before.copy()
        query = kernels.rope_and_cache(
            qkv, np.stack([cos, sin], axis=-1), positions, slots, cache, layer, num_query_heads, norms
        )
        assert_close(query, expected, element)
        assert_close(cache, expected_cache, element)
        untouched = np.ones(cache.shape, bool)
        untouched[slots // block_size, layer, :, :, slots % block_size] = False
        np.testing.assert_array_equal(cache[untouched], before[untouched])


@settings(max_examples=10)
@given(tokens=TOKENS, words=st.integers(1, 2500), rows=st.integers(1, 6), seed=SEEDS)
def test_take(ways: Ways, tokens: int, words: int, rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, words), dtype=np.float32)
    indices = generator.integers(0, rows, tokens, dtype=np.int32)
    for kernels in ways("float", seed):
        np.testing.assert_array_equal(kernels.take(x, indices), x[indices])


@settings(max_examples=10)
@given(size=st.integers(1, 700), seed=SEEDS, data=st.data())
def test_update_tables(ways: Ways, size: int, seed: int, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    before = generator.integers(0, 2**31, (3, size), dtype=np.int32)
    places = generator.permutation(3 * size)[: data.draw(st.integers(1, 3 * size))]
    blocks = generator.integers(0, 2**31, len(places), dtype=np.int32)
    expected = before.copy()
    expected.ravel()[places] = blocks
    for kernels in ways("float", seed):
        tables = before.copy()
        kernels.update_tables(tables, places, blocks)
        np.testing.assert_array_equal(tables, expected)


@settings(max_examples=10)
@given(vectors=st.integers(1, 2500), seed=SEEDS, data=st.data())
def test_copy_blocks(ways: Ways, vectors: int, seed: int, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    num_blocks = 6
    before = generator.integers(0, 256, (num_blocks, vectors * 16), dtype=np.uint8)
    destinations = data.draw(st.lists(st.integers(0, num_blocks - 2), min_size=1, max_size=4, unique=True))
    sources = [block for block in range(num_blocks) if block not in destinations]
    pairs = np.array([(generator.choice(sources), destination) for destination in destinations], np.int32)
    expected = before.copy()
    expected[pairs[:, 1]] = before[pairs[:, 0]]
    for kernels in ways("__half", seed):
        cache = before.copy()
        kernels.copy_blocks(cache, pairs)
        np.testing.assert_array_equal(cache, expected)


@settings(max_examples=10)
@given(vectors=st.integers(1, 2500), value=st.sampled_from([np.nan, 0.0, 0.1, -7.0]), seed=SEEDS, data=st.data())
def test_fill_blocks(ways: Ways, element: str, vectors: int, value: float, seed: int, data: st.DataObject) -> None:
    num_blocks = 5
    before = normal(np.random.default_rng(seed), (num_blocks, vectors * vectors_of(ELEMENTS[element])), element)
    blocks = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, unique=True))
    expected = before.copy()
    expected[blocks] = np.float32(value).astype(before.dtype)
    for kernels in ways(element, seed):
        cache = before.copy()
        kernels.fill_blocks(cache, np.array(blocks, np.int32), value)
        np.testing.assert_array_equal(float32(cache), float32(expected))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row(element: str, poison: float) -> None:
    generator = np.random.default_rng(0)
    kernels = Kernels(element)
    clean = normal(generator, (3, 64), element)
    dirty = clean.copy()
    dirty[1, 3] = poison
    weight = np.ones(64, np.float32)
    before, after = (kernels.rms_norm(x, weight, 1e-5) for x in (clean, dirty))
    np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.isfinite(float32(after)[1, 3])
