"""KV blocks to the host and back, in a random order, against a copy to and from page-locked memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.gpu.clock import host_copy_bandwidth, wall_seconds
from benchmarks.gpu.device import BLOCK_SIZE, opened
from benchmarks.gpu.measured_sizes import Sizes
from benchmarks.gpu.rows import Row
from minipaged.ops.base import StepLimits


def run(sizes: Sizes) -> Iterator[Row]:
    model, count, repeats = sizes.model, sizes.swap_blocks, sizes.effort.repeats
    with opened(model) as ops:
        layout = model.kv_layout(BLOCK_SIZE, ops.kv_dtype)
        limits = StepLimits(max_tokens=1, max_sequences=1, max_model_len=BLOCK_SIZE)
        x = ops.random(1, model.hidden_size)
        ops.reserve(limits, layout, lambda step, cache: ops.take(x, step.token_ids))
        cache = ops.allocate_cache(layout, count)
        ops.randomise(cache.data)
        host = ops.allocate_host_cache(layout, count)
        order = [int(block) for block in np.random.default_rng(0).permutation(count)]
        pairs = list(zip(order, range(count), strict=True))
        backwards = [(slot, block) for block, slot in pairs]
        out = wall_seconds(lambda: ops.blocks_to_host(cache, host, pairs).wait(), repeats)
        back = wall_seconds(lambda: ops.blocks_from_host(host, cache, backwards).wait(), repeats)
    for what, seconds, to_host in (("swap out", out, True), ("swap in", back, False)):
        limit = host_copy_bandwidth(host.nbytes, repeats, to_host=to_host)
        note = f"{count} blocks of {host.nbytes / count / 2**20:.2g} MiB"
        yield Row(what, host.nbytes / seconds / 1e9, "GB/s", "pinned copy", limit / 1e9, note=note)
