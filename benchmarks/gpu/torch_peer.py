"""PyTorch beside: what its matrix product (cuBLAS) and its attention take for the same sizes. Optional."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable

from benchmarks.gpu.measured_sizes import Effort

ABSENT = "torch is not installed"


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def linear_seconds(rows: int, outputs: int, inputs: int, buffers: int, effort: Effort) -> float:
    """x [rows, inputs] @ weight [outputs, inputs].T in bfloat16, by so many weights in turn."""
    import torch

    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(buffers)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        return _seconds(lambda index: torch.nn.functional.linear(x, weights[index % buffers]), buffers, effort)


def attention_seconds(length: int, num_query_heads: int, num_kv_heads: int, head_dim: int, effort: Effort) -> float:
    """Causal attention of one sequence, in bfloat16, by whichever kernel PyTorch takes."""
    import torch

    def random(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)

    query, key, value = random(num_query_heads), random(num_kv_heads), random(num_kv_heads)
    group = num_query_heads // num_kv_heads
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    with torch.inference_mode():
        attention = torch.nn.functional.scaled_dot_product_attention
        return _seconds(lambda _: attention(query, key, value, is_causal=True), 1, effort)


def _seconds(launch: Callable[[int], object], buffers: int, effort: Effort) -> float:
    """As `Clock.seconds`."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def elapsed(work: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3

    with torch.cuda.stream(stream):
        calls = range(max(3, buffers))
        estimate = 0.0
        for _ in range(2):
            estimate = elapsed(lambda: [launch(index) for index in calls]) / len(calls)
        wanted = effort.seconds / effort.repeats / max(estimate, 1e-7)
        count = max(buffers, min(effort.most_calls, max(1, round(wanted))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(count):
                launch(index)
        times = [elapsed(graph.replay) for _ in range(effort.repeats + 1)]
    return statistics.median(times[1:]) / count
