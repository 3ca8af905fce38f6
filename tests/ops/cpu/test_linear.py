"""Products and embeddings of the CPU backend against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.ops.cpu.ops import CpuOps
from minipaged.ops.cpu.packing import PackedMatrix
from minipaged.ops.reference.ops import ReferenceOps
from tests.ops.cpu.unpacked import integers, unpacked
from tests.ops.encoded import FLOATS, random_tensor

REFERENCE = ReferenceOps()
QUANTISED = ("Q4_0", "Q4_1", "Q8_0", "Q5_1")
ULP = 2.0**-24
"""Half a unit in the last place of a float32, relative."""

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A random product."""

    encoding: str
    tokens: int
    out_features: int
    in_features: int
    has_bias: bool
    has_residual: bool
    padding: int
    """Elements between one row of x and the next."""
    seed: int

    def make(self, ops: CpuOps) -> tuple[Float32, PackedMatrix, Float32 | None, Float32 | None]:
        """x, its rows of all magnitudes, apart from each other in memory; the matrix; the bias; the residual."""
        generator = np.random.default_rng(self.seed)
        weight = ops.load_matrix([random_tensor(self.encoding, self.out_features, self.in_features, generator)])
        wide = generator.standard_normal((self.tokens, self.in_features + self.padding), dtype=np.float32)
        wide *= np.float32(10.0) ** generator.integers(-3, 4, (self.tokens, 1)).astype(np.float32)
        wide[generator.random(self.tokens) < 0.1] = 0
        bias = generator.standard_normal(self.out_features, dtype=np.float32) if self.has_bias else None
        residual = None
        if self.has_residual:
            residual = generator.standard_normal((self.tokens, self.out_features), dtype=np.float32)
        return wide[:, self.padding // 2 :][:, : self.in_features], weight, bias, residual


@st.composite
def cases(draw: st.DrawFn, encodings: tuple[str, ...]) -> Case:
    encoding = draw(st.sampled_from(encodings))
    return Case(
        encoding=encoding,
        tokens=draw(st.integers(1, 30)),
        out_features=draw(st.integers(1, 50) | st.integers(130, 400)),  # many: a piece of work is several tiles
        in_features=draw(st.integers(1, 100)) if encoding in FLOATS else 32 * draw(st.integers(1, 4)),
        has_bias=draw(st.booleans()),
        has_residual=draw(st.booleans()),
        padding=draw(st.sampled_from((0, 0, 1, 32))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(case=cases(FLOATS))
def test_product_with_floats(cpu: CpuOps, case: Case) -> None:
    x, weight, bias, residual = case.make(cpu)
    y = cpu.download(cpu.linear(x, weight, bias, residual))
    assert y.dtype == np.float32
    w = unpacked(weight)
    added, size = sum_of(bias, residual)
    expected = x.astype(np.float64) @ w.T + added
    # A product and a sum per input may each round, and what is added to them.
    assert (np.abs(y - expected) <= 1.1 * (2 * case.in_features + 2) * ULP * (np.abs(x) @ np.abs(w).T + size)).all()


def sum_of(*added: Float32 | None) -> tuple[Float64, Float64]:
    """Of what there is, and of its absolute values."""
    total, size = np.zeros((2, 1))
    for array in added:
        if array is not None:
            total, size = total + array, size + np.abs(array)
    return total, size


def activations(x: Float32) -> tuple[Float64, Float64]:
    """As signed bytes: their scales [tokens, groups] and the integers [tokens, groups, 32]; scale = largest / 127."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=-1)
    scale = largest / np.float32(127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return scale.astype(np.float64), np.rint(groups * inverse[..., None]).astype(np.float64)


@given(case=cases(QUANTISED))
def test_product_with_integers(cpu: CpuOps, case: Case) -> None:
    """The documented scheme in float64; what is left to differ is the rounding of one sum per group."""
    x, weight, bias, residual = case.make(cpu)
    y = cpu.download(cpu.linear(x, weight, bias, residual))
    assert y.dtype == np.float32

    x_scale, x_q = activations(np.ascontiguousarray(x))
    scale, minimum, q = (part[: case.out_features] for part in integers(weight))
    products = np.einsum("tgi,ogi->tog", x_q, q) * scale * x_scale[:, None]
    offsets = (x_q.sum(axis=-1) * x_scale)[:, None] * minimum
    added, size = sum_of(bias, residual)
    expected = (products + offsets).sum(axis=-1) + added
    terms = (np.abs(products) + np.abs(offsets)).sum(axis=-1) + size
    assert (np.abs(y - expected) <= (2 * x_scale.shape[1] + 5) * ULP * terms).all()

    # And the product itself is no further away than half a step of every activation.
    w = unpacked(weight)
    exact = x.astype(np.float64) @ w.T + added
    steps = np.repeat(x_scale, 32, axis=1) @ np.abs(w).T
    assert (np.abs(y - exact) <= 0.501 * steps + 20 * ULP * terms).all()


@given(case=cases((*FLOATS, *QUANTISED)), data=st.data())
def test_a_row_does_not_depend_on_the_others(cpu: CpuOps, case: Case, data: st.DataObject) -> None:
    """Bit for bit, whatever the number of rows and of threads, and the memory they lie in."""
    x, weight, bias, residual = case.make(cpu)
    y = cpu.download(cpu.linear(x, weight, bias, residual))
    first = data.draw(st.integers(0, case.tokens - 1))
    end = data.draw(st.integers(first + 1, case.tokens))
    alone = CpuOps(data.draw(st.integers(1, 3)), cpu.instruction_set)
    some = alone.linear(x[first:end].copy(), weight, bias, None if residual is None else residual[first:end])
    assert some.tobytes() == y[first:end].tobytes()


@pytest.mark.parametrize("encoding", [*FLOATS, *QUANTISED])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_stay_in_their_row_and_do_not_vanish(cpu: CpuOps, encoding: str, poison: float) -> None:
    generator = np.random.default_rng(0)
    weight = cpu.load_matrix([random_tensor(encoding, 20, 64, generator)])
    x = generator.standard_normal((15, 64), dtype=np.float32)
    clean = cpu.linear(x, weight, None, None)
    for column in range(0, 64, 5):
        poisoned = x.copy()
        poisoned[7, column] = poison
        y = cpu.download(cpu.linear(poisoned, weight, None, None))
        assert np.delete(y, 7, axis=0).tobytes() == np.delete(clean, 7, axis=0).tobytes()
        assert not np.isfinite(y[7]).any()


@pytest.mark.parametrize("encoding", QUANTISED)
@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-37, 1e-30, 1e30, 1e36])
def test_very_small_and_very_large_activations(cpu: CpuOps, encoding: str, largest: float) -> None:
    """The quantised product is never garbage, not even where the inverse of the scale overflows."""
    generator = np.random.default_rng(0)
    tensor = random_tensor(encoding, 20, 64, generator, magnitude=0.001)
    x = generator.uniform(-largest, largest, (3, 64)).astype(np.float32)
    weight = cpu.load_matrix([tensor])
    y = cpu.download(cpu.linear(x, weight, None, None))
    w = unpacked(weight)
    exact = x.astype(np.float64) @ w.T
    bound = np.full((3, 64), largest / 100 + 2.0**-120) @ np.abs(w).T
    assert (np.abs(y - exact) <= bound).all()


@given(case=cases((*FLOATS, *QUANTISED)))
def test_embedding_is_exact(cpu: CpuOps, case: Case) -> None:
    _, table, _, _ = case.make(cpu)
    token_ids = np.random.default_rng(case.seed).integers(0, case.out_features, case.tokens).astype(np.int32)
    rows = cpu.embed(token_ids, table)
    assert rows.dtype == np.float32
    assert rows.tobytes() == unpacked(table)[token_ids].astype(np.float32).tobytes()


@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0"])
def test_embedding_is_what_the_file_says(cpu: CpuOps, encoding: str) -> None:
    tensor = random_tensor(encoding, 50, 96, np.random.default_rng(0))
    token_ids = np.array([0, 49, 3, 3, 17], np.int32)
    rows = cpu.embed(token_ids, cpu.load_matrix([tensor]))
    np.testing.assert_array_equal(rows, REFERENCE.embed(token_ids, REFERENCE.load_matrix([tensor])))


def test_no_rows(cpu: CpuOps) -> None:
    weight = cpu.load_matrix([random_tensor("Q4_1", 20, 64, np.random.default_rng(0))])
    assert cpu.linear(np.empty((0, 64), np.float32), weight, None, None).shape == (0, 20)
    assert cpu.embed(np.empty(0, np.int32), weight).shape == (0, 64)
