"""CudaOps on the fake GPU, against ReferenceOps: what it computes, keeps, refuses and frees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.errors import ConfigError, DeviceError, ModelLoadError, UnsupportedModelError
from minipaged.ops.base import Batch, Dimensions, ElementTypes, HostArray
from minipaged.ops.cuda import batch as cuda_batch
from minipaged.ops.cuda import ops as cuda_ops
from minipaged.ops.cuda import sampling as cuda_sampling
from minipaged.ops.cuda.ops import CudaOps
from minipaged.ops.cuda.transfers import runs
from minipaged.ops.cuda.weights import HOST_TYPES
from minipaged.ops.reference import sampling as reference_sampling
from minipaged.ops.reference.ops import ReferenceOps
from minipaged.progress import no_progress
from tests.batches import NOWHERE, TokenSpan, make_batch
from tests.ops.cuda.fake_cupy import Function, Graph, Stream
from tests.ops.cuda.fake_gpu import CudaError, Gpu, Timing
from tests.ops.cuda.machine import KV_SPLIT, DeviceType, Machine, use_fake_gpu
from tests.ops.cuda.sampling_kernels import assert_equal, random_adjustments, random_batch, random_logits
from tests.ops.encoded import float_tensor, random_tensor
from tests.tiny import write_tiny_model

if TYPE_CHECKING:
    import cupy

ELEMENTS: tuple[DeviceType, ...] = ("float16", "bfloat16")
TOLERANCES = {"float16": 0.05, "bfloat16": 0.4}
"""Of logits up to 9, after two layers whose activations are rounded to the type; three times what is usual."""

MAX_MODEL_LEN = 256
BLOCK_SIZE = 16
NUM_ROWS = 12
COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
TABLES = np.random.default_rng(0).permutation(NUM_ROWS * COLUMNS).astype(np.int32).reshape(NUM_ROWS, COLUMNS)
NUM_BLOCKS = NUM_ROWS * COLUMNS

Array = NDArray[np.generic]
T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads to a group, biases, and a vocabulary that is no multiple of anything."""
    return write_tiny_model(
        tmp_path_factory.mktemp("cuda") / "tiny",
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=301,
        attention_bias=True,
        mlp_bias=True,
        dtype="float16",
    )


@pytest.fixture(scope="module")
def model_with_norms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms of heads."""
    return write_tiny_model(
        tmp_path_factory.mktemp("cuda") / "tiny",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=301,
        model_type="qwen3",
        dtype="bfloat16",
    )


@contextmanager
def machine(
    model: Path,
    *,
    element: DeviceType = "float16",
    graphs: bool = True,
    max_model_len: int = MAX_MODEL_LEN,
    checked: bool = False,
    timing: Timing = Timing.LATE,
    seed: int = 0,
) -> Iterator[tuple[Machine, Gpu]]:
    with use_fake_gpu(Gpu(memory_bytes=48 << 20, checked=checked, timing=timing, seed=seed)) as gpu:
        made = Machine(model, element=element, graphs=graphs, max_model_len=max_model_len, num_blocks=NUM_BLOCKS)
        yield made, gpu
        made.ops.close()
        made.ops.close()
        del made


def run(
    made: Machine, spans: list[TokenSpan], tables: NDArray[np.int32] = TABLES
) -> tuple[cupy.ndarray, NDArray[np.float32]]:
    """Logits of the last tokens of the spans, by replay and by the reference."""
    ends = list(itertools.accumulate(len(span.token_ids) for span in spans))
    sampled = [end - 1 for end in ends]
    result = made.ops.replay(made.logits, make_batch(made.ops, spans, tables, BLOCK_SIZE, sampled))
    return result, made.reference_logits(make_batch(made.reference, spans, tables, BLOCK_SIZE, sampled))


def assert_same_cache(made: Machine) -> None:
    """NaN where nothing was written."""
    expected = made.reference_cache.data.view(np.float16).astype(np.float32)
    np.testing.assert_allclose(on_host(made.cache.data, "float16"), expected, rtol=0, atol=0.02)


def on_host(array: cupy.ndarray, element: str) -> NDArray[np.float32]:
    """When all work is done."""
    import cupy

    cupy.cuda.Device().synchronize()
    host: Array = array.get()
    return host.view(HOST_TYPES[element]).astype(np.float32)


in_any_timing = pytest.mark.parametrize(
    ("timing", "seed"),
    [(timing, 0) for timing in Timing] + [(Timing.SHUFFLED, seed) for seed in (1, 2, 3)],
    ids=lambda value: value.name.lower() if isinstance(value, Timing) else None,
)
"""For tests of what runs beside something else, or while the host goes on."""

Step = list[tuple[int, int]]
"""For some rows: how many tokens are computed."""


def random_steps(generator: np.random.Generator) -> list[Step]:
    """Decodes of a few sizes again and again, between them prefills."""
    steps: list[Step] = []
    for _ in range(generator.integers(3, 8)):
        rows = generator.permutation(NUM_ROWS)[: generator.choice((1, 2, 3, 11, 12))].tolist()
        most = min(int(generator.choice((1, 1, 1, 3, 40))), 64 // len(rows))
        steps.append([(row, int(generator.integers(1, most + 1))) for row in rows])
    return steps


@pytest.mark.parametrize("element", ELEMENTS)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32 - 1))
def test_steps_of_any_kind_with_and_without_graphs(
    model: Path, model_with_norms: Path, element: DeviceType, seed: int
) -> None:
    """Close to the reference; the same bits with and without graphs, with attention in one launch or several."""
    generator = np.random.default_rng(seed)
    results: list[list[bytes]] = []
    token_ids = generator.integers(0, 301, (NUM_ROWS, MAX_MODEL_LEN)).tolist()
    steps = [[(0, 60)], [(0, 60), (1, 4)], [(1, 61)], *random_steps(generator)]  # with several splits
    for graphs, most_partials in ((True, 1024), (False, 3)):
        path = model if element == "float16" else model_with_norms
        timing = Timing.SHUFFLED if graphs else Timing.LATE
        with (
            machine(path, element=element, graphs=graphs, timing=timing, seed=seed) as (made, _),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(cuda_ops, "MOST_PARTIALS", most_partials)
            lengths, logits = [0] * NUM_ROWS, []
            for step in steps:
                spans = []
                for row, count in step:
                    start = 0 if lengths[row] + count > MAX_MODEL_LEN else lengths[row]
                    lengths[row] = start + count
                    spans.append(TokenSpan(row, start, token_ids[row][start : start + count]))
                result, expected = run(made, spans)
                logits.append(made.ops.download(result))
                np.testing.assert_allclose(logits[-1], expected, rtol=0, atol=TOLERANCES[element])
            results.append([*map(np.ndarray.tobytes, logits), on_host(made.cache.data, element).tobytes()])
    assert results[0] == results[1]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_logits_of_all_tokens_of_the_largest_step(num_layers: int, tmp_path: Path) -> None:
    """As for log-probabilities of prompts, in pieces larger than a step samples; the same bits as where few sample."""
    path = write_tiny_model(
        tmp_path, num_hidden_layers=num_layers, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    spans = [TokenSpan(0, 0, [*range(40)]), TokenSpan(1, 0, [*range(9, 33)])]
    with machine(path) as (made, _):
        batch = make_batch(made.ops, spans, TABLES, BLOCK_SIZE, [39, 63])
        few = made.ops.download(made.ops.replay(made.logits, batch))
        expected = made.reference_logits(make_batch(made.reference, spans, TABLES, BLOCK_SIZE, range(64)))
        hidden = made.llama.forward(batch, made.cache)
        for indices in (np.arange(64, dtype=np.int32), np.arange(30, 64, dtype=np.int32)):
            piece = replace(batch, sampled=made.ops.upload(indices))
            logits = made.ops.download(made.llama.logits(hidden, piece))
            np.testing.assert_allclose(logits, expected[indices], rtol=0, atol=TOLERANCES["float16"])
            np.testing.assert_array_equal(logits[np.isin(indices, [39, 63])], few)


def test_a_decode_is_captured_the_second_time_and_fills_up_with_tokens_that_touch_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    launch, length = Graph.launch, 0

    def note(graph: Graph, stream: Stream | None = None) -> None:
        launched.append(length)
        launch(graph, stream)

    monkeypatch.setattr(Graph, "launch", note)
    with machine(model, checked=True) as (made, _):
        for length, count in enumerate((5, 6, 5, 9, 11)):  # graphs of 8, 8, 8, 12 and 12 sequences
            result, expected = run(made, [TokenSpan(row, length, [row + 5]) for row in range(count)])
            assert result.shape == expected.shape
            np.testing.assert_allclose(made.ops.download(result), expected, rtol=0, atol=TOLERANCES["float16"])
        assert launched == [1, 2, 4]
        assert_same_cache(made)


def test_attention_goes_by_the_kv_extent_and_rotation_by_the_position(model: Path) -> None:
    """Of sequences whose beginning has no KV any more, prefilled and decoded, across splits and through a graph."""
    token_ids = np.random.default_rng(3).integers(0, 301, 150).tolist()
    with machine(model) as (made, _):
        steps = [
            [TokenSpan(0, 70, token_ids[:50], num_evicted=70), TokenSpan(1, 9, token_ids[:5], num_evicted=9)],
            [TokenSpan(0, 120, token_ids[50:80], num_evicted=70)],
            *([TokenSpan(0, 150 + i, [7], num_evicted=70), TokenSpan(1, 14 + i, [8], num_evicted=9)] for i in range(3)),
        ]
        for spans in steps:
            result, expected = run(made, spans)
            np.testing.assert_allclose(made.ops.download(result), expected, rtol=0, atol=TOLERANCES["float16"])
        assert_same_cache(made)


def test_a_graph_has_no_more_splits_than_the_longest_sequence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, which is no power of two, and one launch of attention takes no more."""
    monkeypatch.setattr(cuda_ops, "MOST_PARTIALS", 1)
    length = 3 * KV_SPLIT
    tables = TABLES[:, : length // BLOCK_SIZE]
    token_ids = np.random.default_rng(0).integers(0, 301, length).tolist()
    starts = [0, 60, 120, *range(180, 183)]
    with machine(model, max_model_len=length) as (made, _):
        for start, end in itertools.pairwise(starts):
            result, expected = run(made, [TokenSpan(0, start, token_ids[start:end])], tables)
            np.testing.assert_allclose(made.ops.download(result), expected, rtol=0, atol=TOLERANCES["float16"])


def test_a_decode_for_whose_graph_there_is_no_memory_goes_on_without(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried again. Other errors are the end."""
    captures: list[str] = []

    def fail(stream: Stream) -> None:
        captures.append(message)
        stream.queue.captured = None
        raise CudaError(message)

    monkeypatch.setattr(Stream, "end_capture", fail)
    message = "cudaErrorMemoryAllocation: out of memory"
    with machine(model) as (made, _):
        for length in range(4):
            result, expected = run(made, [TokenSpan(row, length, [row + 5]) for row in range(3)])
            np.testing.assert_allclose(made.ops.download(result), expected, rtol=0, atol=TOLERANCES["float16"])
        assert captures == [message]
        message = "cudaErrorStreamCaptureInvalidated: the capture was invalidated"
        run(made, [TokenSpan(0, 4, [5])])
        with pytest.raises(DeviceError, match=r"could not capture a graph: cudaErrorStreamCaptureInvalidated"):
            run(made, [TokenSpan(0, 5, [5])])


def test_a_decode_for_which_the_workspace_is_too_small_goes_on_without_a_graph(model: Path) -> None:
    """In memory of CuPy's pool, which a graph could not rely on."""
    with machine(model) as (made, _):
        made.ops._workspace.allocate(1024, "a test")
        for length in range(4):
            result, expected = run(made, [TokenSpan(row, length, [row + 5]) for row in range(3)])
            np.testing.assert_allclose(made.ops.download(result), expected, rtol=0, atol=TOLERANCES["float16"])
            del result


@in_any_timing
def test_a_graph_keeps_its_own_place_when_others_run_between(model: Path, timing: Timing, seed: int) -> None:
    """The result of a graph lives until the next step, whatever is computed from it."""
    with machine(model, timing=timing, seed=seed) as (made, _):
        for length in range(4):
            for count in (3, 12, 1):
                spans = [TokenSpan(row, length, [row + 5]) for row in range(count)]
                result, expected = run(made, spans)
                adjusted = made.ops.adjust_logits(result, None, None)
                made.ops.take(result, made.ops.upload(np.arange(count, dtype=np.int32)))
                for each in (result, adjusted):
                    np.testing.assert_allclose(made.ops.download(each), expected, rtol=0, atol=TOLERANCES["float16"])


@in_any_timing
def test_steps_that_nobody_waits_for_do_not_overwrite_each_other(model: Path, timing: Timing, seed: int) -> None:
    """Descriptions of more steps than there are buffers are under way; each step writes its own tokens' KV."""
    with machine(model, timing=timing, seed=seed) as (made, _):
        for length in range(3 * cuda_batch.STEPS_UNDER_WAY):
            run(made, [TokenSpan(row, length, [7 * row + length]) for row in range(5)])
        assert_same_cache(made)


def test_block_tables_travel_as_what_changed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More changes than fit one copy, then none: the tables are as they were. Other rows hold nothing to be read."""
    monkeypatch.setattr(cuda_batch, "MOST_CHANGES", 5)
    tables = np.full((NUM_ROWS, COLUMNS), NOWHERE, np.int32)
    tables[3, :3], tables[5, :3], tables[8, :3] = (9, 4, 30), (50, 51, 52), (1, 22, 5)
    with machine(model) as (made, _):
        for number in range(4):
            spans = [TokenSpan(row, 20 + number, [row + number]) for row in (3, 5, 8)]  # as a graph: 4 sequences
            if number == 0:
                spans = [TokenSpan(row, 0, [*range(row, row + 20)]) for row in (3, 5, 8)]
            ends = np.cumsum([len(span.token_ids) for span in spans]) - 1
            batch = make_batch(made.reference, spans, tables, BLOCK_SIZE, ends.tolist())
            changed = np.arange(tables.size if number == 0 else 0)
            logits = made.ops.replay(made.logits, made.ops.upload_batch(cast("Batch[HostArray]", batch), changed))
            expected = made.reference_logits(batch)
            np.testing.assert_allclose(made.ops.download(logits), expected, rtol=0, atol=TOLERANCES["float16"])


@pytest.mark.parametrize("element", ELEMENTS)
def test_weights_in_every_encoding(model: Path, element: DeviceType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces; stacked, or row by row in turn."""
    generator = np.random.default_rng(3)
    with machine(model, element=element) as (made, _):
        monkeypatch.setattr(made.ops._staging, "num_bytes", 3000)
        for encoding in ("F32", "F16", "BF16", "Q4_1", "Q8_0", "Q6_K"):
            parts = [random_tensor(encoding, rows, 256, generator) for rows in (11, 5, 5)]
            values = [part.float32().astype(HOST_TYPES[element]).astype(np.float32) for part in parts]
            loaded = made.ops.load_matrix(parts)
            np.testing.assert_array_equal(on_host(loaded, element), np.concatenate(values))
            loaded = made.ops.load_gate_up(parts[1], parts[2])
            np.testing.assert_array_equal(on_host(loaded, element)[0::2], values[1])
            np.testing.assert_array_equal(on_host(loaded, element)[1::2], values[2])
        large = float_tensor("F32", np.full((3, 256), 1e5))
        if element == "bfloat16":
            made.ops.load_matrix([large])
        else:
            with pytest.raises(ModelLoadError, match=r'holds 100000, more than float16 can; give dtype="bfloat16"'):
                made.ops.load_matrix([large])


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), num_logprobs=st.sampled_from([-1, 0, 3, 64]))
def test_choosing_tokens(model: Path, seed: int, num_logprobs: int) -> None:
    generator = np.random.default_rng(seed)
    with machine(model) as (made, _):
        ops = made.ops
        batch = random_batch(generator, 6, 301, num_logprobs)
        raw, penalties, bias = random_logits(generator, 6, 301), *random_adjustments(generator, 6, 301)
        on_device = ops.upload(raw)
        adjusted = ops.adjust_logits(on_device, uploaded(ops, penalties), uploaded(ops, bias))
        expected = reference_sampling.adjust_logits(raw, penalties, bias)
        np.testing.assert_array_equal(ops.download(adjusted), expected)
        np.testing.assert_array_equal(ops.download(on_device), raw)
        sampled = ops.sample(adjusted, on_device, uploaded(ops, batch))
        assert_equal(sampled, reference_sampling.sample(expected, raw, batch))
        rows = np.array([4, 1, 1, 5], np.int32)
        np.testing.assert_array_equal(ops.download(ops.take(on_device, ops.upload(rows))), raw[rows])


def test_results_of_any_size_are_the_callers_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of later calls do not overwrite them. More log-probabilities may be asked for than there are tokens."""
    monkeypatch.setattr(cuda_sampling, "RESULT_BYTES", 16)
    generator = np.random.default_rng(0)
    with machine(model) as (made, _):
        kept = []
        for num_logprobs, vocab_size in ((-1, 301), (64, 20), (0, 301), (64, 301), (2, 301)):
            batch = random_batch(generator, 3, vocab_size, num_logprobs)
            raw = random_logits(generator, 3, vocab_size)
            on_device = made.ops.upload(raw)
            sampled = made.ops.sample(on_device, on_device, uploaded(made.ops, batch))
            kept.append((sampled, reference_sampling.sample(raw, raw, batch)))
        for ours, expected in kept:
            assert_equal(ours, expected)


def uploaded(ops: CudaOps, host: T) -> T:
    """The same with its arrays on the device."""
    changes = {
        field.name: ops.upload(value)
        for field in fields(host)  # type: ignore[arg-type]
        if isinstance(value := getattr(host, field.name), np.ndarray)
    }
    return replace(host, **changes)  # type: ignore[type-var]


@in_any_timing
def test_blocks(model: Path, timing: Timing, seed: int) -> None:
    """Filled, copied, swapped out and in; kernels that are launched meanwhile wait where they must."""
    with machine(model, timing=timing, seed=seed) as (made, _):
        ops, cache = made.ops, made.cache
        host = ops.allocate_host_cache(made.layout, 8)
        for block in range(6):
            ops.fill_blocks(cache, [block], block + 0.5)
        ops.copy_blocks(cache, [(1, 20), (2, 21)])
        out = ops.blocks_to_host(cache, host, [(20, 3), (21, 4), (5, 0)])
        ops.fill_blocks(cache, [30, 31, 32], 7)
        back = ops.blocks_from_host(host, cache, [(3, 30), (4, 31), (0, 32)])
        ops.copy_blocks(cache, [(30, 40), (32, 41)])
        out.wait()
        assert out.done()
        assert host.view(np.float16)[[0, 3, 4], 0].tolist() == [5.5, 1.5, 2.5]
        blocks = on_host(cache.data, "float16").reshape(NUM_BLOCKS, -1)
        for block, value in {20: 1.5, 21: 2.5, 30: 1.5, 31: 2.5, 32: 5.5, 40: 1.5, 41: 5.5}.items():
            assert (blocks[block] == value).all(), block
        back.wait()
        assert np.isnan(blocks[50:]).all()


def test_uploads_are_aligned_and_stay_while_one_of_them_is_referenced(model: Path) -> None:
    """Whatever is uploaded or computed meanwhile."""
    with machine(model) as (made, _):
        arrays: list[HostArray] = [np.arange(size) % 3 == 0 for size in (7, 300, 1, 17)]  # a byte each
        uploads = made.ops.upload_together(arrays)
        assert all(each.data.ptr % 16 == 0 for each in uploads)
        kept = [uploads.pop(), uploads.pop(0)]
        del uploads
        others = [made.ops.upload(np.full(100, number, np.int32)) for number in range(3)]
        for length in range(3):
            run(made, [TokenSpan(row, length, [row + 5]) for row in range(3)])
        for each, array in zip(kept, (arrays[-1], arrays[0]), strict=True):
            np.testing.assert_array_equal(made.ops.download(each), array)
        for number, other in enumerate(others):
            assert (made.ops.download(other) == number).all()


def test_a_new_cache_is_zeros(model: Path) -> None:
    with machine(model) as (made, _):
        cache = made.ops.allocate_cache(made.layout, 3)
        assert cache.num_blocks == len(cache.data) == 3
        assert not on_host(cache.data, "float16").any()


@in_any_timing
def test_closing_waits_for_kernels_and_copies_before_it_frees(
    model: Path, timing: Timing, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(model, timing=timing, seed=seed) as (made, gpu):
        host = made.ops.allocate_host_cache(made.layout, 2)
        made.ops.fill_blocks(made.cache, [5], 3)
        made.ops.blocks_to_host(made.cache, host, [(5, 1)])
        made.ops.fill_blocks(made.cache, [6], 3)
        with monkeypatch.context() as patch:
            patch.setattr(made.ops._memory, "close", lambda: None)
            made.ops.close()
        assert not any(queue.pending for queue in gpu.queues)


def test_blocks_are_copied_later_and_to_pinned_memory(model: Path) -> None:
    with machine(model) as (made, gpu):
        host = made.ops.allocate_host_cache(made.layout, 2)
        assert gpu.is_pinned(host.ctypes.data)
        copy = made.ops.blocks_to_host(made.cache, host, [(5, 1)])
        assert not copy.done()
        while not copy.done():
            pass
        assert np.isnan(host.view(np.float16)[1]).all()


@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_runs_are_the_same_pairs(pairs: list[tuple[int, int]]) -> None:
    found = list(runs(pairs))
    assert [(one + i, other + i) for one, other, count in found for i in range(count)] == pairs
    assert all(
        (one + count, other + count) != (next_one, next_other)
        for (one, other, count), (next_one, next_other, _) in itertools.pairwise(found)
    )


# ---- Refusals ----

DIMENSIONS = Dimensions(hidden_size=64, intermediate_size=96, head_dim=64, block_size=16)
TYPES = ElementTypes(weights="auto", cache="auto", stored="F16")


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        (replace(DIMENSIONS, head_dim=48), r"head_dim is 48; the CUDA kernels take 64, 80, 96, 128, 256"),
        (replace(DIMENSIONS, hidden_size=60), r"hidden_size is 60; .* multiples of 8\. device=\"cpu\" works"),
        (replace(DIMENSIONS, intermediate_size=97), r"intermediate_size is 97"),
    ],
)
def test_a_model_that_the_kernels_cannot_compute_is_refused(dimensions: Dimensions, message: str) -> None:
    with use_fake_gpu(Gpu()):
        ops = CudaOps()
        with pytest.raises(UnsupportedModelError, match=message):
            ops.prepare(dimensions, TYPES, no_progress)
        ops.close()


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (replace(TYPES, cache="float32"), r"kv_dtype is 'float32'.* 'float16'; give kv_dtype=\"auto\""),
        (replace(TYPES, cache="float16", stored="BF16"), r"kv_dtype is 'float16'.* 'bfloat16'"),
    ],
)
def test_settings_that_the_kernels_cannot_compute_are_refused(types: ElementTypes, message: str) -> None:
    """Not as a model: "auto" must not take the CPU because of them."""
    with use_fake_gpu(Gpu()):
        ops = CudaOps()
        with pytest.raises(ConfigError, match=message) as caught:
            ops.prepare(DIMENSIONS, types, no_progress)
        assert not isinstance(caught.value, UnsupportedModelError)
        ops.close()


def test_other_devices_convert_no_weights() -> None:
    with pytest.raises(ConfigError, match="dtype is 'float16', but only device=\"cuda\" converts weights"):
        ReferenceOps().prepare(DIMENSIONS, replace(TYPES, weights="float16"), no_progress)


@pytest.mark.parametrize(("stored", "element"), [("BF16", "bfloat16"), ("F16", "float16"), ("Q4_1", "float16")])
def test_weights_have_the_type_of_the_checkpoint(stored: str, element: str) -> None:
    with use_fake_gpu(Gpu()):
        ops = CudaOps()
        ops.prepare(DIMENSIONS, replace(TYPES, stored=stored), no_progress)
        assert ops.kv_dtype == element
        ops.close()


@pytest.mark.parametrize("head_dim", cuda_ops.HEAD_DIMS)
@pytest.mark.parametrize("capability", ["80", "86", "90", "120"])
def test_every_architecture_has_the_shared_memory_that_the_kernels_take(capability: str, head_dim: int) -> None:
    with use_fake_gpu(Gpu(compute_capability=capability)):
        ops = CudaOps()
        ops.prepare(replace(DIMENSIONS, head_dim=head_dim), TYPES, no_progress)
        ops.close()


def test_memory_for_the_cache_is_what_the_fraction_leaves() -> None:
    with use_fake_gpu(Gpu(memory_bytes=64 << 20)) as gpu:
        ops = CudaOps()
        ops.prepare(DIMENSIONS, TYPES, no_progress)
        assert ops.cache_memory(0.5) == 32 << 20
        ops.load_matrix([float_tensor("F16", np.ones((1 << 10, 1 << 10)))])
        assert ops.cache_memory(0.5) == (32 << 20) - gpu.unpooled_bytes == 30 << 20
        assert ops.cache_memory(0.02) == 0
        ops.close()


def test_a_download_waits_and_is_a_copy_where_the_host_can_read_the_memory_of_the_gpu() -> None:
    with use_fake_gpu(Gpu(is_unified=True)):
        ops = CudaOps()
        ops.prepare(DIMENSIONS, TYPES, no_progress)
        array = np.arange(5, dtype=np.float32)
        on_device = ops.upload(array)
        downloaded = ops.download(on_device)
        np.testing.assert_array_equal(downloaded, array)
        assert downloaded.ctypes.data != on_device.data.ptr
        del on_device
        ops.close()


def test_too_little_memory_is_a_device_error_that_says_what_to_do(model: Path) -> None:
    with machine(model) as (made, _):
        advice = r"The GPU could not allocate \d+ bytes for .*out of memory.* Give a smaller kv_cache_memory"
        with pytest.raises(DeviceError, match=advice):
            made.ops.allocate_cache(made.layout, 10**6)
        with pytest.raises(DeviceError, match=advice):
            made.ops.load_matrix([float_tensor("F16", np.ones((1 << 13, 1 << 12)))])
        advice = r"The GPU could not lock \d+ bytes of host memory for 1000000 swapped.* Give a smaller swap_memory"
        with pytest.raises(DeviceError, match=advice):
            made.ops.allocate_host_cache(made.layout, 10**6)


def test_a_failed_launch_is_a_device_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CudaError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    with machine(model, graphs=False) as (made, _):
        monkeypatch.setattr(Function, "__call__", fail)
        message = "could not launch .*: cudaErrorIllegalAddress.*start it anew"
        with pytest.raises(DeviceError, match=message):
            run(made, [TokenSpan(0, 0, [5])])
        monkeypatch.undo()
