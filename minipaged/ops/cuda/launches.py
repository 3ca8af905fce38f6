"""With how many blocks, threads and bytes of shared memory each kernel of cuda/ is launched, and where it finds KV.

The kernels' files say what they ask for. Nothing else computes it: the backend and the tests launch by these functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from minipaged.kv.layout import KVLayout


class Launch(NamedTuple):
    """The shape of a launch."""

    grid: tuple[int, ...]
    threads: int
    """Threads of a block."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""


# ---- Products: linear.cu ----


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block of a kernel of linear.cu computes: rows x columns of the product, and what it needs for it."""

    kernel: str
    rows: int
    columns: int
    depth: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 2 * self.stages * self.depth * (self.rows + self.columns)

    def launch(self, num_rows: int, num_columns: int) -> Launch:
        """The launch for a product of this size."""
        blocks = -(-num_rows // self.rows) * -(-num_columns // self.columns)
        return Launch((blocks,), 128, self.shared_bytes)


def _tiles(suffix: str, few: Tile, some: Tile) -> tuple[Tile, Tile, Tile]:
    many = Tile("linear_many", rows=128, columns=128, depth=64, stages=3)
    few, some, many = (replace(tile, kernel=tile.kernel + suffix) for tile in (few, some, many))
    return few, some, many


NARROW = (
    Tile("linear_few", rows=16, columns=32, depth=128, stages=6),
    Tile("linear_some", rows=64, columns=32, depth=64, stages=6),
)
WIDE = (
    Tile("linear_few", rows=16, columns=64, depth=128, stages=4),
    Tile("linear_some", rows=64, columns=128, depth=64, stages=4),
)
LINEAR, LOGITS, GATED = _tiles("", *NARROW), _tiles("_float32", *WIDE), _tiles("_gated", *WIDE)
"""Kernels of one result, for few, some and many rows; which of them computes it does not change a bit."""


def tile_for(num_rows: int, num_columns: int, tiles: tuple[Tile, Tile, Tile], multiprocessors: int) -> Tile:
    """The tile for a product of this size: the largest whose blocks give every multiprocessor work."""
    few, some, many = tiles
    if num_rows <= few.rows:
        return few
    [blocks] = many.launch(num_rows, num_columns).grid
    return some if num_rows <= some.rows or blocks < multiprocessors else many


# ---- Attention: attention.cu ----


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """What a block of a kernel of attention.cu computes: so many rows (query heads of one KV group x tokens)."""

    kernel: str
    warps: int
    stages: int
    head_dim: int

    @property
    def rows(self) -> int:
        """Rows of a tile of queries."""
        return 16 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        pitch, positions = self.head_dim + 8, 32 if self.head_dim <= 128 else 16
        return 2 * pitch * (2 * positions * self.stages + self.rows) + 4 * self.rows * (self.head_dim + 4)

    def launch(self, num_tokens: int, num_sequences: int, num_kv_heads: int, group: int, num_splits: int) -> Launch:
        """The launch for so many sequences with so many tokens together; `group` query heads read one KV head."""
        tiles = num_tokens // max(1, self.rows // group) + num_sequences
        grid = (tiles, num_kv_heads * -(-group // self.rows), num_splits)
        return Launch(grid, 32 * self.warps, self.shared_bytes)


def decode_tile(head_dim: int) -> AttentionTile:
    """The tile of the kernel for steps in which every sequence has one token."""
    return AttentionTile("attention_decode", warps=1, stages=3, head_dim=head_dim)


def chunk_tile(head_dim: int) -> AttentionTile:
    """The tile of the kernel for all other steps."""
    return AttentionTile("attention", warps=4 if head_dim <= 128 else 2, stages=2, head_dim=head_dim)


def attention_combine(num_sequences: int, num_query_heads: int, head_dim: int) -> Launch:
    """A block for each head, a thread for four elements of its result."""
    return Launch((num_sequences, num_query_heads), head_dim // 4)


# ---- Rows ----


def embed(num_tokens: int) -> Launch:
    """A block for each row."""
    return Launch((num_tokens,), 128)


def rms_norm(num_tokens: int, size: int, element_bytes: int = 2) -> Launch:
    """A block for each row, a thread for each 16 bytes of it. The bits depend on `threads`, these on `size` alone."""
    return Launch((num_tokens,), min(1024, -(-size * element_bytes // 16 // 32) * 32))


def rope_and_cache(num_tokens: int, num_heads: int) -> Launch:
    """A warp for each head, of queries, keys and values, of each token."""
    return Launch((num_tokens, -(-num_heads // 4)), 128)


def take(num_rows: int, words: int) -> Launch:
    """Four words of a row to a thread."""
    return Launch((num_rows, -(-words // 1024)), 256)


# ---- KV blocks and block tables ----


def kv_strides(layout: KVLayout, layer: int) -> tuple[np.int64, ...]:
    """What the kernels need to find a layer's KV, in elements: the stride of blocks; of K, then of V, where the first
    head of block 0 begins and the stride of heads.
    """
    size, start = layout.keys.element_bytes, layer * layout.layer_stride
    places = [layout.bytes_per_block]
    for plane in (layout.keys, layout.values):
        places += [start + plane.offset, plane.head_stride]
    return tuple(np.int64(place // size) for place in places)


def kv_blocks(num_blocks: int, vectors: int) -> Launch:
    """copy_blocks and fill_blocks; `vectors` of 16 bytes in each KV block, four of them to a thread."""
    return Launch((num_blocks * -(-vectors // 1024),), 256)


def update_tables(num_changes: int) -> Launch:
    """A thread for each entry that changes."""
    return Launch((-(-num_changes // 256),), 256)


# ---- Choosing tokens: sampling.cu ----


def penalise(num_entries: int) -> Launch:
    """A thread for each entry, of all rows together."""
    return Launch((-(-num_entries // 512),), 512)


def add_bias(num_rows: int) -> Launch:
    """A warp for each row of logits."""
    return Launch((num_rows,), 32)


def choose(num_rows: int) -> Launch:
    """`sample` and `logprobs`: a block for each row of logits."""
    return Launch((num_rows,), 512)
