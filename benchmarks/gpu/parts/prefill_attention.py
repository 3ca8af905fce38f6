"""Attention of a prompt: TFLOP/s, against PyTorch's scaled_dot_product_attention.

A token attends to itself and those before it; only those products count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.device import BLOCK_SIZE, opened
from benchmarks.gpu.measured_sizes import Sizes
from benchmarks.gpu.rows import Row
from benchmarks.gpu.torch_peer import ABSENT, attention_seconds, has_torch
from minipaged.ops.base import Batch, HostArray, StepLimits


def run(sizes: Sizes) -> Iterator[Row]:
    model = sizes.model
    for length in sizes.prefill_lengths:
        what = f"prefill attention, {length:,} tokens"
        operations = 4 * length * (length + 1) / 2 * model.num_query_heads * model.head_dim
        ours = operations / _seconds(sizes, length) / 1e12
        if not has_torch():
            yield Row(what, ours, "TFLOP/s", "torch", note=ABSENT)
            continue
        seconds = attention_seconds(length, model.num_query_heads, model.num_kv_heads, model.head_dim, sizes.effort)
        yield Row(what, ours, "TFLOP/s", "torch", operations / seconds / 1e12)


def _seconds(sizes: Sizes, length: int) -> float:
    model = sizes.model
    num_blocks = -(-length // BLOCK_SIZE)
    with opened(model) as ops:
        layout = replace(model, num_layers=1).kv_layout(BLOCK_SIZE, ops.kv_dtype)
        query = ops.random(length, model.num_query_heads, model.head_dim)
        limits = StepLimits(max_tokens=length, max_sequences=1, max_model_len=num_blocks * BLOCK_SIZE)
        ops.reserve(limits, layout, lambda step, cache: ops.paged_attention(query, cache, 0, step, 1.0, None))
        cache = ops.allocate_cache(layout, num_blocks)
        ops.randomise(cache.data)
        positions = np.arange(length, dtype=np.int32)
        step: Batch[HostArray] = Batch(
            token_ids=np.zeros(length, np.int32),
            positions=positions,
            kv_extents=positions + 1,
            slots=positions.astype(np.int64),
            cu_seqlens=np.array([0, length], np.int32),
            rows=np.zeros(1, np.int32),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
            sampled=np.array([length - 1], np.int32),
            next_positions=np.array([length], np.uint32),
        )
        on_device = ops.upload_batch(step, np.arange(num_blocks))
        scale = model.head_dim**-0.5
        return Clock(ops.stream, sizes.effort).seconds(
            lambda _: ops.paged_attention(query, cache, 0, on_device, scale, None)
        )
