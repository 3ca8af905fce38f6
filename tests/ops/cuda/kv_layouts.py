"""KV layouts for tests of kernels: K and V differ in their strides, so that one taken for the other shows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from minipaged.kv.layout import ElementType, KVLayout, Plane

KV_TYPES: dict[str, ElementType] = {"__half": "float16", "__nv_bfloat16": "bfloat16", "float": "float32"}
"""By the type's name in C++."""


def uneven_layout(
    *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, element_type: ElementType
) -> KVLayout:
    """As for grouped-query attention, but behind each head of V there is room for scales."""
    planes: list[Plane] = []
    for scale_bytes in (0, 4):
        plane = Plane.of_heads(
            num_heads=num_kv_heads,
            width=head_dim,
            element_type=element_type,
            scale_bytes=scale_bytes,
            offset=sum(each.num_bytes for each in planes),
            block_size=block_size,
        )
        planes.append(plane)
    return KVLayout(num_layers, block_size, tuple(planes))


def slots_of(cache: NDArray[np.generic], layout: KVLayout, layer: int) -> Iterator[NDArray[np.generic]]:
    """Views of K and of V of a layer in a pool [num_blocks, elements of a block]: [blocks, heads, slots, width]."""
    size = cache.itemsize
    for plane in (layout.keys, layout.values):
        yield np.ndarray(
            shape=(len(cache), plane.num_heads, layout.block_size, plane.width),
            dtype=cache.dtype,
            buffer=cache.view(np.uint8).data,
            offset=layer * layout.layer_stride + plane.offset,
            strides=(layout.bytes_per_block, plane.head_stride, plane.width * size, size),
        )
