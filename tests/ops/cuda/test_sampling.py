"""cuda/sampling.cu against reference_sampling."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.ops.base import SamplingBatch
from minipaged.ops.reference import sampling as reference_sampling
from minipaged.params import MAX_LOGPROBS
from tests.ops.cuda.emulated import Order
from tests.ops.cuda.sampling_kernels import (
    Array,
    adjust_logits,
    assert_equal,
    random_adjustments,
    random_batch,
    random_logits,
    sample,
)
from tests.ops.cuda.toolchain import CUDA

vocab_sizes = st.sampled_from([1, 5, 31, 300, 512, 513, 1031])


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=vocab_sizes, num_logprobs=st.sampled_from([-1, 0, 1, 5, 64]))
def test_tokens_and_logprobs_in_two_orders_of_threads(seed: int, vocab_size: int, num_logprobs: int) -> None:
    generator = np.random.default_rng(seed)
    batch = random_batch(generator, 6, vocab_size, num_logprobs)
    logits, raw = random_logits(generator, 6, vocab_size), random_logits(generator, 6, vocab_size)
    reference = reference_sampling.sample(logits, raw, batch)
    assert_equal(sample(logits, raw, batch), reference)
    assert_equal(sample(logits, raw, batch, Order.SHUFFLED), reference)


def test_a_real_vocabulary() -> None:
    generator = np.random.default_rng(5)
    batch = random_batch(generator, 12, 50_257, 20)
    logits = generator.normal(scale=2, size=(12, 50_257)).astype(np.float32)
    assert_equal(sample(logits, logits, batch), reference_sampling.sample(logits, logits, batch))


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_row_is_the_same_to_the_bit_in_any_batch(seed: int) -> None:
    generator = np.random.default_rng(seed)
    batch = random_batch(generator, 1, 300, 5)
    logits = random_logits(generator, 1, 300)
    alone = sample(logits, logits, batch)
    larger = random_batch(generator, 4, 300, 5)
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "sample_index", "positions"):
        getattr(larger, name)[2] = getattr(batch, name)[0]
    others = random_logits(generator, 4, 300)
    others[2] = logits[0]
    together = sample(others, others, larger)
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
        assert getattr(together, name)[2].tobytes() == getattr(alone, name)[0].tobytes()


def test_draws_follow_the_distribution() -> None:
    num_draws = 3000
    row = np.array([2.0, -1.0, 0.5, 0.5, -30.0, 1.25], np.float32)
    logits = np.tile(row, (num_draws, 1))
    ones = np.ones(num_draws, np.float32)
    batch: SamplingBatch[Array] = SamplingBatch(
        temperature=ones,
        top_k=np.full(num_draws, len(row), np.int32),
        top_p=ones,
        min_p=0 * ones,
        seeds=np.full(num_draws, 7, np.uint64),
        sample_index=np.zeros(num_draws, np.uint32),
        positions=np.arange(num_draws, dtype=np.uint32),
        num_logprobs=-1,
        all_greedy=False,
    )
    counts = np.bincount(sample(logits, logits, batch).token_ids, minlength=len(row))
    expected = num_draws * np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
    likely = [0, 1, 2, 3, 5]
    assert counts[4] == 0
    assert ((counts - expected) ** 2 / expected)[likely].sum() < 18.5  # 4 degrees of freedom, one in a thousand


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=vocab_sizes)
def test_penalties_and_biases_are_exact(seed: int, vocab_size: int) -> None:
    generator = np.random.default_rng(seed)
    logits = random_logits(generator, 4, vocab_size)
    penalties, bias = random_adjustments(generator, 4, vocab_size)
    expected = reference_sampling.adjust_logits(logits, penalties, bias)
    for order in (Order.FORWARD, Order.SHUFFLED):
        np.testing.assert_array_equal(adjust_logits(logits, penalties, bias, order), expected)


@pytest.mark.parametrize("vocab_size", [1, 700])
def test_no_fault_in_check_mode(vocab_size: int) -> None:
    generator = np.random.default_rng(1)
    batch = random_batch(generator, 5, vocab_size, 20)
    logits = random_logits(generator, 5, vocab_size)
    penalties, bias = random_adjustments(generator, 5, vocab_size)
    adjusted = adjust_logits(logits, penalties, bias, Order.SHUFFLED, checked=True)
    np.testing.assert_array_equal(adjusted, reference_sampling.adjust_logits(logits, penalties, bias))
    ours = sample(adjusted, logits, batch, Order.SHUFFLED, checked=True)
    assert_equal(ours, reference_sampling.sample(adjusted, logits, batch))


def test_a_request_can_ask_for_as_many_logprobs_as_the_kernel_returns() -> None:
    [most] = re.findall(r"constexpr int kMaxTop = (\d+);", (CUDA / "sampling.cu").read_text(encoding="utf-8"))
    assert int(most) == MAX_LOGPROBS
