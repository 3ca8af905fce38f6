"""The kernels of cuda/sampling.cu, and random inputs for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minipaged.ops.base import Bias, Penalties, Sampled, SamplingBatch
from minipaged.ops.cuda import launches
from tests.ops.cuda.emulated import Execution, Kernel, Order, load
from tests.ops.cuda.toolchain import CUDA

Array = NDArray[np.generic]
Logits = NDArray[np.float32]


def kernel(name: str, *, checked: bool = False) -> Kernel:
    return load(CUDA / "sampling.cu", checked=checked).kernels[name]


def sample(
    logits: Logits,
    raw_logits: Logits,
    batch: SamplingBatch[Array],
    order: Order = Order.FORWARD,
    *,
    checked: bool = False,
) -> Sampled:
    """`reference_sampling.sample` by the kernels."""
    num_rows, vocab_size = logits.shape
    execution = Execution(order=order)
    token_ids = np.full(num_rows, -2, np.int32)
    launch = launches.choose(num_rows)
    kernel("sample", checked=checked)(
        launch.grid,
        [launch.threads],
        [
            logits,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.seeds,
            batch.sample_index,
            batch.positions,
            token_ids,
            np.int32(vocab_size),
        ],
        execution=execution,
    )
    if batch.num_logprobs < 0:
        return Sampled(token_ids, None, None, None)
    num_top = min(batch.num_logprobs, vocab_size)
    chosen = np.full(num_rows, 7, np.float32)
    top_ids, top_logprobs = np.full((num_rows, num_top), -2, np.int32), np.full((num_rows, num_top), 7, np.float32)
    kernel("logprobs", checked=checked)(
        launch.grid,
        [launch.threads],
        [raw_logits, token_ids, chosen, top_ids, top_logprobs, np.int32(vocab_size), np.int32(num_top)],
        execution=execution,
    )
    return Sampled(token_ids, chosen, top_ids, top_logprobs)


def adjust_logits(
    logits: Logits,
    penalties: Penalties[Array] | None,
    bias: Bias[Array] | None,
    order: Order = Order.FORWARD,
    *,
    checked: bool = False,
) -> Logits:
    """`reference_sampling.adjust_logits` by the kernels."""
    num_rows, vocab_size = logits.shape
    execution = Execution(order=order)
    adjusted = logits.copy()
    if penalties is not None:
        launch = launches.penalise(len(penalties.token_ids))
        kernel("penalise", checked=checked)(
            launch.grid,
            [launch.threads],
            [
                adjusted,
                penalties.rows,
                penalties.starts,
                penalties.token_ids,
                penalties.counts,
                penalties.repetition,
                penalties.presence,
                penalties.frequency,
                np.int32(len(penalties.rows)),
                np.int32(vocab_size),
            ],
            execution=execution,
        )
    if bias is not None:
        launch = launches.add_bias(num_rows)
        kernel("add_bias", checked=checked)(
            launch.grid,
            [launch.threads],
            [adjusted, bias.rows, bias.token_ids, bias.values, np.int32(len(bias.rows)), np.int32(vocab_size)],
            execution=execution,
        )
    return adjusted


def random_batch(
    generator: np.random.Generator, num_rows: int, vocab_size: int, num_logprobs: int
) -> SamplingBatch[Array]:
    temperature = generator.choice([0.0, 0.3, 1.0, 2.5], num_rows).astype(np.float32)
    top_k = np.minimum(generator.choice([1, 2, 7, 40, vocab_size], num_rows), vocab_size)
    return SamplingBatch(
        temperature=temperature,
        top_k=top_k.astype(np.int32),
        top_p=generator.choice([1e-8, 0.3, 0.61, 0.9, 1.0], num_rows).astype(np.float32),
        min_p=generator.choice([0.0, 0.0, 0.04, 0.3, 1.0], num_rows).astype(np.float32),
        seeds=generator.integers(2**64, size=num_rows, dtype=np.uint64),
        sample_index=generator.integers(128, size=num_rows, dtype=np.uint32),
        positions=generator.integers(2**31, size=num_rows, dtype=np.uint32),
        num_logprobs=num_logprobs,
        all_greedy=not temperature.any(),
    )


def random_logits(generator: np.random.Generator, num_rows: int, vocab_size: int) -> Logits:
    """Some rows with many equal logits, some masked in part, some with infinity or NaN."""
    logits = generator.normal(scale=4, size=(num_rows, vocab_size)).astype(np.float32)
    for row in logits:
        kind = generator.choice(
            ["smooth", "equal", "zeros", "masked", "infinite", "hopeless"], p=[0.3, 0.3, 0.1, 0.1, 0.1, 0.1]
        )
        where = generator.integers(vocab_size)
        if kind == "equal":
            row[:] = np.round(row)
        elif kind == "zeros":
            row[:] = generator.choice(np.array([0.0, -0.0], np.float32), vocab_size)
        elif kind == "masked":
            row[generator.random(vocab_size) < 0.7] = -np.inf
        elif kind == "infinite":
            row[where] = np.inf
        elif kind == "hopeless":
            row[where] = np.nan
    return logits


def assert_equal(ours: Sampled, reference: Sampled) -> None:
    np.testing.assert_array_equal(ours.token_ids, reference.token_ids)
    if reference.logprobs is None:
        return
    assert ours.logprobs is not None
    assert ours.top_ids is not None
    assert ours.top_logprobs is not None
    assert reference.top_ids is not None
    assert reference.top_logprobs is not None
    np.testing.assert_allclose(ours.logprobs, reference.logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(ours.top_ids, reference.top_ids)
    np.testing.assert_allclose(ours.top_logprobs, reference.top_logprobs, rtol=1e-6, atol=1e-6)


def random_adjustments(
    generator: np.random.Generator, num_rows: int, vocab_size: int
) -> tuple[Penalties[Array], Bias[Array]]:
    penalised = generator.permutation(num_rows)[: generator.integers(1, num_rows + 1)].astype(np.int32)
    tokens = [generator.permutation(vocab_size)[: generator.integers(1, vocab_size + 1)] for _ in penalised]
    penalties: Penalties[Array] = Penalties(
        rows=penalised,
        starts=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        token_ids=np.concatenate(tokens).astype(np.int32),
        counts=np.maximum(generator.integers(-2, 4, sum(map(len, tokens))), 0).astype(np.int32),
        repetition=generator.uniform(0.5, 2, len(penalised)).astype(np.float32),
        presence=generator.uniform(-2, 2, len(penalised)).astype(np.float32),
        frequency=generator.uniform(-2, 2, len(penalised)).astype(np.float32),
    )
    num_entries = int(generator.integers(1, 90))
    values = generator.normal(scale=9, size=num_entries).astype(np.float32)
    values[generator.random(num_entries) < 0.1] = -np.inf
    bias: Bias[Array] = Bias(
        rows=generator.integers(num_rows, size=num_entries).astype(np.int32),
        token_ids=generator.integers(vocab_size, size=num_entries).astype(np.int32),
        values=values,
    )
    return penalties, bias
