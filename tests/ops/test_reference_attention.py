"""Rotation, the paged cache and attention of ReferenceOps against dense formulas in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.ops.base import CacheShape
from minipaged.ops.reference import ReferenceOps
from tests.batches import TokenSpan, make_batch, shuffled_tables, slots_of

OPS = ReferenceOps()
NUM_BLOCKS = 24
NUM_LAYERS = 2
LAYER = 1
THETA = 100.0


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

    @property
    def shape(self) -> CacheShape:
        return CacheShape(NUM_BLOCKS, NUM_LAYERS, self.num_kv_heads, self.block_size, self.head_dim)

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
    num_sequences = draw(st.integers(1, 3))
    counts = st.lists(st.integers(0, 9), min_size=num_sequences, max_size=num_sequences)
    return Case(
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        half=draw(st.integers(1, 4)),
        block_size=draw(st.integers(1, 6)),
        past=[min(count, NUM_BLOCKS // num_sequences // 2) for count in draw(counts)],
        new=[1 + min(count, NUM_BLOCKS // num_sequences // 2 - 1) for count in draw(counts)],
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def make_tables(case: Case, generator: np.random.Generator) -> NDArray[np.int32]:
    lengths = [past + new for past, new in zip(case.past, case.new, strict=True)]
    return shuffled_tables(generator, lengths, case.block_size, num_blocks=NUM_BLOCKS)


@given(case=cases(), window=st.none() | st.integers(1, 8), poisoned=st.booleans())
def test_attention_is_dense_causal_softmax(case: Case, window: int | None, poisoned: bool) -> None:
    """Every slot that no token of the step may read holds NaN; `poisoned`: so do the last token's K and V."""
    generator = np.random.default_rng(case.seed)
    tables = make_tables(case, generator)
    cache = OPS.allocate_cache(case.shape, "float32")
    OPS.fill_blocks(cache, range(NUM_BLOCKS), np.nan)
    query = generator.standard_normal((case.num_tokens, case.num_query_heads, case.head_dim), dtype=np.float32)
    scale = 0.7

    expected: list[NDArray[np.float64]] = []
    for span in case.spans:
        length = span.start + len(span.token_ids)
        first_read = 0 if window is None else max(0, span.start + 1 - window)
        keys, values = generator.standard_normal((2, length, case.num_kv_heads, case.head_dim), dtype=np.float32)
        if poisoned:
            keys[-1], values[-1] = np.nan, np.nan
        for position in range(first_read, length):
            block, offset = tables[span.row, position // case.block_size], position % case.block_size
            cache[block, LAYER, 0, :, offset] = keys[position]
            cache[block, LAYER, 1, :, offset] = values[position]
        for position in range(span.start, length):
            first = 0 if window is None else max(0, position + 1 - window)
            heads = []
            for head, q in enumerate(query[len(expected)].astype(np.float64)):
                kv_head = head // case.group
                weights = np.exp(scale * keys[first : position + 1, kv_head] @ q)
                heads.append(weights / weights.sum() @ values[first : position + 1, kv_head])
            expected.append(np.concatenate(heads))

    batch = make_batch(OPS, case.spans, tables, case.block_size)
    attended = OPS.paged_attention(query, cache, LAYER, batch, scale, window)
    assert attended.dtype == np.float32
    np.testing.assert_allclose(OPS.download(attended), np.array(expected), rtol=1e-4, atol=1e-5)
    ends = np.cumsum([len(span.token_ids) for span in case.spans])
    finite = np.isfinite(OPS.download(attended)).all(axis=1)
    assert finite.sum() == case.num_tokens - (len(ends) if poisoned else 0)


@given(case=cases(), has_norms=st.booleans(), dtype=st.sampled_from(["float32", "float16", "bfloat16"]))
def test_rope_and_cache_rotates_and_writes_exactly_its_slots(case: Case, has_norms: bool, dtype: str) -> None:
    generator = np.random.default_rng(case.seed)
    tables = make_tables(case, generator)
    cache = OPS.allocate_cache(case.shape, dtype)
    cache[:] = generator.standard_normal(cache.shape).astype(cache.dtype)
    before = cache.copy()

    frequencies = THETA ** (-np.arange(case.half) / case.half)
    angles = np.outer(np.arange(40), frequencies)
    rope = OPS.load_rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    num_heads = case.num_query_heads + 2 * case.num_kv_heads
    qkv = generator.standard_normal((case.num_tokens, num_heads * case.head_dim), dtype=np.float32)
    q_norm, k_norm = generator.standard_normal((2, case.head_dim), dtype=np.float32)
    batch = make_batch(OPS, case.spans, tables, case.block_size)
    norms = (q_norm, k_norm, 1e-3) if has_norms else None
    query = OPS.rope_and_cache(qkv, rope, cache, LAYER, batch, case.num_query_heads, norms)

    def rotated(x: NDArray[np.float64], norm: NDArray[np.float32], position: int) -> NDArray[np.float64]:
        """[heads, head_dim], each pair (i, i + half) turned as a complex number."""
        if has_norms:
            x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-3) * norm
        turned = (x[:, : case.half] + 1j * x[:, case.half :]) * np.exp(1j * position * frequencies)
        return np.concatenate([turned.real, turned.imag], axis=1)

    token = 0
    expected = before.astype(np.float64)
    for span in case.spans:
        for position in range(span.start, span.start + len(span.token_ids)):
            heads = qkv[token].astype(np.float64).reshape(num_heads, case.head_dim)
            q, k, v = np.split(heads, [case.num_query_heads, case.num_query_heads + case.num_kv_heads])
            np.testing.assert_allclose(OPS.download(query)[token], rotated(q, q_norm, position), rtol=1e-4, atol=1e-5)
            block, offset = tables[span.row, position // case.block_size], position % case.block_size
            expected[block, LAYER, 0, :, offset] = rotated(k, k_norm, position)
            expected[block, LAYER, 1, :, offset] = v
            token += 1
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(cache.astype(np.float64), expected, rtol=tolerance, atol=tolerance)

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
    by_slot = (0, 1, 4, 2, 3, 5)
    after_slots, before_slots = cache.transpose(by_slot)[untouched], before.transpose(by_slot)[untouched]
    assert after_slots.tobytes() == before_slots.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_blocks_travel_to_the_host_and_back_bit_for_bit(dtype: str) -> None:
    shape = CacheShape(num_blocks=5, num_layers=2, num_kv_heads=3, block_size=4, head_dim=6)
    cache = OPS.allocate_cache(shape, dtype)
    host = OPS.allocate_host_cache(shape, dtype)
    assert host.shape == (5, cache[0].nbytes)
    generator = np.random.default_rng(0)
    raw = generator.integers(256, size=host.shape, dtype=np.uint8)  # NaN payloads among them
    cache.reshape(5, -1).view(np.uint8)[:] = raw

    pending = OPS.blocks_to_host(cache, host, [(0, 3), (4, 1)])
    pending.wait()
    assert pending.done()
    assert host[3].tobytes() == raw[0].tobytes()
    assert host[1].tobytes() == raw[4].tobytes()
    assert not host[[0, 2, 4]].any()

    OPS.fill_blocks(cache, range(5), 1.0)
    pending = OPS.blocks_from_host(host, cache, [(3, 2), (1, 0)])
    pending.wait()
    assert pending.done()
    assert cache[2].tobytes() == raw[0].tobytes()
    assert cache[0].tobytes() == raw[4].tobytes()
    assert (cache[[1, 3, 4]].astype(np.float32) == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_copying_and_filling_blocks_touches_no_others(dtype: str) -> None:
    cache = OPS.allocate_cache(CacheShape(6, 1, 1, 2, 2), dtype)
    for block in range(6):
        OPS.fill_blocks(cache, [block], float(block))
    OPS.copy_blocks(cache, [(1, 4), (0, 2), (1, 5)])
    OPS.fill_blocks(cache, [3], np.nan)
    assert np.isnan(cache[3].astype(np.float32)).all()
    values = [np.unique(cache[block].astype(np.float32)).tolist() for block in (0, 1, 2, 4, 5)]
    assert values == [[0], [1], [0], [1], [1]]
    OPS.copy_blocks(cache, [])
    OPS.fill_blocks(cache, [], 9.0)
