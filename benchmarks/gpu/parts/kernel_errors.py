"""Every kernel's error: ||found - exact|| / ||exact||, `exact` being computed in float64 from the same rounded inputs.

A result in bfloat16 or float16 carries at least the error of its rounding, which stands beside it: a share of about 1
is as good as it gets. What only moves numbers, or returns float32, is far below that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from benchmarks.gpu.device import BLOCK_SIZE
from benchmarks.gpu.measured_sizes import Sizes
from benchmarks.gpu.rows import Row
from minipaged.config import Dtype
from minipaged.engine.loading import dimensions_of
from minipaged.models.rope import rope_tables
from minipaged.ops.base import (
    Batch,
    ElementTypes,
    HostArray,
    Penalties,
    SamplingBatch,
    StepLimits,
)
from minipaged.ops.cuda.ops import CudaOps
from minipaged.ops.reference.ops import ReferenceOps
from minipaged.ops.tensor import HostTensor
from minipaged.progress import no_progress

if TYPE_CHECKING:
    import cupy

Exact = NDArray[np.float64]
MOST_VOCABULARY = 8192
"""Of a larger head, whose float64 product would take a host too long, so many rows are computed."""


@dataclass(frozen=True, slots=True)
class Element:
    """A type of weights and activations."""

    name: Dtype
    encoding: str
    """As in `HostTensor`."""
    host: DTypeLike
    device: DTypeLike
    """What CuPy calls it."""


ELEMENTS = (
    Element("bfloat16", "BF16", ml_dtypes.bfloat16, np.uint16),
    Element("float16", "F16", np.float16, np.float16),
)


def run(sizes: Sizes) -> Iterator[Row]:
    for element in ELEMENTS:
        numbers = np.random.default_rng(0).standard_normal(10_000)
        rounding = _error(numbers.astype(element.host).astype(np.float64), numbers)
        check = KernelErrors(sizes, element)
        try:
            for name, found, exact in check.results():
                yield Row(f"{name}, {element.name}", _error(found, exact), "relative", "rounding", rounding)
        finally:
            check.ops.close()


class KernelErrors:
    """One element type's kernels on random inputs."""

    def __init__(self, sizes: Sizes, element: Element) -> None:
        self._model = model = sizes.model
        self._element = element
        self._random = np.random.default_rng(0)
        self._tokens = sizes.error_tokens
        self._positions = sizes.error_positions
        self.ops = CudaOps()
        types = ElementTypes(weights=element.name, cache="auto", stored=element.encoding)
        self.ops.prepare(dimensions_of(model, BLOCK_SIZE), types, no_progress)
        length = self._positions + self._tokens
        blocks = -(-length // BLOCK_SIZE)
        self._layout = replace(model, num_layers=1).kv_layout(BLOCK_SIZE, self.ops.kv_dtype)
        self._tables = self._random.permutation(2 * blocks).astype(np.int32).reshape(2, blocks)
        self._rope = rope_tables(model, length)
        limits = StepLimits(max_tokens=self._tokens + 1, max_sequences=2, max_model_len=blocks * BLOCK_SIZE)
        x, _ = self._array(self._tokens + 1, 4 * model.intermediate_size)
        # Nothing is kept small here: what does not fit is taken from CuPy's pool.
        self.ops.reserve(limits, self._layout, lambda batch, cache: self.ops.take(x, batch.positions))
        self._cache = self.ops.allocate_cache(self._layout, 2 * blocks)

    def results(self) -> Iterator[tuple[str, Exact, Exact]]:
        """Name, what the kernel found, and what is exact."""
        yield from self._rows()
        yield from self._products()
        yield from self._attention("prefill beside a decode", [(0, self._positions, 1), (1, 3, self._tokens)])
        yield from self._attention("decodes", [(0, self._positions, 1), (1, self._positions // 2, 1)])
        yield from self._choice()

    def _rows(self) -> Iterator[tuple[str, Exact, Exact]]:
        model, ops = self._model, self.ops
        table, exact_table = self._matrix("embedding", 300, model.hidden_size)
        ids = self._random.integers(0, 300, self._tokens).astype(np.int32)
        yield "embed", self._found(ops.embed(self._put(ids), table)), exact_table[ids]

        x, exact = self._array(self._tokens, model.hidden_size)
        weight = self._random.uniform(0.5, 1.5, model.hidden_size).astype(np.float32)
        normed = ops.rms_norm(x, self._put(weight), model.rms_norm_eps)
        yield "rms_norm", self._found(normed), _normed(exact, weight, model.rms_norm_eps)
        yield "take", self._found(ops.take(x, self._put(ids % self._tokens))), exact[ids % self._tokens]

    def _products(self) -> Iterator[tuple[str, Exact, Exact]]:
        model, ops = self._model, self.ops
        weight, exact_weight = self._matrix("linear", model.hidden_size, model.intermediate_size)
        bias = self._random.standard_normal(model.hidden_size).astype(np.float32)
        head, exact_head = self._matrix("head", min(MOST_VOCABULARY, model.vocab_size), model.hidden_size)
        gate, exact_gate = self._tensor("gate", model.intermediate_size, model.hidden_size)
        up, exact_up = self._tensor("up", model.intermediate_size, model.hidden_size)
        gate_up = ops.load_gate_up(gate, up)
        for count in sorted({max(1, self._tokens // 40), max(1, self._tokens // 5), self._tokens}):
            x, exact = self._array(count, model.intermediate_size)
            residual, exact_residual = self._array(count, model.hidden_size)
            found = self._found(ops.linear(x, weight, self._put(bias), residual))
            yield f"linear, {count} rows", found, exact @ exact_weight.T + bias + exact_residual
            x, exact = self._array(count, model.hidden_size)
            gated = exact @ exact_gate.T
            exact_gated = gated / (1 + np.exp(-gated)) * (exact @ exact_up.T)
            yield f"gated_linear, {count} rows", self._found(ops.gated_linear(x, gate_up, None)), exact_gated
            yield f"logits, {count} rows", ops.download(ops.logits(x, head)).astype(np.float64), exact @ exact_head.T

    def _attention(self, kind: str, spans: list[tuple[int, int, int]]) -> Iterator[tuple[str, Exact, Exact]]:
        """`spans`: row of the block tables, first position, number of tokens."""
        model, ops, num_blocks = self._model, self.ops, self._cache.num_blocks
        heads, group = model.num_query_heads, model.num_query_heads // model.num_kv_heads
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in spans]).astype(np.int32)
        rows = np.repeat([row for row, _, _ in spans], [count for _, _, count in spans])
        slots = self._tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        num_tokens = len(positions)
        last = np.cumsum([count for _, _, count in spans]).astype(np.int32) - 1
        host_batch: Batch[HostArray] = Batch(
            token_ids=np.zeros(num_tokens, np.int32),
            positions=positions,
            kv_extents=positions + 1,
            slots=slots,
            cu_seqlens=np.cumsum([0, *(count for _, _, count in spans)]).astype(np.int32),
            rows=np.array([row for row, _, _ in spans], np.int32),
            block_tables=self._tables,
            sampled=last,
            next_positions=(positions[last] + 1).astype(np.uint32),
        )
        batch = ops.upload_batch(host_batch, np.arange(self._tables.size))
        pool = ops.allocate_host_cache(self._layout, num_blocks)
        pool[:] = self._rounded(len(pool), pool.shape[1] // 2).view(np.uint8)
        everything = [(block, block) for block in range(num_blocks)]
        ops.blocks_from_host(pool, self._cache, everything).wait()

        qkv, exact_qkv = self._array(num_tokens, (heads + 2 * model.num_kv_heads) * model.head_dim)
        cos, sin = self._rope
        query = ops.rope_and_cache(qkv, ops.load_rope(cos, sin), self._cache, 0, batch, heads, None)
        attended = ops.paged_attention(query, self._cache, 0, batch, model.head_dim**-0.5, None)
        by_head = exact_qkv.reshape(num_tokens, -1, model.head_dim)
        rotated = _rotated(by_head[:, : heads + model.num_kv_heads], cos[positions], sin[positions])
        found_query = self._found(query)
        yield f"rope_and_cache, {kind}, queries", found_query, rotated[:, :heads]

        ops.blocks_to_host(self._cache, pool, everything).wait()
        cached = pool.view(self._element.host).astype(np.float64)
        cached = cached.reshape(num_blocks, 2, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
        written = cached[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE]
        yield f"rope_and_cache, {kind}, keys", written[:, 0], rotated[:, heads:]
        yield f"rope_and_cache, {kind}, values", written[:, 1], by_head[:, heads + model.num_kv_heads :]

        exact = np.empty_like(found_query)
        for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
            blocks = cached[self._tables[row, : position // BLOCK_SIZE + 1]]  # [blocks, 2, KV heads, slots, head_dim]
            keys, values = blocks.transpose(1, 2, 0, 3, 4).reshape(2, model.num_kv_heads, -1, model.head_dim)
            keys, values = keys[:, : position + 1], values[:, : position + 1]
            grouped = found_query[token].reshape(model.num_kv_heads, group, model.head_dim)
            scores = np.exp(_log_softmax(grouped @ keys.swapaxes(1, 2) * model.head_dim**-0.5))
            exact[token] = (scores @ values).reshape(heads, model.head_dim)
        yield f"attention, {kind}", self._found(attended).reshape(exact.shape), exact

    def _choice(self) -> Iterator[tuple[str, Exact, Exact]]:
        ops, count, vocabulary = self.ops, 8, self._model.vocab_size
        logits = (3 * self._random.standard_normal((count, vocabulary))).astype(np.float32)
        tokens = np.sort(self._random.choice(vocabulary, 50, replace=False)).astype(np.int32)
        host_penalties: Penalties[NDArray[np.generic]] = Penalties(
            rows=np.array([1], np.int32),
            starts=np.array([0, len(tokens)], np.int32),
            token_ids=tokens,
            counts=self._random.integers(0, 3, len(tokens)).astype(np.int32),
            repetition=np.array([1.2], np.float32),
            presence=np.array([0.3], np.float32),
            frequency=np.array([0.2], np.float32),
        )
        host_batch: SamplingBatch[NDArray[np.generic]] = SamplingBatch(
            temperature=np.full(count, 0.8, np.float32),
            top_k=np.full(count, 100, np.int32),
            top_p=np.full(count, 0.95, np.float32),
            min_p=np.full(count, 0.01, np.float32),
            seeds=np.arange(count, dtype=np.uint64),
            sample_index=np.zeros(count, np.uint32),
            positions=np.arange(count, dtype=np.uint32),
            num_logprobs=3,
            all_greedy=False,
        )
        reference = ReferenceOps()
        expected = reference.sample(logits, logits, host_batch)
        on_device = self._put(logits)
        penalties = Penalties(**{name: self._put(getattr(host_penalties, name)) for name in Penalties.__slots__})
        adjusted = ops.download(ops.adjust_logits(on_device, penalties, None)).astype(np.float64)
        yield "adjust_logits", adjusted, reference.adjust_logits(logits, host_penalties, None).astype(np.float64)
        fields = {
            name: self._put(getattr(host_batch, name))
            for name in SamplingBatch.__slots__
            if name not in ("num_logprobs", "all_greedy")
        }
        sampled = ops.sample(on_device, on_device, SamplingBatch(**fields, num_logprobs=3, all_greedy=False))
        yield "sample, token ids", sampled.token_ids.astype(np.float64), expected.token_ids.astype(np.float64)
        assert sampled.logprobs is not None
        exact = _log_softmax(logits.astype(np.float64))[np.arange(count), sampled.token_ids]
        yield "sample, log-probabilities", sampled.logprobs.astype(np.float64), exact

    # Random inputs, on the device and as the float64 numbers that they are

    def _rounded(self, *shape: int) -> NDArray[np.generic]:
        return self._random.standard_normal(shape, dtype=np.float32).astype(self._element.host)

    def _put(self, array: NDArray[np.generic]) -> cupy.ndarray:
        """On the device until the end; what `upload` gives lasts only for a step."""
        as_words = np.ascontiguousarray(array).view(np.float32)
        return self.ops._keep(as_words, "inputs").view(array.dtype)

    def _array(self, rows: int, columns: int) -> tuple[cupy.ndarray, Exact]:
        host = self._rounded(rows, columns)
        return self._put(host.view(self._element.device)), host.astype(np.float64)

    def _tensor(self, name: str, rows: int, columns: int) -> tuple[HostTensor, Exact]:
        host = (self._random.standard_normal((rows, columns)) * columns**-0.5).astype(self._element.host)

        def decode(some: NDArray[np.uint8]) -> NDArray[np.float32]:
            return some.view(self._element.host).astype(np.float32)

        tensor = HostTensor(name, (rows, columns), self._element.encoding, host.view(np.uint8), decode)
        return tensor, host.astype(np.float64)

    def _matrix(self, name: str, rows: int, columns: int) -> tuple[cupy.ndarray, Exact]:
        tensor, exact = self._tensor(name, rows, columns)
        return self.ops.load_matrix([tensor]), exact

    def _found(self, array: cupy.ndarray) -> Exact:
        found: Exact = self.ops.download(array).view(self._element.host).astype(np.float64)
        return found


def _error(found: Exact, exact: Exact) -> float:
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def _normed(x: Exact, weight: NDArray[np.float32], eps: float) -> Exact:
    scale: Exact = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    return x * scale * weight


def _rotated(x: Exact, cos: NDArray[np.float32], sin: NDArray[np.float32]) -> Exact:
    """x [tokens, heads, head_dim] by the angles of each token, halves against each other."""
    first, second = np.split(x, 2, axis=-1)
    cosines, sines = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def _log_softmax(x: Exact) -> Exact:
    shifted: Exact = x - x.max(axis=-1, keepdims=True)
    normaliser: Exact = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted - normaliser
