"""ReferenceOps against formulas in float64, one token or element at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.ops.reference.ops import ReferenceOps
from minipaged.ops.tensor import HostTensor

OPS = ReferenceOps()
SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 2**32 - 1)


def normal(generator: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return generator.standard_normal(shape, dtype=np.float32)


def host_tensor(array: NDArray[np.float32]) -> HostTensor:
    """Stored as its negative in float64, so that only `decode` tells what it holds."""
    stored = (-array.astype(np.float64)).reshape(array.shape[0] if array.ndim == 2 else 1, -1)
    return HostTensor(
        name="weight",
        shape=array.shape,
        encoding="negated",
        rows=stored.view(np.uint8),
        decode=lambda rows: -rows.view(np.float64).astype(np.float32),
    )


@given(rows=st.lists(SIZES, min_size=1, max_size=3), columns=SIZES, seed=SEEDS)
def test_load_matrix_decodes_and_stacks(rows: list[int], columns: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    parts = [normal(generator, count, columns) for count in rows]
    loaded = OPS.load_matrix([host_tensor(part) for part in parts])
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, np.concatenate(parts))


def test_load_vector_decodes_and_concatenates() -> None:
    parts = [np.array([1, 2, 3], np.float32), np.array([4], np.float32)]
    loaded = OPS.load_vector([host_tensor(part) for part in parts])
    assert loaded.dtype == np.float32
    assert loaded.tolist() == [1, 2, 3, 4]


def test_uploads_and_downloads_are_copies() -> None:
    source = np.array([1, 2], np.float32)
    array = OPS.upload(source)
    source[:] = 0
    host = OPS.download(array)
    host[0] = 7
    assert array.tolist() == [1, 2]


@given(
    tokens=st.integers(0, 12),
    inner=SIZES,
    outer=SIZES,
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    seed=SEEDS,
)
def test_linear(tokens: int, inner: int, outer: int, has_bias: bool, has_residual: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, weight, bias = normal(generator, tokens, inner), normal(generator, outer, inner), normal(generator, outer)
    residual = normal(generator, tokens, outer)
    before = bias.copy(), residual.copy()
    y = OPS.linear(x, weight, bias if has_bias else None, residual if has_residual else None)
    assert y.dtype == np.float32
    expected = np.einsum("ti,oi->to", x.astype(np.float64), weight)
    expected += (bias if has_bias else 0) + (residual if has_residual else 0)
    np.testing.assert_allclose(OPS.download(y), expected, atol=1e-5)
    np.testing.assert_array_equal(bias, before[0])
    np.testing.assert_array_equal(residual, before[1])


def test_embed_and_take_are_rows() -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    indices = np.array([3, 0, 3], np.int32)
    assert OPS.embed(indices, table).tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]
    assert OPS.take(table, indices).tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]


@given(tokens=SIZES, size=SIZES, scale=st.sampled_from([1e-4, 1.0, 1e3]), seed=SEEDS)
def test_rms_norm(tokens: int, size: int, scale: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, weight = normal(generator, tokens, size) * np.float32(scale), normal(generator, size)
    before = x.copy()
    normed = OPS.rms_norm(x, weight, 1e-5)
    np.testing.assert_array_equal(x, before)

    exact = x.astype(np.float64)
    for t in range(tokens):
        root = np.sqrt(sum(value**2 for value in exact[t]) / size + 1e-5)
        np.testing.assert_allclose(OPS.download(normed)[t], exact[t] / root * weight, rtol=1e-4, atol=1e-4)
    assert normed.dtype == np.float32


@given(
    tokens=SIZES, inner=SIZES, size=SIZES, has_bias=st.booleans(), scale=st.sampled_from([1.0, 30.0, 1e4]), seed=SEEDS
)
def test_gated_linear(tokens: int, inner: int, size: int, has_bias: bool, scale: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, weights = normal(generator, tokens, inner) * np.float32(scale), normal(generator, 2, size, inner)
    biases = normal(generator, 2, size) * np.float32(scale)
    weight = OPS.load_gate_up(*map(host_tensor, weights))
    bias = OPS.load_gate_up_bias(*map(host_tensor, biases))
    assert bias.dtype == np.float32
    result = OPS.gated_linear(x, weight, bias if has_bias else None)
    assert result.dtype == np.float32

    gate, up = x.astype(np.float64) @ weights.swapaxes(1, 2) + (biases[:, None] if has_bias else 0)
    expected = gate * (1 + np.tanh(gate / 2)) / 2 * up  # the logistic function written without overflow
    np.testing.assert_allclose(OPS.download(result), expected, rtol=1e-5, atol=1e-5 * scale**2)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row(poison: float) -> None:
    generator = np.random.default_rng(0)
    x, weight = normal(generator, 3, 8), normal(generator, 6, 8)
    poisoned = x.copy()
    poisoned[1] = poison
    for clean, dirty in [
        (OPS.linear(x, weight, None, None), OPS.linear(poisoned, weight, None, None)),
        (OPS.rms_norm(x, weight[0], 1e-5), OPS.rms_norm(poisoned, weight[0], 1e-5)),
        (OPS.gated_linear(x, weight, None), OPS.gated_linear(poisoned, weight, None)),
    ]:
        np.testing.assert_array_equal(clean[[0, 2]], dirty[[0, 2]])
        assert not np.isfinite(OPS.download(dirty)[1]).any()
