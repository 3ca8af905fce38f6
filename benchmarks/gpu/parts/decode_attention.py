"""Attention of a decode: bytes of K and V read per second, against a copy within the card's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.gpu.clock import Clock, buffers_beyond_cache, copy_bandwidth
from benchmarks.gpu.device import BLOCK_SIZE, opened
from benchmarks.gpu.measured_sizes import Sizes
from benchmarks.gpu.rows import Row
from minipaged.ops.base import Batch, HostArray, StepLimits

BAR, FROM_BATCH, FROM_CONTEXT = 0.8, 16, 2048


def run(sizes: Sizes) -> Iterator[Row]:
    bandwidth = copy_bandwidth(sizes.effort, sizes.copy_bytes)
    for group in sizes.groups:
        for context in sizes.decode_contexts:
            for batch in sizes.decode_batches:
                what = f"decode attention, GQA {group}, context {context:,}, batch {batch}"
                num_bytes = 2 * batch * context * (sizes.model.num_query_heads // group) * sizes.model.head_dim * 2
                if num_bytes > sizes.most_cache_bytes:
                    yield Row(what, note=f"left out: {num_bytes / 2**30:.0f} GiB of KV")
                    continue
                seconds = _seconds(sizes, batch, context, group, num_bytes)
                bar = BAR if batch >= FROM_BATCH and context >= FROM_CONTEXT else None
                yield Row(what, num_bytes / seconds / 1e9, "GB/s", "copy", bandwidth / 1e9, bar)


def _seconds(sizes: Sizes, batch: int, context: int, group: int, num_bytes: int) -> float:
    heads, head_dim = sizes.model.num_query_heads, sizes.model.head_dim
    blocks_each = -(-context // BLOCK_SIZE)
    # Layers take turns: that many of them do not fit the cache of the card.
    num_layers = buffers_beyond_cache(num_bytes)
    model = replace(sizes.model, num_kv_heads=heads // group, num_layers=num_layers)
    with opened(model) as ops:
        layout = model.kv_layout(BLOCK_SIZE, ops.kv_dtype)
        query = ops.random(batch, heads, head_dim)
        limits = StepLimits(max_tokens=batch, max_sequences=batch, max_model_len=blocks_each * BLOCK_SIZE)
        ops.reserve(limits, layout, lambda step, cache: ops.paged_attention(query, cache, 0, step, 1.0, None))
        cache = ops.allocate_cache(layout, batch * blocks_each)
        ops.randomise(cache.data)
        tables = np.random.default_rng(0).permutation(batch * blocks_each).astype(np.int32).reshape(batch, blocks_each)
        step: Batch[HostArray] = Batch(
            token_ids=np.zeros(batch, np.int32),
            positions=np.full(batch, context - 1, np.int32),
            kv_extents=np.full(batch, context, np.int32),
            slots=tables[:, -1].astype(np.int64) * BLOCK_SIZE + (context - 1) % BLOCK_SIZE,
            cu_seqlens=np.arange(batch + 1, dtype=np.int32),
            rows=np.arange(batch, dtype=np.int32),
            block_tables=tables,
            sampled=np.arange(batch, dtype=np.int32),
            next_positions=np.full(batch, context, np.uint32),
        )
        on_device = ops.upload_batch(step, np.arange(tables.size))
        scale = head_dim**-0.5

        def attend(index: int) -> object:
            return ops.paged_attention(query, cache, index % num_layers, on_device, scale, None)

        return Clock(ops.stream, sizes.effort).seconds(attend, num_layers)
