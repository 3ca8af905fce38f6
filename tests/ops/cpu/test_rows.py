"""Normalisation, activation and selection of rows in the CPU backend against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.ops.cpu.ops import CpuOps
from minipaged.ops.cpu.packing import PackedMatrix
from tests.ops.encoded import float_tensor

Float32 = NDArray[np.float32]
SIZES = st.integers(1, 80)
TOKENS = st.integers(1, 9)
SEEDS = st.integers(0, 2**32 - 1)


def normal(generator: np.random.Generator, *shape: int) -> Float32:
    return generator.standard_normal(shape, dtype=np.float32)


@given(tokens=TOKENS, size=SIZES, scale=st.sampled_from([1e-4, 1.0, 1e3]), seed=SEEDS)
def test_rms_norm(cpu: CpuOps, tokens: int, size: int, scale: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x, weight = normal(generator, tokens, size) * np.float32(scale), normal(generator, size)
    before = x.copy()
    normed = cpu.rms_norm(x, weight, 1e-5)
    np.testing.assert_array_equal(x, before)

    exact = x.astype(np.float64)
    root = np.sqrt((exact**2).sum(axis=1, keepdims=True) / size + 1e-5)
    np.testing.assert_allclose(cpu.download(normed), exact / root * weight, rtol=1e-5)
    assert normed.dtype == np.float32


def load_gate_up(cpu: CpuOps, gate: Float32, up: Float32) -> PackedMatrix:
    return cpu.load_gate_up(float_tensor("F32", gate), float_tensor("F32", up))


@given(tokens=TOKENS, size=SIZES, scale=st.sampled_from([1.0, 30.0, 1e4]), seed=SEEDS)
def test_gated_linear(cpu: CpuOps, tokens: int, size: int, scale: float, seed: int) -> None:
    """Of a unit matrix, so that the products are exact; those of others: test_cpu_linear.py."""
    gate, up = normal(np.random.default_rng(seed), 2, tokens, size) * np.float32(scale)
    result = cpu.gated_linear(np.eye(tokens, dtype=np.float32), load_gate_up(cpu, gate.T, up.T), None)
    assert result.dtype == np.float32
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    expected = gate * (1 + np.tanh(gate / 2)) / 2 * up  # the logistic function written without overflow
    np.testing.assert_allclose(cpu.download(result), expected, rtol=1e-5, atol=1e-9 * scale**2)


def test_silu_everywhere(cpu: CpuOps) -> None:
    """To a few units in the last place where the result is a normal number, at 100,000 gates."""
    gate = np.concatenate([np.linspace(-86, 100, 80000), np.geomspace(1e-30, 1, 20000)]).astype(np.float32)
    weight = load_gate_up(cpu, gate[:, None], np.zeros_like(gate)[:, None])
    bias = cpu.load_gate_up_bias(*(float_tensor("F32", values) for values in (np.zeros_like(gate), np.ones_like(gate))))
    result = cpu.download(cpu.gated_linear(np.ones((1, 1), np.float32), weight, bias))
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    np.testing.assert_allclose(result[0], exact, rtol=1e-6)


@given(tokens=TOKENS, size=SIZES, seed=SEEDS, data=st.data())
def test_a_row_does_not_depend_on_the_others(
    cpu: CpuOps, tokens: int, size: int, seed: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(seed)
    x, weight = normal(generator, tokens, 2 * size), normal(generator, size)
    row = data.draw(st.integers(0, tokens - 1))
    other = CpuOps(1, cpu.instruction_set)
    normed = cpu.rms_norm(x[:, :size].copy(), weight, 1e-5)
    assert other.rms_norm(x[row, None, :size].copy(), weight, 1e-5).tobytes() == normed[row].tobytes()
    gate_up = load_gate_up(cpu, *normal(generator, 2, 3, 2 * size))
    assert (
        other.gated_linear(x[row, None], gate_up, None).tobytes() == cpu.gated_linear(x, gate_up, None)[row].tobytes()
    )


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [3, 8, 21])
def test_nan_and_infinity_stay_in_their_row_and_do_not_vanish(cpu: CpuOps, poison: float, size: int) -> None:
    generator = np.random.default_rng(0)
    x, weight = normal(generator, 3, 2 * size), normal(generator, size)
    gate_up = load_gate_up(cpu, *normal(generator, 2, size, 2 * size))
    poisoned = x.copy()
    poisoned[1, size - 1] = poison
    for clean, dirty in [
        (cpu.rms_norm(x[:, :size].copy(), weight, 1e-5), cpu.rms_norm(poisoned[:, :size].copy(), weight, 1e-5)),
        (cpu.gated_linear(x, gate_up, None), cpu.gated_linear(poisoned, gate_up, None)),
    ]:
        np.testing.assert_array_equal(clean[[0, 2]], dirty[[0, 2]])
        assert not np.isfinite(cpu.download(dirty)[1, size - 1])


def test_take_is_rows(cpu: CpuOps) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert cpu.take(x, np.array([3, 0, 3], np.int32)).tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]
    assert cpu.take(x, np.empty(0, np.int32)).shape == (0, 3)
