"""The layout of a block: nothing overlaps, nothing is left between."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from minipaged.kv.layout import ELEMENT_BYTES, ElementType, KVLayout, Plane, grouped_query_layout

KIB = 2**10
ELEMENT_TYPES: st.SearchStrategy[ElementType] = st.sampled_from(sorted(ELEMENT_BYTES))
SIZES = st.integers(1, 9)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """Planes that differ in everything, with scales and without."""
    block_size, planes, offset = draw(SIZES), [], 0
    for _ in range(draw(st.integers(1, 4))):
        plane = Plane.of_heads(
            num_heads=draw(SIZES),
            width=draw(SIZES),
            element_type=draw(ELEMENT_TYPES),
            scale_bytes=draw(st.sampled_from((0, 2, 4))),
            offset=offset,
            block_size=block_size,
        )
        planes.append(plane)
        offset += plane.num_bytes
    return KVLayout(draw(SIZES), block_size, tuple(planes))


@given(layout=layouts())
def test_the_heads_of_all_planes_and_layers_tile_a_block(layout: KVLayout) -> None:
    spans = []
    for layer in range(layout.num_layers):
        for plane in layout.planes:
            start = layer * layout.layer_stride + plane.offset
            spans += [(start + head * plane.head_stride, plane.head_stride) for head in range(plane.num_heads)]
            content = layout.block_size * (plane.width * plane.element_bytes + plane.scale_bytes)
            assert content <= plane.head_stride < content + 16
            assert plane.scale_bytes or content == plane.head_stride
    assert spans[0][0] == 0
    assert all(start + size == following for (start, size), (following, _) in pairwise(spans))
    assert sum(spans[-1]) == layout.bytes_per_block
    assert layout.bytes_per_token * layout.block_size <= layout.bytes_per_block


@given(layout=layouts(), num_layers=SIZES)
def test_every_layer_takes_the_same(layout: KVLayout, num_layers: int) -> None:
    assert replace(layout, num_layers=num_layers).bytes_per_block == num_layers * layout.layer_stride


def layout_of(num_layers: int, num_kv_heads: int) -> KVLayout:
    return grouped_query_layout(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=128, block_size=16, element_type="float16"
    )


def test_llama_7b_takes_512_kib_per_token_in_float16() -> None:
    assert layout_of(32, 32).bytes_per_token == 512 * KIB
    assert layout_of(32, 32).bytes_per_block == 8 * 2**20


def test_llama_3_8b_with_8_kv_heads_takes_a_quarter_of_that() -> None:
    grouped = layout_of(32, 8).bytes_per_token
    assert grouped == 128 * KIB
    assert 4 * grouped == layout_of(32, 32).bytes_per_token
    assert 4096 * grouped == 2**30 // 2


def test_elements_have_the_size_of_their_type() -> None:
    by_type = {name: replace(layout_of(1, 1).keys, element_type=name).element_bytes for name in ELEMENT_BYTES}
    assert by_type == {"float32": 4, "float16": 2, "bfloat16": 2}


def test_keys_come_before_values() -> None:
    layout = layout_of(2, 3)
    assert layout.keys.offset == 0
    assert layout.values.offset == layout.keys.num_bytes == 3 * 16 * 128 * 2
