"""CudaKernels: the kernels of cuda/ for one model, launched with the grids that their files ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minipaged.ops.cuda.errors import cuda_errors, device_error, error_classes
from minipaged.ops.cuda.modules import CudaModules, Source

if TYPE_CHECKING:
    import cupy

KV_SPLIT = 512
"""Positions that one block of a decoding sequence's attention takes. A token's bits depend on it."""

NULL = np.uint64(0)
"""A pointer to nothing. For None, CuPy before version 14 gives the driver no argument at all, and it may crash."""

ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
"""In C++."""


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
    """For a product of this size: the largest whose blocks give every multiprocessor work."""
    few, some, many = tiles
    if num_rows <= few.rows:
        return few
    blocks = -(-num_rows // many.rows) * -(-num_columns // many.columns)
    return some if num_rows <= some.rows or blocks < multiprocessors else many


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """What a block of a kernel of attention.cu computes: so many rows (query heads of one KV group x tokens)."""

    kernel: str
    warps: int
    stages: int
    head_dim: int

    @property
    def rows(self) -> int:
        """Of a tile of queries."""
        return 16 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        pitch, positions = self.head_dim + 8, 32 if self.head_dim <= 128 else 16
        return 2 * pitch * (2 * positions * self.stages + self.rows) + 4 * self.rows * (self.head_dim + 4)


class CudaKernels:
    """Compiled for one element type and head_dim. All launches go to one stream."""

    def __init__(self, modules: CudaModules, stream: cupy.cuda.Stream, *, element: str, head_dim: int) -> None:
        self._stream = stream
        self._errors = error_classes()
        self.kv_split = KV_SPLIT
        self._functions: dict[str, cupy.RawKernel] = {}
        self.is_counting = False
        """Nothing is launched while the workspace is measured."""
        self.attention_decode = AttentionTile("attention_decode", warps=1, stages=3, head_dim=head_dim)
        self.attention_any = AttentionTile("attention", warps=4 if head_dim <= 128 else 2, stages=2, head_dim=head_dim)
        of_type = f"ELEMENT={ELEMENTS[element]}"
        of_head = (of_type, f"HEAD_DIM={head_dim}")
        kernels = {
            Source("embed", (of_type,)): ["embed"],
            Source("rms_norm", (of_type,)): ["rms_norm"],
            Source("linear", (of_type,)): [tile.kernel for tile in (*LINEAR, *LOGITS, *GATED)],
            Source("fill_blocks", (of_type,)): ["fill_blocks"],
            Source("rope_and_cache", of_head): ["rope_and_cache"],
            Source("attention", (*of_head, f"KV_SPLIT={self.kv_split}")): [
                "attention_decode",
                "attention",
                "attention_combine",
            ],
            Source("take"): ["take"],
            Source("sampling"): ["penalise", "add_bias", "sample", "logprobs"],
            Source("copy_blocks"): ["copy_blocks"],
            Source("update_tables"): ["update_tables"],
        }
        with cuda_errors("load its kernels"):
            for module, names in zip(modules.load(list(kernels)), kernels.values(), strict=True):
                self._functions |= {name: module.get_function(name) for name in names}
            for tile in (*LINEAR, *LOGITS, *GATED, self.attention_decode, self.attention_any):
                self._functions[tile.kernel].max_dynamic_shared_size_bytes = tile.shared_bytes

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        threads: int,
        arguments: Sequence[cupy.ndarray | np.generic | None],
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel. Numbers are NumPy's, of the types that the kernel declares: CuPy sends them as they are."""
        if self.is_counting:
            return
        given = tuple(NULL if argument is None else argument for argument in arguments)
        try:
            self._functions[name](grid, (threads,), given, shared_mem=shared_bytes, stream=self._stream)
        except self._errors as error:
            raise device_error(f"launch {name}", error) from error
