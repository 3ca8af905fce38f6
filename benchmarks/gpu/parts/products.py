"""The model's matrix products: TFLOP/s against cuBLAS through PyTorch, and for few rows GB/s against a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from benchmarks.gpu.clock import Clock, buffers_beyond_cache, copy_bandwidth
from benchmarks.gpu.device import BLOCK_SIZE, SCALE, RandomOps, opened
from benchmarks.gpu.measured_sizes import Sizes
from benchmarks.gpu.rows import Row
from benchmarks.gpu.torch_peer import ABSENT, has_torch, linear_seconds
from minipaged.ops.base import StepLimits

if TYPE_CHECKING:
    import cupy

    Multiply = Callable[[cupy.ndarray, cupy.ndarray], cupy.ndarray]

FEW_ROWS, MANY_ROWS = 16, 2048
BANDWIDTH_BAR, CUBLAS_BAR = 0.85, 0.7


def run(sizes: Sizes) -> Iterator[Row]:
    model = sizes.model
    queries, keys = (heads * model.head_dim for heads in (model.num_query_heads, model.num_kv_heads))
    bandwidth = copy_bandwidth(sizes.effort, sizes.copy_bytes)
    for name, outputs, inputs in (
        ("q, k and v", queries + 2 * keys, model.hidden_size),
        ("attention's output", model.hidden_size, queries),
        ("gate and up", 2 * model.intermediate_size, model.hidden_size),
        ("down", model.hidden_size, model.intermediate_size),
        ("head", model.vocab_size, model.hidden_size),
    ):
        rows = [count for count in sizes.product_rows if name != "head" or count <= sizes.most_head_rows]
        buffers = buffers_beyond_cache(outputs * inputs * 2)
        for count, seconds in zip(rows, _seconds(sizes, name, outputs, inputs, rows, buffers), strict=True):
            what = f"{name}, {count:,} rows"
            operations = 2 * count * outputs * inputs / 1e12
            bar = CUBLAS_BAR if count >= MANY_ROWS else None
            if has_torch():
                peer = operations / linear_seconds(count, outputs, inputs, buffers, sizes.effort)
                yield Row(what, operations / seconds, "TFLOP/s", "cuBLAS", peer, bar)
            else:
                yield Row(what, operations / seconds, "TFLOP/s", "cuBLAS", note=ABSENT)
            if count <= FEW_ROWS:
                num_bytes = 2 * (outputs * inputs + count * (inputs + outputs))
                yield Row(what, num_bytes / seconds / 1e9, "GB/s", "copy", bandwidth / 1e9, BANDWIDTH_BAR)


def _seconds(sizes: Sizes, name: str, outputs: int, inputs: int, rows: list[int], buffers: int) -> list[float]:
    """Of one product, for each number of rows."""
    with opened(sizes.model) as ops:
        weights = [ops.random(outputs, inputs, scale=SCALE) for _ in range(buffers)]
        x = ops.random(max(rows), inputs)
        multiply = _operation(ops, name)
        limits = StepLimits(max_tokens=max(rows), max_sequences=1, max_model_len=BLOCK_SIZE)
        layout = sizes.model.kv_layout(BLOCK_SIZE, ops.kv_dtype)
        ops.reserve(limits, layout, lambda step, cache: multiply(x[: len(step.token_ids)], weights[0]))
        clock = Clock(ops.stream, sizes.effort)

        def of(count: int) -> Callable[[int], object]:
            return lambda index: multiply(x[:count], weights[index % buffers])

        return [clock.seconds(of(count), buffers) for count in rows]


def _operation(ops: RandomOps, name: str) -> Multiply:
    if name == "gate and up":
        return lambda x, weight: ops.gated_linear(x, weight, None)
    if name == "head":
        return ops.logits
    return lambda x, weight: ops.linear(x, weight, None, None)
