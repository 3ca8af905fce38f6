"""Packed matrices hold what the checkpoint does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.errors import ModelLoadError
from minipaged.ops.cpu.packing import CHUNK_BYTES, Arena, Kind, pack
from minipaged.ops.tensor import HostTensor
from tests.ops.cpu.unpacked import unpacked
from tests.ops.encoded import FLOATS, HALVES, float_tensor, quantised_tensor, random_tensor

EXACT = (*FLOATS, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Kept bit for bit."""
ROUNDED = ("Q4_K", "Q5_K")
"""Their groups' scales and minima are rounded to float16."""
ENCODINGS = (*FLOATS, *HALVES)


def allowed(tensor: HostTensor) -> NDArray[np.float64]:
    """The largest error of each weight."""
    weights = tensor.float32().astype(np.float64)
    if tensor.encoding in EXACT or tensor.shape[1] % 32:
        return np.zeros_like(weights)
    groups = weights.reshape(len(weights), -1, 32)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    largest = np.maximum(np.abs(low), np.abs(high))
    if tensor.encoding in ROUNDED:
        # A weight is the difference of two products that are at most this large.
        bound = 2.0**-11 * (np.abs(tensor_terms(tensor)).reshape(groups.shape) + 2.0**-12 * largest)
    else:
        # Half a step of 1/255 of the range, which is measured from the minimum as float16 has it.
        minimum_error = np.maximum(2.0**-10 * np.abs(low), 2.0**-24)
        step = (high - low + minimum_error) / 255
        bound = 0.501 * np.maximum(step * (1 + 2.0**-10), step + 2.0**-24) + 2.0**-23 * largest
    return np.broadcast_to(bound, groups.shape).reshape(weights.shape)


def tensor_terms(tensor: HostTensor) -> NDArray[np.float64]:
    """|d s q| + |dmin m| of every weight of a Q4_K or Q5_K tensor: decoded with both signs of dmin."""
    size = 144 if tensor.encoding == "Q4_K" else 176
    blocks = tensor.rows.reshape(len(tensor.rows), -1, size).copy()
    decoded = tensor.float32().astype(np.float64)
    blocks[..., 3] ^= 128
    negated = tensor.decode(blocks.reshape(tensor.rows.shape)).astype(np.float64)
    return np.abs(decoded + negated) / 2 + np.abs(decoded - negated) / 2


def check(tensors: list[HostTensor], kind: Kind) -> None:
    matrix = pack(tensors, Arena())
    assert matrix.kind is kind
    assert matrix.data.ctypes.data % 64 == 0
    expected = np.concatenate([tensor.float32() for tensor in tensors]).astype(np.float64)
    assert (matrix.out_features, matrix.in_features) == expected.shape
    bound = np.concatenate([allowed(tensor) for tensor in tensors])
    error = np.abs(unpacked(matrix).astype(np.float32) - expected)
    assert (error <= bound).all(), f"off by {(error - bound).max()} more than allowed"


def kind_of(*encodings: str) -> Kind:
    """The best format that holds all."""
    kinds = {
        Kind[name] if name in FLOATS else Kind.Q4 if name in ("Q4_0", "Q4_1", "Q4_K") else Kind.Q8 for name in encodings
    }
    if len(kinds) == 1:
        return kinds.pop()
    return Kind.Q8 if kinds <= {Kind.Q4, Kind.Q8} else Kind.F32


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_every_encoding(encoding: str, rows: int) -> None:
    generator = np.random.default_rng(rows)
    check([random_tensor(encoding, rows, 512, generator)], kind_of(encoding))


@pytest.mark.parametrize("encoding", FLOATS)
def test_floats_have_any_number_of_inputs(encoding: str) -> None:
    check([random_tensor(encoding, 19, 7, np.random.default_rng(0))], kind_of(encoding))


@settings(max_examples=60)
@given(
    encodings=st.lists(st.sampled_from(ENCODINGS), min_size=2, max_size=4),
    rows=st.lists(st.integers(1, 35), min_size=4, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_stacks_of_different_encodings(encodings: list[str], rows: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    tensors = [random_tensor(name, count, 256, generator) for name, count in zip(encodings, rows, strict=False)]
    check(tensors, kind_of(*encodings))


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name not in FLOATS])
@pytest.mark.parametrize("magnitude", [2.0**-24, 2.0**-20, 1e-5, 8.0])
def test_scales_as_small_and_as_large_as_float16_has_them(encoding: str, magnitude: float) -> None:
    check([random_tensor(encoding, 5, 512, np.random.default_rng(1), magnitude=magnitude)], kind_of(encoding))


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q8_0", "Q6_K"])
def test_what_float16_cannot_hold_is_an_error(encoding: str) -> None:
    """Each scale is a float16 number; times -8, -16, -128 or a group's own factor it is none any more."""
    tensor = random_tensor(encoding, 5, 256, np.random.default_rng(1), magnitude=60000.0)
    with pytest.raises(ModelLoadError, match=f"{encoding} matrix.*float16.*reference"):
        pack([random_tensor("Q4_1", 3, 256, np.random.default_rng(1)), tensor], Arena())


@pytest.mark.parametrize("encoding", list(HALVES))
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_damaged_scale_is_an_error(encoding: str, number: float) -> None:
    tensor = random_tensor(encoding, 5, 512, np.random.default_rng(2))
    blocks = tensor.rows.copy()
    start = HALVES[encoding][-1]
    blocks[2, start : start + 2] = np.array([number], np.float16).view(np.uint8)
    with pytest.raises(ModelLoadError, match=f"{encoding} matrix"):
        pack([quantised_tensor(encoding, blocks)], Arena())


def test_infinity_and_nan_in_float_weights_are_kept() -> None:
    values = np.array([[np.inf, 1], [-np.inf, np.nan]])
    for encoding in FLOATS:
        np.testing.assert_array_equal(unpacked(pack([float_tensor(encoding, values)], Arena())), values)


def test_a_constant_group_is_kept() -> None:
    """Quantised again, with a range of nothing."""
    blocks = np.zeros((1, 18), np.uint8)
    blocks[:, :2] = np.array([[0.3]], np.float16).view(np.uint8)
    check([quantised_tensor("IQ4_NL", blocks)], Kind.Q8)


def test_what_an_arena_hands_out_is_zero_aligned_and_apart() -> None:
    arena = Arena()
    taken = [arena.take(size) for size in (1, 64, 1000, CHUNK_BYTES - 500, 5, CHUNK_BYTES + 1, 3)]
    for number, piece in enumerate(taken, 1):
        assert piece.ctypes.data % 64 == 0
        assert not piece[:1000].any()
        assert not piece[-1000:].any()
        piece[:1000] = piece[-1000:] = number
    for number, piece in enumerate(taken, 1):
        assert (piece[:1000] == number).all()
        assert (piece[-1000:] == number).all()
