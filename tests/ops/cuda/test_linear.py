"""cuda/linear.cu against products in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.ops.cuda.launches import GATED, LINEAR, LOGITS
from minipaged.ops.reference.ops import ReferenceOps
from tests.ops.cuda.emulated import Execution, Order, load
from tests.ops.cuda.toolchain import CUDA

Array = NDArray[np.generic]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


TILES = {tile.kernel: tile for tile in (*LINEAR, *LOGITS, *GATED)}
ELEMENTS = {"__half": np.dtype(np.float16), "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16)}
STEPS = {"__half": 2.0**-11, "__nv_bfloat16": 2.0**-8, "float32": 2.0**-24}
"""Largest relative error of rounding to the type."""


def linear(
    name: str,
    element: str,
    x: Array,
    weight: Array,
    bias: Floats | None,
    residual: Array | None = None,
    *,
    order: Order = Order.FORWARD,
    checked: bool = False,
) -> Floats:
    """x @ weight.T + bias + residual by a kernel; of linear_*_gated what becomes of it."""
    tile = TILES[name]
    num_rows, depth = x.shape
    num_columns = len(weight)
    dtype = np.dtype(np.float32) if name.endswith("float32") else ELEMENTS[element]
    out = np.full((num_rows, num_columns // 2 if name.endswith("gated") else num_columns), np.nan, dtype)
    kernel = load(CUDA / "linear.cu", (f"-DELEMENT={element}",), checked=checked).kernels[name]
    launch = tile.launch(num_rows, num_columns)
    kernel.max_dynamic_shared_size_bytes = launch.shared_bytes
    added = (bias, residual) if tile in LINEAR else (bias,)
    kernel(
        launch.grid,
        [launch.threads],
        [x, weight, *added, out, np.int32(num_rows), np.int32(num_columns), np.int32(depth)],
        launch.shared_bytes,
        execution=Execution(order=order),
    )
    return out.astype(np.float32)


@dataclass(frozen=True)
class Case:
    name: str
    num_rows: int
    num_columns: int
    depth: int
    element: str
    has_bias: bool
    has_residual: bool
    seed: int

    def inputs(self) -> tuple[Array, Array, Floats | None, Array | None]:
        generator = np.random.default_rng(self.seed)
        dtype = ELEMENTS[self.element]
        x = generator.standard_normal((self.num_rows, self.depth)).astype(dtype)
        weight = generator.standard_normal((self.num_columns, self.depth)).astype(dtype)
        bias = generator.standard_normal(self.num_columns, dtype=np.float32) if self.has_bias else None
        residual = None
        if self.has_residual:
            residual = generator.standard_normal((self.num_rows, self.num_columns)).astype(dtype)
        return x, weight, bias, residual

    def run(self, order: Order = Order.FORWARD, *, checked: bool = False) -> Floats:
        return linear(self.name, self.element, *self.inputs(), order=order, checked=checked)

    def assert_close(self, out: Floats) -> None:
        """A sum may be off by a rounding at each of its terms; then it is rounded to the type."""
        x, weight, bias, residual = self.inputs()
        rows, columns = x.astype(np.float64), weight.astype(np.float64).T
        exact, size = rows @ columns, np.abs(rows) @ np.abs(columns)
        for added in (bias, residual):
            if added is not None:
                exact, size = exact + added.astype(np.float64), size + np.abs(added.astype(np.float64))
        error = 1e-5 * size
        if self.name.endswith("gated"):
            exact, error = gated(exact, error)
        step = STEPS["float32" if self.name.endswith("float32") else self.element]
        assert (np.abs(out - exact) <= step * np.abs(exact) + error + 2.0**-25).all()


def gated(products: Doubles, error: Doubles) -> tuple[Doubles, Doubles]:
    """silu(gate) * up of columns that alternate, and what their errors add up to: silu is nowhere steeper than 1.1."""
    gate, up = products[:, ::2], products[:, 1::2]
    silu = gate * (1 + np.tanh(gate / 2)) / 2
    return silu * up, 1.1 * error[:, ::2] * np.abs(up) + np.abs(silu) * error[:, 1::2] + 1e-6 * np.abs(silu * up)


@st.composite
def ragged(draw: st.DrawFn, name: str) -> Case:
    """Up to a few tiles in each direction, and more steps than the ring has stages."""
    tile = TILES[name]
    num_columns = draw(st.integers(1, 2 * tile.columns + 30))
    has_residual = tile in LINEAR and draw(st.booleans())
    return Case(
        name=name,
        num_rows=draw(st.integers(1, 2 * tile.rows + 20)),
        num_columns=num_columns + num_columns % 2 if has_residual or tile in GATED else num_columns,
        depth=8 * draw(st.integers(1, (tile.stages + 2) * tile.depth // 8)),
        element=draw(st.sampled_from(list(ELEMENTS))),
        has_bias=draw(st.booleans()),
        has_residual=has_residual,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.parametrize("name", TILES)
@settings(max_examples=8)
@given(data=st.data())
def test_products_of_ragged_sizes_in_two_orders_of_threads(name: str, data: st.DataObject) -> None:
    case = data.draw(ragged(name))
    forward = case.run()
    case.assert_close(forward)
    np.testing.assert_array_equal(forward, case.run(Order.SHUFFLED))


@pytest.mark.parametrize("ending", ["", "_float32", "_gated"])
@pytest.mark.parametrize("element", ELEMENTS)
@settings(max_examples=4)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_every_kernel_and_any_company(
    element: str, ending: str, data: st.DataObject
) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    num_rows, num_columns = data.draw(st.integers(20, 150)), 2 * data.draw(st.integers(1, 70))
    depth = 8 * data.draw(st.integers(1, 60))
    x = generator.standard_normal((num_rows, depth)).astype(ELEMENTS[element])
    weight = generator.standard_normal((num_columns, depth)).astype(ELEMENTS[element])
    bias = generator.standard_normal(num_columns, dtype=np.float32)
    residual = generator.standard_normal((num_rows, num_columns)).astype(ELEMENTS[element])
    whole = linear(f"linear_many{ending}", element, x, weight, bias, residual)
    x[7] = np.nan  # a neighbour that failed
    for rows in ("few", "some", "many"):
        name = f"linear_{rows}{ending}"
        start = data.draw(st.integers(8, num_rows - 1))
        some = linear(name, element, x[start:].copy(), weight, bias, residual[start:].copy())
        assert some.tobytes() == whole[start:].tobytes()
        others = linear(name, element, x[:20].copy(), weight, bias, residual[:20].copy())
        assert np.isnan(others[7]).all()
        assert np.delete(others, 7, axis=0).tobytes() == np.delete(whole[:20], 7, axis=0).tobytes()


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_the_gate_where_its_exponential_overflows_or_vanishes(scale: float) -> None:
    """Weights of one element, so that gate and up are known: the product is never NaN."""
    gate = np.linspace(-scale, scale, 401)
    weight = np.zeros((802, 8), np.float16)
    weight[::2, 0], weight[1::2, 0] = gate, 0.25
    out = linear("linear_few_gated", "__half", np.eye(1, 8, dtype=np.float16), weight, None)
    exact, _ = gated(weight[:, 0].astype(np.float64)[None], np.zeros((1, 802)))
    np.testing.assert_allclose(out, exact, rtol=2.0**-10, atol=2.0**-24)


def test_infinities_of_the_gate_are_as_in_the_reference() -> None:
    weight = np.zeros((8, 8), np.float16)
    weight[:, 0] = [np.inf, 1, -np.inf, 1, 1, np.inf, np.nan, 1]
    out = linear("linear_few_gated", "__half", np.eye(1, 8, dtype=np.float16) + np.float16(1), weight, None)
    reference = ReferenceOps().gated_linear(
        np.array([[2]], np.float32), np.concatenate([weight[::2, :1], weight[1::2, :1]]).astype(np.float32), None
    )
    np.testing.assert_array_equal(out, reference)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("name", TILES)
def test_no_fault_in_check_mode(name: str, element: str) -> None:
    tile = TILES[name]
    has_residual = tile in LINEAR
    odd = 0 if tile in GATED else 1
    # More than a tile in each direction, more steps than the ring has stages.
    depth = 8 * 40 if tile.rows > 16 else (tile.stages + 1) * tile.depth + 8
    columns = tile.columns + 2 - (0 if has_residual else odd)
    case = Case(name, tile.rows + 1, columns, depth, element, has_bias=True, has_residual=has_residual, seed=1)
    case.assert_close(case.run(Order.SHUFFLED, checked=True))
    case = Case(name, 3, tile.columns - odd, 8, element, has_bias=False, has_residual=False, seed=2)
    case.assert_close(case.run(checked=True))


@pytest.mark.parametrize("tile_rows", [9, 12, 15])
def test_the_last_group_of_tile_rows_is_computed_whole(tile_rows: int) -> None:
    """A group has 8 tile rows; prefills of 1,025 to 1,920 tokens have a second group that is not full."""
    [tile] = [tile for tile in LINEAR if tile.kernel == "linear_many"]
    case = Case(tile.kernel, tile_rows * tile.rows - 100, tile.columns + 2, 8, "__half", False, False, seed=tile_rows)
    case.assert_close(case.run())
