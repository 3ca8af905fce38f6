"""Offsets beyond 2**31 elements: arrays that take memory only where they are touched, and only the last blocks run."""

from __future__ import annotations

from tempfile import TemporaryFile

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from minipaged.ops.cuda import launches
from minipaged.ops.cuda.launches import LINEAR, Tile
from minipaged.ops.reference.ops import ReferenceOps
from tests.ops.cuda.emulated import Execution, Kernel, load
from tests.ops.cuda.kernels import Kernels
from tests.ops.cuda.toolchain import CUDA

LAST = Execution(num_last_blocks=1)
NUM_ROWS = 2**20
SIZE = 2056
"""More than 2**31 elements in so many rows."""


def kernel(file: str, name: str) -> Kernel:
    return load(CUDA / f"{file}.cu", ("-DELEMENT=__half",)).kernels[name]


def test_embed() -> None:
    table = np.zeros((NUM_ROWS, SIZE), np.float16)
    table[-1] = np.arange(SIZE)
    np.testing.assert_array_equal(Kernels("__half").embed(table, np.array([NUM_ROWS - 1], np.int32))[0], table[-1])


def test_rms_norm() -> None:
    x, out = np.zeros((2, NUM_ROWS, SIZE), np.float16)
    x[-1] = np.arange(SIZE) % 7
    weight = np.linspace(0, 1, SIZE, dtype=np.float32)
    arguments = (x, weight, out, np.int32(SIZE), np.float32(1e-5))
    launch = launches.rms_norm(NUM_ROWS, SIZE)
    kernel("rms_norm", "rms_norm")(launch.grid, (launch.threads,), arguments, execution=LAST)
    expected = ReferenceOps().rms_norm(x[-1:].astype(np.float32), weight, 1e-5)
    np.testing.assert_allclose(out[-1:].astype(np.float32), expected.astype(np.float32), rtol=2e-3)


def test_rope_and_cache() -> None:
    cache = np.zeros((2**19, 1, 2, 1, 64, 64), ml_dtypes.bfloat16)
    qkv = np.ones((1, 3 * 64), ml_dtypes.bfloat16)
    rope = np.stack([np.ones((1, 32), np.float32), np.zeros((1, 32), np.float32)], axis=-1)
    position, slot = np.zeros(1, np.int32), np.array([2**19 * 64 - 1])
    Kernels("__nv_bfloat16").rope_and_cache(qkv, rope, position, slot, cache, 0, 1, None)
    assert cache[-1, 0, :, 0, -1].astype(np.float32).tolist() == [[1.0] * 64] * 2


def test_copy_blocks_and_fill_blocks() -> None:
    """More than 2**31 vectors of 16 bytes, 64 GiB: in a file with holes, since nobody has so much memory."""
    with TemporaryFile() as file:
        cache = np.memmap(file, np.float16, "w+", shape=(2**20, 2**15))
    cache[-1] = np.arange(2**15) % 99
    Kernels("__half").copy_blocks(cache, np.array([[2**20 - 1, 2**20 - 2]], np.int32))
    np.testing.assert_array_equal(cache[-2], cache[-1])
    Kernels("__half").fill_blocks(cache, np.array([2**20 - 1], np.int32), 0.5)
    np.testing.assert_array_equal(cache[-1], np.float16(0.5))
    np.testing.assert_array_equal(cache[-3], 0)


def test_blocks_of_more_than_a_gigabyte() -> None:
    """As many blocks of threads for each as a grid has in its x alone."""
    size = 2**16 * 1024 * 8 + 8
    with TemporaryFile() as file:
        cache = np.memmap(file, np.float16, "w+", shape=(3, size))
    cache[0, -8:] = np.arange(8)
    kernels = Kernels("__half", execution=LAST)
    kernels.copy_blocks(cache, np.array([[1, 2], [0, 1]], np.int32))
    assert cache[1, -8:].tolist() == [*range(8)]
    kernels.fill_blocks(cache, np.array([1, 2], np.int32), 0.5)
    assert cache[1:, -8:].tolist() == [[*range(8)], [0.5] * 8]


def multiply_last(tile: Tile, x: NDArray[np.float16], weight: NDArray[np.float16]) -> None:
    """The last tile of x @ weight.T + residual by a kernel; compared with NumPy's."""
    residual, out = np.zeros((2, len(x), len(weight)), np.float16)
    residual[-1, -tile.columns :] = np.arange(tile.columns) % 5
    launch = tile.launch(len(x), len(weight))
    function = kernel("linear", tile.kernel)
    function.max_dynamic_shared_size_bytes = launch.shared_bytes
    sizes = [np.int32(size) for size in (len(x), len(weight), x.shape[1])]
    arguments = (x, weight, None, residual, out, *sizes)
    function(launch.grid, (launch.threads,), arguments, launch.shared_bytes, execution=LAST)
    rows, columns = x[-tile.rows :].astype(np.float32), weight[-tile.columns :].astype(np.float32)
    expected = rows @ columns.T + residual[-tile.rows :, -tile.columns :]
    np.testing.assert_array_equal(out[-tile.rows :, -tile.columns :], expected.astype(np.float16))


def test_linear_of_many_rows() -> None:
    x, weight = np.zeros((NUM_ROWS, SIZE), np.float16), np.zeros((2048 + 32, SIZE), np.float16)
    generator = np.random.default_rng(0)
    x[-128:] = generator.integers(-2, 3, (128, SIZE))
    weight[-128:] = generator.integers(-2, 3, (128, SIZE))
    multiply_last(LINEAR[0], x, weight)


def test_linear_of_many_columns() -> None:
    x, weight = np.ones((3, SIZE), np.float16), np.zeros((NUM_ROWS, SIZE), np.float16)
    weight[-128:] = np.random.default_rng(0).integers(-2, 3, (128, SIZE))
    for tile in LINEAR:
        multiply_last(tile, x, weight)


def test_sampling() -> None:
    """The last of 2**15 rows of 2**17 logits, and its log-probabilities."""
    num_rows, vocab_size = 2**14 + 1, 2**17
    logits = np.zeros((num_rows, vocab_size), np.float32)
    logits[-1, 77_777] = 30
    per_row = np.zeros(num_rows, np.float32)
    token_ids = np.zeros(num_rows, np.int32)
    arguments = (logits, per_row, token_ids, per_row, per_row, np.zeros(num_rows, np.uint64))
    positions = np.zeros(num_rows, np.uint32)
    module = load(CUDA / "sampling.cu")
    launch, bias_launch = launches.choose(num_rows), launches.add_bias(num_rows)
    module.kernels["sample"](
        launch.grid,
        (launch.threads,),
        (*arguments, positions, positions, token_ids, np.int32(vocab_size)),
        execution=LAST,
    )
    assert token_ids[-1] == 77_777
    chosen, top = np.zeros(num_rows, np.float32), np.zeros((num_rows, 1), np.float32)
    top_ids = np.zeros((num_rows, 1), np.int32)
    module.kernels["logprobs"](
        launch.grid,
        (launch.threads,),
        (logits, token_ids, chosen, top_ids, top, np.int32(vocab_size), np.int32(1)),
        execution=LAST,
    )
    assert top_ids[-1] == 77_777
    assert abs(chosen[-1]) < 1e-6
    module.kernels["add_bias"](
        bias_launch.grid,
        (bias_launch.threads,),
        (
            logits,
            np.array([num_rows - 1], np.int32),
            np.array([5], np.int32),
            np.array([3], np.float32),
            np.int32(1),
            np.int32(vocab_size),
        ),
        execution=LAST,
    )
    assert logits[-1, 5] == 3
