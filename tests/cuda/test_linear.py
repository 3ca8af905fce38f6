"""cuda/linear.cu against products in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.cuda.emulated import Execution, Order, load
from tests.cuda.toolchain import CUDA

THREADS = 128
Array = NDArray[np.generic]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Tile:
    """What a kernel's block computes and needs."""

    rows: int
    columns: int
    shared_bytes: int


TILES = {
    "linear_few": Tile(16, 32, 6 * (16 + 32) * 128 * 2),
    "linear_some": Tile(64, 32, 6 * (64 + 32) * 64 * 2),
    "linear_many": Tile(128, 128, 3 * (128 + 128) * 64 * 2),
}
ELEMENTS = {"__half": np.dtype(np.float16), "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16)}
STEPS = {"__half": 2.0**-11, "__nv_bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Largest relative error of rounding to the type."""


def linear(
    name: str,
    element: str,
    x: Array,
    weight: Array,
    bias: Floats | None,
    *,
    logits: bool = False,
    order: Order = Order.FORWARD,
    checked: bool = False,
) -> Floats:
    """x @ weight.T + bias by a kernel; `logits`: not rounded to the element type."""
    tile = TILES[name]
    num_rows, depth = x.shape
    num_columns = len(weight)
    out = np.full((num_rows, num_columns), np.nan, np.float32 if logits else ELEMENTS[element])
    kernel = load(CUDA / "linear.cu", (f"-DELEMENT={element}",), checked=checked).kernels[
        f"{name}_float32" if logits else name
    ]
    kernel.max_dynamic_shared_size_bytes = tile.shared_bytes
    kernel(
        [-(-num_rows // tile.rows) * -(-num_columns // tile.columns)],
        [THREADS],
        [x, weight, bias, out, np.int32(num_rows), np.int32(num_columns), np.int32(depth)],
        tile.shared_bytes,
        execution=Execution(order=order),
    )
    return out.astype(np.float32)


@dataclass(frozen=True)
class Case:
    num_rows: int
    num_columns: int
    depth: int
    element: str
    logits: bool
    has_bias: bool
    seed: int

    def inputs(self) -> tuple[Array, Array, Floats | None]:
        generator = np.random.default_rng(self.seed)
        dtype = ELEMENTS[self.element]
        x = generator.standard_normal((self.num_rows, self.depth)).astype(dtype)
        weight = generator.standard_normal((self.num_columns, self.depth)).astype(dtype)
        bias = generator.standard_normal(self.num_columns, dtype=np.float32) if self.has_bias else None
        return x, weight, bias

    def assert_close(self, out: Floats) -> None:
        """The sum may be off by a rounding at each of its terms; then it is rounded to the type."""
        x, weight, bias = self.inputs()
        rows, columns = x.astype(np.float64), weight.astype(np.float64).T
        added = np.zeros(self.num_columns) if bias is None else bias.astype(np.float64)
        exact = rows @ columns + added
        terms = np.abs(rows) @ np.abs(columns) + np.abs(added)
        step = STEPS["float32" if self.logits else self.element]
        assert (np.abs(out - exact) <= step * np.abs(exact) + 1e-5 * terms).all()


def cases(rows: st.SearchStrategy[int], columns: st.SearchStrategy[int], depths: int) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        num_rows=rows,
        num_columns=columns,
        depth=st.integers(1, depths).map(lambda chunks: 8 * chunks),
        element=st.sampled_from(list(ELEMENTS)),
        logits=st.booleans(),
        has_bias=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )


ragged = {
    "linear_few": cases(st.integers(1, 180), st.integers(1, 100), 130),
    "linear_some": cases(st.integers(1, 140), st.integers(1, 100), 60),
    "linear_many": cases(st.integers(1, 300), st.integers(1, 280), 40),
}


@pytest.mark.parametrize("name", TILES)
@settings(max_examples=12)
@given(data=st.data())
def test_products_of_ragged_sizes_in_two_orders_of_threads(name: str, data: st.DataObject) -> None:
    case = data.draw(ragged[name])
    forward = linear(name, case.element, *case.inputs(), logits=case.logits)
    case.assert_close(forward)
    shuffled = linear(name, case.element, *case.inputs(), logits=case.logits, order=Order.SHUFFLED)
    np.testing.assert_array_equal(forward, shuffled)


@pytest.mark.parametrize("element", ELEMENTS)
@settings(max_examples=6)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_every_kernel_and_any_company(element: str, data: st.DataObject) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_rows, num_columns = data.draw(st.integers(20, 150)), data.draw(st.integers(1, 70))
    depth = 8 * data.draw(st.integers(1, 60))
    x = generator.standard_normal((num_rows, depth)).astype(ELEMENTS[element])
    weight = generator.standard_normal((num_columns, depth)).astype(ELEMENTS[element])
    whole = linear("linear_many", element, x, weight, None, logits=True)
    x[7] = np.nan  # a neighbour that failed
    for name in TILES:
        start = data.draw(st.integers(8, num_rows - 1))
        some = linear(name, element, x[start:].copy(), weight, None, logits=True)
        assert some.tobytes() == whole[start:].tobytes()
        others = linear(name, element, x[:20].copy(), weight, None, logits=True)
        assert np.isnan(others[7]).all()
        assert np.delete(others, 7, axis=0).tobytes() == np.delete(whole[:20], 7, axis=0).tobytes()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("name", TILES)
def test_no_fault_in_check_mode(name: str, element: str) -> None:
    tile = TILES[name]
    # One more than a tile in each direction, more stages than the ring has, an odd number of columns.
    case = Case(tile.rows + 1, tile.columns + 1, 8 * 40, element, logits=False, has_bias=True, seed=1)
    case.assert_close(linear(name, element, *case.inputs(), checked=True, order=Order.SHUFFLED))
    case = Case(3, tile.columns, 8, element, logits=True, has_bias=False, seed=2)
    case.assert_close(linear(name, element, *case.inputs(), logits=True, checked=True))
