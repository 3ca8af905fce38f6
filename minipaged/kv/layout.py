"""KVLayout: where the KV of a token stands within a block, computed once for everything that reads or writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

ElementType = Literal["float32", "float16", "bfloat16"]
ELEMENT_BYTES: dict[ElementType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

SCALES_ALIGNMENT = 16
"""Bytes to which the scales of a head are padded, so that the next head begins where a wide load may begin."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One array of a layer's KV, such as its keys: in each block `block_size` tokens of `num_heads` heads.

    A head is one span: the elements of all tokens, then their scales if it has any. How a device orders the elements
    within that span is the device's own affair. Offsets and strides are bytes.
    """

    num_heads: int
    width: int
    """Elements of one token and head."""
    element_type: ElementType
    scale_bytes: int
    """Bytes of the scale of one token and head; 0: the plane has no scales."""
    offset: int
    """Distance from the beginning of the layer's part of a block to the plane's first head."""
    head_stride: int
    """Distance from one head to the next."""

    @classmethod
    def of_heads(
        cls, *, num_heads: int, width: int, element_type: ElementType, scale_bytes: int, offset: int, block_size: int
    ) -> Self:
        """The plane whose heads follow each other as closely as the padding of their scales allows."""
        elements = block_size * width * ELEMENT_BYTES[element_type]
        scales = -(-block_size * scale_bytes // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
        return cls(num_heads, width, element_type, scale_bytes, offset, head_stride=elements + scales)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.element_type]

    @property
    def num_bytes(self) -> int:
        """Bytes of all heads in one block and layer."""
        return self.num_heads * self.head_stride


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A block holds `block_size` tokens of all layers as one contiguous span: layer after layer, plane after plane.

    Every layer has the same planes. Moving a block is therefore one copy of `bytes_per_block` bytes.
    """

    num_layers: int
    block_size: int
    """Tokens of a block."""
    planes: tuple[Plane, ...]

    @property
    def keys(self) -> Plane:
        """The plane of K."""
        return self.planes[0]

    @property
    def values(self) -> Plane:
        """The plane of V."""
        return self.planes[1]

    @property
    def layer_stride(self) -> int:
        """Bytes from one layer's part of a block to the next one's."""
        return sum(plane.num_bytes for plane in self.planes)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block, all layers together."""
        return self.num_layers * self.layer_stride

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's KV in all layers: a block's share, without what only pads the block."""
        return self.num_layers * sum(
            plane.num_heads * (plane.width * plane.element_bytes + plane.scale_bytes) for plane in self.planes
        )


def grouped_query_layout(
    *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, element_type: ElementType
) -> KVLayout:
    """The layout of grouped-query attention: K and V alike, 2 x layers x KV heads x head_dim elements a token."""
    planes: list[Plane] = []
    offset = 0
    for _ in ("keys", "values"):
        plane = Plane.of_heads(
            num_heads=num_kv_heads,
            width=head_dim,
            element_type=element_type,
            scale_bytes=0,
            offset=offset,
            block_size=block_size,
        )
        planes.append(plane)
        offset += plane.num_bytes
    return KVLayout(num_layers, block_size, tuple(planes))
