"""A recorded forward pass computes what its function does when called, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipaged.models.files.model_source import open_model
from minipaged.models.llama import Llama, load_llama
from minipaged.ops.base import Batch
from minipaged.ops.cpu.ops import CpuOps
from minipaged.ops.cpu.packing import PackedMatrix
from minipaged.ops.reference.numpy_ops import Array
from tests.batches import TokenSpan, make_batch
from tests.ops.encoded import random_tensor
from tests.tiny_gguf import write_tiny_gguf

MAX_MODEL_LEN = 96
BLOCK_SIZE = 16
NUM_ROWS = 12
COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
TABLES = np.random.default_rng(0).permutation(NUM_ROWS * COLUMNS).astype(np.int32).reshape(NUM_ROWS, COLUMNS)


class Machine:
    """A tiny model on the CPU backend, with a cache for 12 sequences."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self.ops = CpuOps(num_threads)
        source = open_model(path)
        self.config = source.config
        self.llama: Llama[Array, PackedMatrix] = load_llama(source.checkpoint, source.config, self.ops, MAX_MODEL_LEN)
        self.cache = self.ops.allocate_cache(source.config.kv_layout(BLOCK_SIZE, "float32"), NUM_ROWS * COLUMNS)

    def hidden(self, batch: Batch[Array]) -> Array:
        return self.llama.forward(batch, self.cache)

    def logits(self, batch: Batch[Array]) -> Array:
        return self.llama.logits(self.hidden(batch), batch)


@pytest.fixture(scope="module", params=["F32", "BF16", "Q4_1", "Q8_0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_tiny_gguf(path, quantization=request.param, model_type="qwen3")


Step = list[tuple[int, int, bool]]
"""For some rows: how many tokens are computed, and whether it samples."""


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """Decodes of a few sizes again and again, between them prefills of all sizes."""
    drawn: list[Step] = []
    for _ in range(draw(st.integers(3, 10))):
        rows = draw(st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=NUM_ROWS, unique=True))
        most = draw(st.sampled_from((1, 1, 1, 3, 80)))
        drawn.append([(row, draw(st.integers(1, most)), draw(st.integers(0, 9)) > 0) for row in rows])
    return drawn


@settings(max_examples=25)
@given(steps=steps(), seed=st.integers(0, 2**32 - 1))
def test_replay_is_the_function(model: Path, steps: list[Step], seed: int) -> None:
    generator = np.random.default_rng(seed)
    replayed, called = Machine(model, 2), Machine(model, 3)
    lengths = [0] * NUM_ROWS
    for step in steps:
        spans: list[TokenSpan] = []
        sampled: list[int] = []
        for row, count, samples in step:
            if lengths[row] + count > MAX_MODEL_LEN:
                lengths[row] = 0  # another sequence
            token_ids = generator.integers(0, replayed.config.vocab_size, count).tolist()
            spans.append(TokenSpan(row, lengths[row], token_ids))
            lengths[row] += count
            if samples:
                sampled.append(sum(len(span.token_ids) for span in spans) - 1)
        batch = make_batch(called.ops, spans, TABLES, BLOCK_SIZE, sampled)
        if sampled:
            result, expected = replayed.ops.replay(replayed.logits, batch), called.logits(batch)
        else:
            result, expected = replayed.ops.replay(replayed.hidden, batch), called.hidden(batch)
        assert np.isfinite(called.ops.download(expected)).all()
        assert result.tobytes() == expected.tobytes()
        assert replayed.cache.data.tobytes() == called.cache.data.tobytes()


def test_logits_do_not_depend_on_which_other_tokens_sample(model: Path) -> None:
    """Not a bit: what follows the last attention is computed for some tokens at a time."""
    machine = Machine(model, 2)
    spans = [TokenSpan(0, 0, list(range(40))), TokenSpan(5, 0, [7, 8, 9])]
    batch = make_batch(machine.ops, spans, TABLES, BLOCK_SIZE, range(43))
    everything = machine.logits(batch)
    for sampled in ([42], [39, 42], list(range(3, 40))):
        some = replace(batch, sampled=machine.ops.upload(np.array(sampled, np.int32)))
        assert machine.ops.replay(machine.logits, some).tobytes() == everything[sampled].tobytes()


def test_two_functions_over_batches_of_the_same_size(model: Path) -> None:
    machine = Machine(model, 1)
    batch = make_batch(machine.ops, [TokenSpan(0, 0, [5]), TokenSpan(3, 0, [7])], TABLES, BLOCK_SIZE, [0, 1])
    for _ in range(3):
        assert machine.ops.replay(machine.logits, batch).shape == (2, machine.config.vocab_size)
        assert machine.ops.replay(machine.hidden, batch).shape == (2, machine.config.hidden_size)


def test_the_workspace_grows_between_decodes(tmp_path: Path) -> None:
    """What was recorded before points into memory that is gone; it must be recorded again."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", quantization="Q4_1", vocab_size=4096, intermediate_size=1024)
    machine, other = Machine(path, 2), Machine(path, 1)
    few = make_batch(machine.ops, [TokenSpan(row, 0, [row]) for row in range(3)], TABLES, BLOCK_SIZE, [0, 1, 2])
    expected = other.logits(few).tobytes()
    assert machine.ops.replay(machine.logits, few).tobytes() == expected
    for tokens in (40, 96):
        spans = [TokenSpan(row, 0, list(range(tokens))) for row in range(3, NUM_ROWS)]
        many = make_batch(machine.ops, spans, TABLES, BLOCK_SIZE, list(range(len(spans) * tokens)))
        result = machine.ops.replay(machine.logits, many)
        assert result.tobytes() == other.logits(many).tobytes()
        for _ in range(2):
            assert machine.ops.replay(machine.logits, few).tobytes() == expected


@pytest.mark.parametrize("num_columns", [32, 64])
def test_a_part_of_an_array_is_quantised_by_itself(num_columns: int) -> None:
    """Not with the numbers of the whole array that the operation before has quantised."""
    ops = CpuOps(1)
    generator = np.random.default_rng(0)
    table = ops.load_matrix([random_tensor("F32", 20, 64, generator)])
    weight = ops.load_matrix([random_tensor("Q8_0", 24, num_columns, generator)])
    whole = ops.load_matrix([random_tensor("Q8_0", 24, 64, generator)])
    scale = generator.standard_normal(64, dtype=np.float32)

    def function(batch: Batch[Array]) -> Array:
        normed = ops.rms_norm(ops.embed(batch.token_ids, table), scale, 1e-5)
        residual = ops.linear(normed, whole, None, None)
        return ops.linear(normed[1:, 64 - num_columns :], weight, None, residual[1:])

    batch = make_batch(ops, [TokenSpan(row, 0, [row + 3]) for row in range(5)], TABLES, BLOCK_SIZE)
    expected = function(batch).tobytes()
    assert ops.replay(function, batch).tobytes() == expected


def test_what_is_quantised_and_added_too_is_there_as_floats() -> None:
    ops = CpuOps(1)
    generator = np.random.default_rng(0)
    table = ops.load_matrix([random_tensor("F32", 20, 64, generator)])
    weight = ops.load_matrix([random_tensor("Q8_0", 64, 64, generator)])
    scale = generator.standard_normal(64, dtype=np.float32)

    def function(batch: Batch[Array]) -> Array:
        normed = ops.rms_norm(ops.embed(batch.token_ids, table), scale, 1e-5)
        return ops.linear(normed, weight, None, normed)

    batch = make_batch(ops, [TokenSpan(0, 0, [3, 1, 4])], TABLES, BLOCK_SIZE)
    expected = function(batch).tobytes()
    assert ops.replay(function, batch).tobytes() == expected


def test_a_function_that_fails_leaves_nothing_behind(model: Path) -> None:
    machine = Machine(model, 2)
    batch = make_batch(machine.ops, [TokenSpan(0, 0, [5])], TABLES, BLOCK_SIZE, [0])

    def fails(batch: Batch[Array]) -> Array:
        machine.hidden(batch)
        raise ValueError("no")

    expected = machine.logits(batch).tobytes()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            machine.ops.replay(fails, batch)
        assert machine.ops.replay(machine.logits, batch).tobytes() == expected
        assert machine.logits(batch).tobytes() == expected


def test_what_a_recorded_function_looks_at_is_zeros_and_cannot_be_written_to(tiny_model: Path) -> None:
    """Arrays of a pass that is being recorded have no memory yet, its batch included."""
    ops = CpuOps(1)
    seen: list[Array] = []

    def look(batch: Batch[Array]) -> Array:
        hidden = ops.embed(batch.token_ids, table)
        normed = ops.rms_norm(hidden, weight, 1e-5)
        seen.extend(array.copy() for array in (batch.token_ids, hidden, normed[1:]))
        with pytest.raises(ValueError, match="read-only"):
            normed[0] = 1
        return normed

    source = open_model(tiny_model)
    with source.checkpoint:
        table = ops.load_matrix([source.checkpoint.tensor("model.embed_tokens.weight")])
    weight = np.ones(table.in_features, np.float32)
    tables = np.zeros((1, 1), np.int32)
    batch = make_batch(ops, [TokenSpan(0, 0, [5, 6, 7])], tables, BLOCK_SIZE)
    replayed = ops.replay(look, batch).copy()
    assert [array.any() for array in seen] == [False] * 3
    expected = ops.rms_norm(ops.embed(batch.token_ids, table), weight, 1e-5)
    assert replayed.tobytes() == expected.tobytes()
