"""Faults planted into real kernels: each is found, by the check mode, by numbers, or by the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tests.cuda import test_attention
from tests.cuda.emulated import Argument, EmulatorFault, Execution, Module, Order
from tests.cuda.kernels import Array, poisoned
from tests.cuda.test_attention import SPLIT, Model, Span
from tests.cuda.toolchain import CUDA

RNG = np.random.default_rng
SIZE = 520
"""Elements in a row: 65 vectors, so that the last warp of 96 threads is partly idle."""


def run_rms_norm(module: Module, execution: Execution) -> None:
    generator = RNG(0)
    hidden, residual = generator.standard_normal((2, 3, SIZE)).astype(np.float16)
    weight = generator.standard_normal(SIZE).astype(np.float32)
    normed, total = poisoned(hidden.shape, np.float16), poisoned(hidden.shape, np.float16)
    arguments = (hidden, residual, weight, normed, total, np.int32(SIZE), np.float32(1e-5))
    module.kernels["rms_norm"]((3,), (96,), arguments, execution=execution)
    x = (hidden + residual).astype(np.float32)
    expected = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_array_equal(total, hidden + residual)
    np.testing.assert_allclose(normed.astype(np.float32), expected, rtol=2e-3, atol=1e-4)


def run_embed(module: Module, execution: Execution) -> None:
    table = RNG(0).standard_normal((7, SIZE)).astype(np.float16)
    indices, out = np.array([6, 0, 3], np.int32), poisoned((3, SIZE), np.float16)
    module.kernels["embed"]((3,), (128,), (table, indices, out, np.int32(SIZE)), execution=execution)
    np.testing.assert_array_equal(out, table[indices])


def run_rope_and_cache(module: Module, execution: Execution) -> None:
    """Two tokens with three query heads and one KV head: the last block has idle warps."""
    generator = RNG(0)
    qkv = generator.standard_normal((2, 5, 80)).astype(np.float16)
    angles = generator.uniform(-3, 3, (9, 40))
    rope = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    positions, slots = np.array([8, 2], np.int32), np.array([5, 3])
    norm = generator.standard_normal(80).astype(np.float32)
    query, cache = poisoned((2, 3, 80), np.float16), np.zeros((2, 1, 2, 1, 4, 80), np.float16)
    sizes = [np.int32(size) for size in (3, 1, 1, 0, 4)]
    arguments: list[Argument] = [qkv, rope, positions, slots, norm, norm, query, cache, *sizes, np.float32(1e-5)]
    module.kernels["rope_and_cache"]((2, 2), (128,), arguments, execution=execution)

    x = qkv[:, :4].astype(np.float32)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * norm
    cos, sin = rope[positions, None, :, 0], rope[positions, None, :, 1]
    first, second = x[..., :40], x[..., 40:]
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    np.testing.assert_allclose(query.astype(np.float32), rotated[:, :3], rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(
        cache[slots // 4, 0, 0, 0, slots % 4].astype(np.float32), rotated[:, 3], rtol=2e-3, atol=1e-3
    )
    np.testing.assert_array_equal(cache[slots // 4, 0, 1, 0, slots % 4], qkv[:, 4])


def run_copy_blocks(module: Module, execution: Execution) -> None:
    before: Array = RNG(0).integers(0, 256, (4, 300 * 16), dtype=np.uint8)
    cache = before.copy()
    pairs = np.array([[3, 0], [2, 1]], np.int32)
    module.kernels["copy_blocks"]((2, 1), (256,), (cache, pairs, np.int32(300)), execution=execution)
    np.testing.assert_array_equal(cache, before[[3, 2, 2, 3]])


def run_linear(module: Module, execution: Execution) -> None:
    """linear_few on a row and a column more than a tile, over more steps than its ring has stages."""
    x, weight = (RNG(0).integers(-4, 5, (rows, 1000)).astype(np.float16) for rows in (17, 34))
    out = poisoned((17, 34), np.float16)
    kernel = module.kernels["linear_few"]
    kernel.max_dynamic_shared_size_bytes = shared = 6 * (16 + 32) * 128 * 2
    sizes = [np.int32(size) for size in (17, 34, 1000)]
    kernel((4,), (128,), (x, weight, None, out, *sizes), shared, execution=execution)
    np.testing.assert_array_equal(out, (x.astype(np.float32) @ weight.astype(np.float32).T).astype(np.float16))


def run_attention(module: Module, execution: Execution) -> None:
    """A chunk across two splits, a short prompt and decoded tokens, with a window."""
    model = Model("__half", 2, 3, 80, 16, (SPLIT + 17, 2 * SPLIT, 5), window=SPLIT + 20, seed=1)
    chunks = [Span(1, 2 * SPLIT - 1, 2 * SPLIT), Span(0, SPLIT - 10, SPLIT + 17), Span(2, 0, 5)]
    decoded = [Span(row, length - 1, length) for row, length in enumerate(model.lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_attention, "load", lambda *_, **__: module)
        for spans, name in ((chunks, "attention"), (decoded, "attention_decode")):
            model.assert_close(spans, model.attend(spans, name, execution.order))


RUNS: dict[str, Callable[[Module, Execution], None]] = {
    "rms_norm": run_rms_norm,
    "embed": run_embed,
    "rope_and_cache": run_rope_and_cache,
    "copy_blocks": run_copy_blocks,
    "linear": run_linear,
    "attention": run_attention,
}

OPTIONS = ("-DELEMENT=__half", "-DHEAD_DIM=80", f"-DKV_SPLIT={SPLIT}")


def source_of(name: str) -> str:
    """A kernel file; of linear.cu only the first of the kernels, which all come from one template."""
    source = (CUDA / f"{name}.cu").read_text(encoding="utf-8")
    if name != "linear":
        return source
    first, start, rest = source.partition('extern "C"')
    return first + start + rest.partition('extern "C"')[0]


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in a kernel file; `found` is in what is reported, or the numbers are wrong."""

    kernel: str
    what: str
    old: str
    new: str
    found: str


WRONG_NUMBERS = "wrong numbers"

FAULTS = [
    Fault("rms_norm", "no barrier", "__syncthreads();", "", "race in shared memory"),
    Fault(
        "rms_norm",
        "a barrier for some",
        "__syncthreads();",
        "if (threadIdx.x < 64) __syncthreads();",
        "__syncthreads after threads of the block have returned",
    ),
    Fault(
        "rms_norm",
        "divergent barriers",
        "__syncthreads();",
        "if (threadIdx.x < 64) __syncthreads(); else __syncthreads();",
        "divergent __syncthreads",
    ),
    Fault("rms_norm", "shared array too short", "sums_of_warps[32]", "sums_of_warps[2]", "index beyond the bounds"),
    Fault(
        "rms_norm",
        "one warp too many",
        "warp < blockDim.x / 32",
        "warp <= blockDim.x / 32",
        "read of uninitialised shared memory",
    ),
    Fault(
        "rms_norm",
        "early return before the shuffle",
        "float squares = 0.0f;",
        "float squares = 0.0f; if (threadIdx.x >= num_vectors) return;",
        "names lanes that have returned",
    ),
    Fault(
        "rms_norm",
        "half a mask",
        "0xffffffffu, squares",
        "0x0000ffffu, squares",
        "the calling lane is not in its own mask",
    ),
    Fault(
        "rms_norm",
        "shuffle in a branch",
        "for (int distance = 16; distance > 0; distance /= 2) squares",
        "for (int distance = 16; distance > 0; distance /= 2) if (threadIdx.x < 80) squares",
        "deadlock",
    ),
    Fault("rms_norm", "one step of the butterfly less", "distance = 16", "distance = 8", WRONG_NUMBERS),
    Fault(
        "rms_norm",
        "a vector too many",
        "i < num_vectors; i += blockDim.x) {\n        Row row = reinterpret_cast<const Row*>(rounded",
        "i <= num_vectors; i += blockDim.x) {\n        Row row = reinterpret_cast<const Row*>(rounded",
        "past the end of argument",
    ),
    Fault(
        "rms_norm",
        "weight shifted",
        "weight[i * Row::size + j]",
        "weight[i * Row::size + j + 1]",
        "past the end of argument 2",
    ),
    Fault("rms_norm", "misaligned row", "(hidden + start)[i]", "(hidden + start + 4)[i]", "misaligned"),
    Fault("rms_norm", "all rows write one", "(normed + start)[i] = row", "(normed)[i] = row", "race in argument 3"),
    Fault("embed", "index shifted", "indices[blockIdx.x]", "indices[blockIdx.x + 1]", "past the end of argument"),
    Fault(
        "embed",
        "row beyond the table",
        "indices[blockIdx.x])",
        "indices[blockIdx.x] + 1)",
        "past the end of argument 0",
    ),
    Fault("embed", "negative row", "indices[blockIdx.x])", "indices[blockIdx.x] - 1)", "before argument 0"),
    Fault("embed", "vectors left out", "i < size / Row::size", "i < size / Row::size - 1", WRONG_NUMBERS),
    Fault(
        "rope_and_cache",
        "no guard for idle warps",
        "if (head >= num_query_heads + 2 * num_kv_heads) return;",
        "",
        "past the end of argument",
    ),
    Fault(
        "rope_and_cache",
        "pair of two lanes",
        "step * 64 + lane * 2;\n        if (plane >= kPlanes) continue;\n        const float4",
        "step * 64 + lane;\n        if (plane >= kPlanes) continue;\n        const float4",
        "misaligned",
    ),
    Fault("rope_and_cache", "wrong sign", "x * cosines[j] - y", "x * cosines[j] + y", WRONG_NUMBERS),
    Fault(
        "rope_and_cache",
        "block and offset swapped",
        "block = slot / block_size, offset = slot % block_size",
        "block = slot % block_size, offset = slot / block_size",
        "past the end of argument 7",
    ),
    Fault("rope_and_cache", "value where key belongs", "* 2 + is_value)", "* 2)", "race in argument 7"),
    Fault(
        "copy_blocks",
        "source and destination swapped",
        "pairs[2 * blockIdx.x]",
        "pairs[2 * blockIdx.x + 1]",
        WRONG_NUMBERS,
    ),
    Fault(
        "copy_blocks",
        "guard on reads alone",
        "vectors_per_block) destination",
        "vectors_per_block + 1) destination",
        "race in argument 0",
    ),
    Fault("linear", "no barrier between steps", "__syncthreads();", "", "race in shared memory"),
    Fault(
        "linear", "wait one group too short", "cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>", "in flight"
    ),
    Fault("linear", "no wait", "cp_async_wait<kStages - 2>();", "", "in flight"),
    Fault("linear", "groups not closed", "cp_async_commit();", "", "in flight"),
    Fault(
        "linear", "a step ahead too far", "copy_stage(step + kStages - 1)", "copy_stage(step + kStages)", "in flight"
    ),
    Fault("linear", "no guard for rows", "if (row >= num_rows) continue;", "", "past the end of argument 3"),
    Fault("linear", "no guard for copies", "first + row < end && column", "column", "past the end of argument"),
    Fault("linear", "misaligned rows of a tile", "row * kDepth + (", "row * (kDepth + 4) + (", "multiple of"),
    Fault(
        "linear",
        "halves of B swapped",
        "k * 2 + lane / 8 % 2));\n            } else",
        "k * 2 + 1 - lane / 8 % 2));\n            } else",
        WRONG_NUMBERS,
    ),
    Fault("linear", "rows of C swapped", "half * 8 + lane / 4", "(1 - half) * 8 + lane / 4", WRONG_NUMBERS),
    Fault(
        "attention",
        "no barrier after the wait",
        "cp_async_wait<1>();\n            __syncthreads();",
        "cp_async_wait<1>();",
        "race in shared memory",
    ),
    Fault(
        "attention",
        "no barrier before the copy",
        "if (tile > first_tile) __syncthreads();",
        "",
        "race in shared memory",
    ),
    Fault(
        "attention", "wait one group too short", "cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>", "in flight"
    ),
    Fault(
        "attention",
        "a maximum not yet read",
        "__syncwarp();  // the maximum",
        "// the maximum",
        "race in shared memory",
    ),
    Fault(
        "attention",
        "result not yet complete",
        "__syncwarp();\n        start_split",
        "start_split",
        "race in shared memory",
    ),
    Fault(
        "attention",
        "next block of the table",
        "table[position / g.block_size]",
        "table[position / g.block_size + 1]",
        "wild 16-byte read",
    ),
    Fault("attention", "sees one position too many", "position + 1 : 0", "position + 2 : 0", WRONG_NUMBERS),
    Fault(
        "attention", "sees slots of nobody", "position >= begin && position < end", "position < end + 8", WRONG_NUMBERS
    ),
    Fault(
        "attention",
        "splits merged with the wrong scale",
        "split_scale = rescale(state.x, rise)",
        "split_scale = 1.0f",
        WRONG_NUMBERS,
    ),
    Fault("attention", "rows of nobody written", "if (row >= num_rows) continue;", "", "past the end of argument 7"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kernel}-{fault.what}".replace(" ", "-"))
def test_planted_fault(fault: Fault) -> None:
    source = source_of(fault.kernel)
    assert source.count(fault.old) >= 1, "the kernel has changed: plant the fault anew"
    module = Module(source.replace(fault.old, fault.new, 1), f"{fault.kernel}.cu", OPTIONS, checked=True)
    found = ""
    try:
        RUNS[fault.kernel](module, Execution(Order.SHUFFLED))
    except EmulatorFault as error:
        found = str(error)
    except AssertionError:
        found = WRONG_NUMBERS
    assert fault.found in found


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_found_where_nothing_is_planted(name: str) -> None:
    source = source_of(name)
    module = Module(source, f"{name}.cu", OPTIONS, checked=True)
    for order in Order:
        RUNS[name](module, Execution(order))
