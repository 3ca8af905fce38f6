"""What the packed matrices of the CPU backend hold, read slowly by the description in cpu/linear.h."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minipaged.ops.cpu.packing import Kind, PackedMatrix

TILE = 16
GROUP = 32


def unpacked(matrix: PackedMatrix) -> NDArray[np.float64]:
    """[out_features, in_features], exactly. Checks that the rows that fill up the last tile are zeros."""
    if matrix.is_quantised:
        scale, minimum, q = integers(matrix)
        rows = (scale[..., None] * q + minimum[..., None]).reshape(len(q), matrix.in_features)
    else:
        rows = _floats(matrix)
    assert not rows[matrix.out_features :].any(), "the padding is not zero"
    return rows[: matrix.out_features]


def integers(matrix: PackedMatrix) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Of a quantised matrix: scales and minima [rows, groups], and the integers [rows, groups, 32], with padding."""
    num_vectors = 4 if matrix.kind is Kind.Q4 else 8
    groups, tiles = matrix.in_features // GROUP, -(-matrix.out_features // TILE)
    stored = matrix.data.reshape(tiles, groups, 64 + 64 * num_vectors)
    scale, minimum = np.empty((2, tiles * TILE, groups))
    q = np.empty((tiles * TILE, groups, GROUP))
    for row in range(tiles * TILE):
        tile, lane = divmod(row, TILE)
        for group in range(groups):
            bytes_ = stored[tile, group]
            scale[row, group], minimum[row, group] = bytes_[4 * lane : 4 * lane + 4].view(np.float16)
            for vector in range(num_vectors):
                four = bytes_[64 + 64 * vector + 4 * lane :][:4]
                if matrix.kind is Kind.Q4:
                    q[row, group, 4 * vector : 4 * vector + 4] = four & 15
                    q[row, group, 16 + 4 * vector : 20 + 4 * vector] = four >> 4
                else:
                    q[row, group, 4 * vector : 4 * vector + 4] = four
    return scale, minimum, q


def _floats(matrix: PackedMatrix) -> NDArray[np.float64]:
    tiles = -(-matrix.out_features // TILE)
    if matrix.kind is Kind.F32:
        elements = matrix.data.view(np.float32).astype(np.float64)
    elif matrix.kind is Kind.F16:
        elements = matrix.data.view(np.float16).astype(np.float64)
    else:
        elements = (matrix.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return elements.reshape(tiles, matrix.in_features, TILE).swapaxes(1, 2).reshape(tiles * TILE, -1)
