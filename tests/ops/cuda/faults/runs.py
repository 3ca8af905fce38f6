"""Launches of every kernel that are hard to pass: run with a fault planted, and without."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged.ops.base import Bias, Penalties, SamplingBatch
from minipaged.ops.cuda import launches
from minipaged.ops.cuda.launches import GATED, LINEAR, Launch
from minipaged.ops.reference import sampling as reference_sampling
from tests.ops.cuda import attention_model, sampling_kernels
from tests.ops.cuda.attention_model import SPLIT, LowScores, Model, Span
from tests.ops.cuda.emulated import Argument, Execution, Module
from tests.ops.cuda.faults.apart import ModuleApart
from tests.ops.cuda.kernels import Array, poisoned
from tests.ops.cuda.kv_layouts import slots_of, uneven_layout
from tests.ops.cuda.toolchain import CUDA

RNG = np.random.default_rng
SIZE = 520
"""Elements in a row: 65 vectors, so that the last warp of 96 threads is partly idle."""

OPTIONS = ("-DELEMENT=__half", "-DHEAD_DIM=80", f"-DKV_SPLIT={SPLIT}")

Floats = NDArray[np.float32]
Function = Callable[[ModuleApart, Execution], None]


@dataclass(frozen=True)
class Run:
    """Kernels of a file, launched and compared with what they should compute."""

    function: Function
    file: str
    kernels: tuple[str, ...]

    def launch(self, source: str, execution: Execution) -> None:
        """With the kernels of this source, in check mode."""
        module = Module(source, f"{self.file}.cu", OPTIONS, checked=True)
        self.function(ModuleApart(module), execution)

    def source(self) -> str:
        """The file without its other kernels, so that it compiles sooner."""
        text = (CUDA / f"{self.file}.cu").read_text(encoding="utf-8")
        begin, *kernels = re.split(r'^(?=extern "C" |KERNEL\w*\()', text, flags=re.MULTILINE)
        kept = [
            text for text in kernels if any(re.search(rf"\b{kernel}\(|\({kernel},", text) for kernel in self.kernels)
        ]
        assert len(kept) == len(self.kernels), f"{self.file}.cu has no longer each of {self.kernels}"
        return begin + "".join(kept)


def assert_close(actual: Array, expected: Floats, *, atol: float = 1e-4) -> None:
    np.testing.assert_allclose(actual.astype(np.float32), expected, rtol=2e-3, atol=atol)


def launch(
    module: ModuleApart, kernel: str, shape: Launch, arguments: Sequence[Argument], execution: Execution
) -> None:
    function = module.kernels[kernel]
    function.max_dynamic_shared_size_bytes = max(shape.shared_bytes, function.max_dynamic_shared_size_bytes)
    function(shape.grid, (shape.threads,), arguments, shape.shared_bytes, execution=execution)


def run_rms_norm(module: ModuleApart, execution: Execution) -> None:
    """An eps that tells, so that it cannot be forgotten."""
    generator = RNG(0)
    rows = generator.standard_normal((3, SIZE)).astype(np.float16)
    weight = generator.standard_normal(SIZE).astype(np.float32)
    out = poisoned(rows.shape, np.float16)
    arguments = (rows, weight, out, np.int32(SIZE), np.float32(0.3))
    launch(module, "rms_norm", launches.rms_norm(3, SIZE), arguments, execution)
    x = rows.astype(np.float32)
    assert_close(out, x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 0.3) * weight)


def run_embed(module: ModuleApart, execution: Execution) -> None:
    table = RNG(0).standard_normal((7, SIZE)).astype(np.float16)
    indices, out = np.array([6, 0, 3], np.int32), poisoned((3, SIZE), np.float16)
    launch(module, "embed", launches.embed(3), (table, indices, out, np.int32(SIZE)), execution)
    np.testing.assert_array_equal(out, table[indices])


def run_rope_and_cache(module: ModuleApart, execution: Execution) -> None:
    """Two tokens, three query heads, two KV heads, the second of two layers: the last block has an idle warp."""
    generator = RNG(0)
    qkv = generator.standard_normal((2, 7, 80)).astype(np.float16)
    qkv[0, 5, 3] = qkv[0, 6, 45] = np.inf  # in values, where they must stay alone
    angles = generator.uniform(-3, 3, (9, 40))
    rope = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    positions, slots = np.array([8, 2], np.int32), np.array([7, 2])
    q_norm, k_norm = generator.standard_normal((2, 80)).astype(np.float32)
    layout = uneven_layout(num_layers=2, num_kv_heads=2, head_dim=80, block_size=4, element_type="float16")
    query, cache = poisoned((2, 3, 80), np.float16), np.zeros((2, layout.bytes_per_block // 2), np.float16)
    arguments: list[Argument] = [qkv, rope, positions, slots, q_norm, k_norm, query, cache]
    arguments += [*map(np.int32, (3, 2, 4)), *launches.kv_strides(layout, 1), np.float32(0.3)]
    launch(module, "rope_and_cache", launches.rope_and_cache(2, 7), arguments, execution)

    x = qkv[:, :5].astype(np.float32)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.3)
    x[:, :3] *= q_norm
    x[:, 3:] *= k_norm
    cos, sin = rope[positions, None, :, 0], rope[positions, None, :, 1]
    first, second = x[..., :40], x[..., 40:]
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    assert_close(query, rotated[:, :3], atol=1e-3)
    expected = np.zeros_like(cache)
    for elements, written in zip(slots_of(expected, layout, 1), (rotated[:, 3:], qkv[:, 5:]), strict=True):
        elements[slots // 4, :, slots % 4] = written
    assert_close(cache, expected.astype(np.float32), atol=1e-3)


def run_copy_blocks(module: ModuleApart, execution: Execution) -> None:
    """Blocks of a little more than what one block of threads copies."""
    before: Array = RNG(0).integers(0, 256, (4, 1100 * 16), dtype=np.uint8)
    cache = before.copy()
    pairs = np.array([[3, 0], [2, 1]], np.int32)
    launch(module, "copy_blocks", launches.kv_blocks(2, 1100), (cache, pairs, np.int32(1100)), execution)
    np.testing.assert_array_equal(cache, before[[3, 2, 2, 3]])


def run_fill_blocks(module: ModuleApart, execution: Execution) -> None:
    cache = np.zeros((4, 1100 * 8), np.float16)
    blocks = np.array([3, 1], np.int32)
    arguments = (cache, blocks, np.float32(0.1), np.int32(1100))
    launch(module, "fill_blocks", launches.kv_blocks(2, 1100), arguments, execution)
    np.testing.assert_array_equal(cache[[0, 2]], 0)
    np.testing.assert_array_equal(cache[[1, 3]], np.float16(0.1))


def run_take(module: ModuleApart, execution: Execution) -> None:
    """Rows of a little more than what one block of threads copies."""
    x: Array = RNG(0).integers(0, 99, (5, 1100), dtype=np.int32)
    indices, out = np.array([4, 0, 4], np.int32), np.zeros((3, 1100), np.int32)
    launch(module, "take", launches.take(3, 1100), (x, indices, out, np.int32(1100)), execution)
    np.testing.assert_array_equal(out, x[indices])


def run_update_tables(module: ModuleApart, execution: Execution) -> None:
    """One entry more than a block has threads."""
    tables = np.full((3, 200), -1, np.int32)
    places, blocks = RNG(0).permutation(600)[:257], np.arange(257, dtype=np.int32)
    launch(module, "update_tables", launches.update_tables(257), (tables, places, blocks, np.int32(257)), execution)
    expected = np.full(600, -1)
    expected[places] = blocks
    np.testing.assert_array_equal(tables.ravel(), expected)


def run_linear(module: ModuleApart, execution: Execution) -> None:
    """linear_few on a row and two columns more than a tile, over more steps than its ring has stages."""
    x, weight = (RNG(0).integers(-4, 5, (rows, 1000)).astype(np.float16) for rows in (17, 34))
    residual = RNG(1).integers(-99, 100, (17, 34)).astype(np.float16) / 8  # where a sum is large, it is rounded
    out = poisoned((17, 34), np.float16)
    sizes = [np.int32(size) for size in (17, 34, 1000)]
    launch(module, "linear_few", LINEAR[0].launch(17, 34), (x, weight, None, residual, out, *sizes), execution)
    sums = x.astype(np.float32) @ weight.astype(np.float32).T + residual
    np.testing.assert_array_equal(out, sums.astype(np.float16))


def run_gated_linear(module: ModuleApart, execution: Execution) -> None:
    """linear_few_gated on a row and two columns more than a tile."""
    x, weight = (RNG(0).integers(-2, 3, (rows, 72)).astype(np.float16) / 8 for rows in (17, 66))
    bias = RNG(1).standard_normal(66).astype(np.float32)
    out = poisoned((17, 33), np.float16)
    sizes = [np.int32(size) for size in (17, 66, 72)]
    launch(module, "linear_few_gated", GATED[0].launch(17, 66), (x, weight, bias, out, *sizes), execution)
    products = x.astype(np.float32) @ weight.astype(np.float32).T + bias
    gate, up = products[:, ::2], products[:, 1::2]
    assert_close(out, gate / (1 + np.exp(-gate)) * up, atol=1e-3)


def run_attention(module: ModuleApart, execution: Execution) -> None:
    """A chunk across two splits, one within the second, a short prompt and decoded tokens, with a window.

    Then the same with scores far below zero, whose exponentials are 0 unless the maximum is subtracted first.
    """
    lengths = (SPLIT + 17, 2 * SPLIT, 5, SPLIT + 30)
    model = Model("__half", 2, 3, 80, 16, lengths, window=SPLIT + 20, seed=1)
    low = LowScores("__half", 2, 3, 80, 16, lengths, window=SPLIT + 20, seed=1)
    chunks = [Span(1, 2 * SPLIT - 1, 2 * SPLIT), Span(0, SPLIT - 10, SPLIT + 17), Span(2, 0, 5)]
    chunks += [Span(3, SPLIT + 20, SPLIT + 23)]
    decoded = [Span(row, length - 1, length) for row, length in enumerate(model.lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_model, "load", lambda *_, **__: module)
        for spans, name in ((chunks, "attention"), (decoded, "attention_decode")):
            for each in (model, low):
                each.assert_close(spans, each.attend(spans, name, execution.order))


VOCAB_SIZE = 700
"""More than one token for each thread, and not a whole number of them."""


def run_sample(module: ModuleApart, execution: Execution) -> None:
    """Of five settings several seeds each, some where the last token kept is often drawn; then the odd rows."""
    num_draws = 8
    num_rows = 5 * num_draws + 5
    logits = RNG(3).normal(scale=2, size=(num_rows, VOCAB_SIZE)).astype(np.float32)
    logits[16:24] = np.where(RNG(4).random(VOCAB_SIZE) < 0.01, 1, -np.inf)
    logits[24:32] = RNG(4).choice([0.0, -0.0], VOCAB_SIZE)
    tie, infinite, poison, only_infinite, hopeless = range(num_rows - 5, num_rows)
    logits[tie, [699, 3, 130, 40]] = 50
    logits[infinite, [650, 699]] = np.inf
    logits[poison, 300] = np.nan
    logits[only_infinite] = np.where(np.arange(VOCAB_SIZE) == 9, np.inf, -np.inf)
    logits[hopeless] = -np.inf
    setting = np.minimum(np.arange(num_rows) // num_draws, 5)
    batch: SamplingBatch[Array] = SamplingBatch(
        temperature=np.where(np.arange(num_rows) == tie, 0, 1.5).astype(np.float32),
        top_k=np.choose(setting, [VOCAB_SIZE, 20, VOCAB_SIZE, 5, 20, VOCAB_SIZE]).astype(np.int32),
        top_p=np.choose(setting, [1, 1, 0.5, 1, 0.6, 1]).astype(np.float32),
        min_p=np.choose(setting, [0.02, 0, 0, 0, 0.1, 0]).astype(np.float32),
        seeds=RNG(5).integers(2**64, size=num_rows, dtype=np.uint64),
        sample_index=RNG(6).integers(128, size=num_rows, dtype=np.uint32),
        positions=RNG(7).integers(2**31, size=num_rows, dtype=np.uint32),
        num_logprobs=-1,
        all_greedy=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_kernels, "load", lambda *_, **__: module)
        ours = sampling_kernels.sample(logits, logits, batch, execution.order)
    sampling_kernels.assert_equal(ours, reference_sampling.sample(logits, logits, batch))


def run_logprobs(module: ModuleApart, execution: Execution) -> None:
    """Ties at the end of the most likely tokens, infinity, NaN, nothing, and no token."""
    logits = (np.round(RNG(3).normal(size=(6, VOCAB_SIZE)) * 4) / 4).astype(np.float32)
    logits[1, 3], logits[2, 680], logits[3] = np.inf, np.nan, -np.inf
    logits[4, 100:] = -np.inf
    token_ids = np.array([7, 699, 1, 2, 3, -1], np.int32)
    num_top = 20
    chosen, top_ids = poisoned((6,), np.float32), poisoned((6, num_top), np.int32)
    top_logprobs = poisoned((6, num_top), np.float32)
    arguments = (logits, token_ids, chosen, top_ids, top_logprobs, np.int32(VOCAB_SIZE), np.int32(num_top))
    launch(module, "logprobs", launches.choose(6), arguments, execution)
    expected, expected_ids, expected_top = reference_sampling.logprobs(logits, token_ids, num_top)
    np.testing.assert_allclose(chosen.astype(np.float32), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(top_ids, expected_ids)
    np.testing.assert_allclose(top_logprobs.astype(np.float32), expected_top, rtol=1e-6, atol=1e-6)


def run_penalise(module: ModuleApart, execution: Execution) -> None:
    """More entries than a block has threads, a row without any, and rows in another order than their logits."""
    generator = RNG(0)
    logits = generator.normal(size=(5, VOCAB_SIZE)).astype(np.float32)
    tokens = [generator.permutation(VOCAB_SIZE)[:size] for size in (400, 0, 1, 213)]
    penalties: Penalties[Array] = Penalties(
        rows=np.array([3, 1, 4, 0], np.int32),
        starts=np.cumsum([0, *map(len, tokens)], dtype=np.int32),
        token_ids=np.concatenate(tokens).astype(np.int32),
        counts=np.maximum(generator.integers(-2, 4, 614), 0).astype(np.int32),
        repetition=np.array([1.5, 2, 3, 0.7], np.float32),
        presence=np.array([0.5, 7, -1, 0.25], np.float32),
        frequency=np.array([-0.5, 8, 1, 2], np.float32),
    )
    _assert_adjusts(module, execution, logits, penalties, None)


def run_add_bias(module: ModuleApart, execution: Execution) -> None:
    """Tokens with several biases, within 32 entries and across them; in float32 their order tells."""
    generator = RNG(0)
    bias: Bias[Array] = Bias(
        rows=generator.integers(0, 2, 75).astype(np.int32),
        token_ids=generator.integers(0, 8, 75).astype(np.int32),
        values=generator.normal(scale=100, size=75).astype(np.float32),
    )
    _assert_adjusts(module, execution, generator.normal(size=(3, 8)).astype(np.float32), None, bias)


def _assert_adjusts(
    module: ModuleApart,
    execution: Execution,
    logits: NDArray[np.float32],
    penalties: Penalties[Array] | None,
    bias: Bias[Array] | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_kernels, "load", lambda *_, **__: module)
        adjusted = sampling_kernels.adjust_logits(logits, penalties, bias, execution.order)
    np.testing.assert_array_equal(adjusted, reference_sampling.adjust_logits(logits, penalties, bias))


RUNS = {
    "rms_norm": Run(run_rms_norm, "rms_norm", ("rms_norm",)),
    "embed": Run(run_embed, "embed", ("embed",)),
    "rope_and_cache": Run(run_rope_and_cache, "rope_and_cache", ("rope_and_cache",)),
    "copy_blocks": Run(run_copy_blocks, "copy_blocks", ("copy_blocks",)),
    "fill_blocks": Run(run_fill_blocks, "fill_blocks", ("fill_blocks",)),
    "take": Run(run_take, "take", ("take",)),
    "update_tables": Run(run_update_tables, "update_tables", ("update_tables",)),
    "linear": Run(run_linear, "linear", ("linear_few",)),
    "gated_linear": Run(run_gated_linear, "linear", ("linear_few_gated",)),
    "attention": Run(run_attention, "attention", ("attention_decode", "attention", "attention_combine")),
    "sample": Run(run_sample, "sampling", ("sample",)),
    "logprobs": Run(run_logprobs, "sampling", ("logprobs",)),
    "penalise": Run(run_penalise, "sampling", ("penalise",)),
    "add_bias": Run(run_add_bias, "sampling", ("add_bias",)),
}
