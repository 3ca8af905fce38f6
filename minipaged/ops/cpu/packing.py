"""Packed matrices for the CPU kernels: 16 output rows interleaved, so that a vector's lanes are output rows.

Two quantised formats serve all of GGUF, both with a float16 scale and minimum per 32 inputs: 4-bit (Q4_0, Q4_1, Q4_K)
and 8-bit (everything else). Formats whose groups are of 32 keep their integers exactly; the others (Q6_K, Q2_K, Q3_K,
the IQ family) are quantised again to 8 bits. The layouts are described in cpu/linear.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from minipaged.errors import ModelLoadError
from minipaged.ops.tensor import HostTensor

TILE = 16
GROUP = 32
ALIGNMENT = 64
CHUNK_BYTES = 64 << 20

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Float32 = NDArray[np.float32]


class Kind(IntEnum):
    """How a matrix, or the KV cache, is stored; as in cpu/command.h."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4 = 3
    Q8 = 4


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """[out, in], packed."""

    kind: Kind
    out_features: int
    in_features: int
    data: Bytes

    @property
    def is_quantised(self) -> bool:
        """Whether it is multiplied with quantised activations."""
        return self.kind in (Kind.Q4, Kind.Q8)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Quantised rows before they are interleaved: weight = scale * q + minimum, in groups of 32 inputs."""

    words: Words
    """[rows, groups, 4] (4-bit: low nibbles are inputs 0..15, high ones 16..31) or [rows, groups, 8] (8-bit)."""
    scales: NDArray[np.uint32]
    """[rows, groups]: float16 scale in the low half, float16 minimum in the high half."""


class Arena:
    """Memory for packed matrices, side by side in chunks so large that NumPy asks for huge pages.

    Small ones need an address translation for every four thousand bytes: a decode took 3 to 12 % longer with them.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Bytes:
        """Zeros, aligned, never handed out before."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._left):
            chunk = np.zeros(max(size, CHUNK_BYTES) + ALIGNMENT, np.uint8)  # takes memory as it is written to
            self._left = chunk[-chunk.ctypes.data % ALIGNMENT :]
        taken, self._left = self._left[:num_bytes], self._left[size:]
        return taken


def pack(tensors: Sequence[HostTensor], arena: Arena) -> PackedMatrix:
    """Stack matrices along their rows and pack them, each from its own encoding, in the best format that holds all.

    Rows that only fill up the last tile are zeros.
    """
    return _pack([tensors], arena)


def pack_gate_up(gate: HostTensor, up: HostTensor, arena: Arena) -> PackedMatrix:
    """The same, but up begins with a tile of its own."""
    return _pack([[gate], [up]], arena)


def _pack(stacks: Sequence[Sequence[HostTensor]], arena: Arena) -> PackedMatrix:
    tensors = [tensor for stack in stacks for tensor in stack]
    kind = _common_kind(tensors)
    heights, in_features = [sum(tensor.shape[0] for tensor in stack) for stack in stacks], tensors[0].shape[1]
    ends = list(accumulate(-(-height // TILE) for height in heights))
    target: NDArray[np.generic]
    if kind in (Kind.Q4, Kind.Q8):
        per_group = 5 if kind is Kind.Q4 else 9
        packed = arena.take(ends[-1] * (in_features // GROUP) * per_group * TILE * 4)
        target = packed.view(np.uint32).reshape(ends[-1], in_features // GROUP, per_group, TILE).transpose(0, 3, 1, 2)
        convert: Callable[[HostTensor], NDArray[np.generic]] = partial(_group_words, kind=kind)
    else:
        dtype = np.dtype(np.float32 if kind is Kind.F32 else np.uint16)
        packed = arena.take(ends[-1] * in_features * TILE * dtype.itemsize)
        target = packed.view(dtype).reshape(ends[-1], in_features, TILE).transpose(0, 2, 1)
        convert = partial(_elements, kind=kind)
    for stack, start, end in zip(stacks, [0, *ends], ends, strict=False):
        _fill(target[start:end], stack, convert)
    return PackedMatrix(kind, sum(heights), in_features, packed)


def _common_kind(tensors: Sequence[HostTensor]) -> Kind:
    kinds = {_kind_of(tensor) for tensor in tensors}
    if len(kinds) == 1:
        return kinds.pop()
    return Kind.Q8 if kinds <= {Kind.Q4, Kind.Q8} else Kind.F32


def _kind_of(tensor: HostTensor) -> Kind:
    if tensor.encoding in ("F32", "F16", "BF16"):
        return Kind[tensor.encoding]
    if tensor.shape[1] % GROUP:
        return Kind.F32
    return Kind.Q4 if tensor.encoding in ("Q4_0", "Q4_1", "Q4_K") else Kind.Q8


def _fill(
    target: NDArray[np.generic], tensors: Sequence[HostTensor], convert: Callable[[HostTensor], NDArray[np.generic]]
) -> None:
    """Write the converted rows into a view [tiles, TILE, ...] of the packed matrix, tile by tile."""
    row = 0
    for tensor in tensors:
        rows = convert(tensor)
        done = 0
        while done < len(rows):
            tile, lane = divmod(row, TILE)
            if lane == 0 and len(rows) - done >= TILE:
                whole = (len(rows) - done) // TILE
                part = rows[done : done + whole * TILE]
                target[tile : tile + whole] = part.reshape(whole, TILE, *rows.shape[1:])
                count = whole * TILE
            else:
                count = min(TILE - lane, len(rows) - done)
                target[tile, lane : lane + count] = rows[done : done + count]
            row, done = row + count, done + count


def _elements(tensor: HostTensor, kind: Kind) -> NDArray[np.generic]:
    if kind is Kind.F32:
        return tensor.float32()
    return tensor.rows.view(np.uint16).reshape(tensor.shape)


@np.errstate(over="ignore", invalid="ignore")  # `_check` finds what comes of it
def _group_words(tensor: HostTensor, kind: Kind) -> Words:
    """[rows, groups, 1 + 4 or 8]: scale and minimum, then the integers."""
    if tensor.encoding == "Q4_1" and kind is Kind.Q4:
        words = tensor.rows.view(np.uint32).reshape(len(tensor.rows), -1, 5)  # this very order
        _check(tensor, words[..., 0])
        return words
    exact = _EXACT.get(tensor.encoding)
    groups = exact(tensor.rows) if exact else _quantise_again(tensor)
    _check(tensor, groups.scales)
    if kind is Kind.Q8 and _kind_of(tensor) is Kind.Q4:
        groups = _widen(groups)
    return np.concatenate([groups.scales[..., None], groups.words], axis=-1)


def _check(tensor: HostTensor, scales: NDArray[np.uint32]) -> None:
    """Raises `ModelLoadError` if a scale or minimum is infinite or NaN."""
    for exponent in (0x7C00, 0x7C00 << 16):
        if ((scales & np.uint32(exponent)) == exponent).any():
            raise ModelLoadError(
                f"{tensor.name} ({tensor.encoding}) holds weights that are not finite, or too large for the "
                "float16 scales and minima that the CPU kernels keep. Most likely the file is damaged: download or "
                'convert it again. device="reference" takes it as it is.'
            )


def _half_pairs(scale: NDArray[np.floating], minimum: NDArray[np.floating]) -> NDArray[np.uint32]:
    pairs = np.stack([scale.astype(np.float16), minimum.astype(np.float16)], axis=-1)
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0]


def _bytes_as_words(q: NDArray[np.number]) -> Words:
    return np.ascontiguousarray(q.astype(np.uint8, copy=False)).view(np.uint32)


def _blocks(rows: Bytes, block_bytes: int) -> Bytes:
    return rows.reshape(len(rows), -1, block_bytes)


def _halves(blocks: Bytes, start: int, count: int) -> Float32:
    """`count` float16 numbers of each block, as float32 [rows, blocks, count]."""
    raw = np.ascontiguousarray(blocks[..., start : start + 2 * count])
    return raw.view(np.float16).astype(np.float32)


def _q4_0(rows: Bytes) -> _Groups:
    """w = d (q - 8)."""
    blocks = _blocks(rows, 18)
    d = _halves(blocks, 0, 1)[..., 0]
    return _Groups(_bytes_as_words(blocks[..., 2:]), _half_pairs(d, -8 * d))


def _q4_1(rows: Bytes) -> _Groups:
    """w = d q + m."""
    words = rows.view(np.uint32).reshape(len(rows), -1, 5)
    return _Groups(words[..., 1:], words[..., 0])


def _q4_k(rows: Bytes) -> _Groups:
    """Super-blocks of 256: w = d s q - dmin m, with 6-bit s and m for each of 8 groups of 32."""
    blocks = _blocks(rows, 144)
    d, dmin = _halves(blocks, 0, 2)[..., 0, None], _halves(blocks, 0, 2)[..., 1, None]
    scale, minimum = _six_bit_pairs(blocks[..., 4:16])
    # Two groups share 32 bytes: the first has the low nibbles, the second the high ones. A group of ours has its inputs
    # 0..15 low and 16..31 high.
    shared = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 2, 16)
    first, second = shared & 15, shared >> 4
    q = np.stack([first[..., 0, :] | first[..., 1, :] << 4, second[..., 0, :] | second[..., 1, :] << 4], axis=-2)
    groups = blocks.shape[1] * 8
    pairs = _half_pairs(d * scale, -dmin * minimum).reshape(len(rows), groups)
    return _Groups(_bytes_as_words(q.reshape(len(rows), groups, 16)), pairs)


def _q5_k(rows: Bytes) -> _Groups:
    """As Q4_K with a fifth bit: bit g of qh belongs to group g."""
    blocks = _blocks(rows, 176)
    d, dmin = _halves(blocks, 0, 2)[..., 0, None], _halves(blocks, 0, 2)[..., 1, None]
    scale, minimum = _six_bit_pairs(blocks[..., 4:16])
    shared = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 1, 32)
    low = (shared >> np.array([0, 4], np.uint8)[:, None] & 15).reshape(*blocks.shape[:2], 8, 32)
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    groups = blocks.shape[1] * 8
    pairs = _half_pairs(d * scale, -dmin * minimum).reshape(len(rows), groups)
    return _Groups(_bytes_as_words((low | high << 4).reshape(len(rows), groups, 32)), pairs)


def _six_bit_pairs(packed: Bytes) -> tuple[Float32, Float32]:
    """The 8 scales and 8 minima that K formats pack into 12 bytes."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minimum = np.concatenate([middle & 63, high >> 4 | (middle >> 6) << 4], axis=-1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _q8_0(rows: Bytes) -> _Groups:
    """w = d q, q in [-128, 127]."""
    blocks = _blocks(rows, 34)
    d = _halves(blocks, 0, 1)[..., 0]
    return _Groups(_bytes_as_words(blocks[..., 2:] ^ 128), _half_pairs(d, -128 * d))


def _q5_0(rows: Bytes) -> _Groups:
    """w = d (q - 16), the fifth bits in a 32-bit word."""
    blocks = _blocks(rows, 22)
    d = _halves(blocks, 0, 1)[..., 0]
    return _Groups(_bytes_as_words(_five_bits(blocks[..., 2:6], blocks[..., 6:])), _half_pairs(d, -16 * d))


def _q5_1(rows: Bytes) -> _Groups:
    """w = d q + m."""
    blocks = _blocks(rows, 24)
    d, m = _halves(blocks, 0, 2)[..., 0], _halves(blocks, 0, 2)[..., 1]
    return _Groups(_bytes_as_words(_five_bits(blocks[..., 4:8], blocks[..., 8:])), _half_pairs(d, m))


def _five_bits(high: Bytes, nibbles: Bytes) -> Bytes:
    """[..., 32]: inputs 0..15 from the low nibbles, 16..31 from the high ones, bit i of the word on top."""
    fifth = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    q: Bytes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1) | fifth << 4
    return q


_EXACT: dict[str, Callable[[Bytes], _Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q8_0": _q8_0,
}


def _widen(groups: _Groups) -> _Groups:
    """4-bit integers as 8-bit ones."""
    nibbles = np.ascontiguousarray(groups.words).view(np.uint8)
    return _Groups(_bytes_as_words(np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)), groups.scales)


def _quantise_again(tensor: HostTensor) -> _Groups:
    """To 8 bits between the smallest and the largest weight of each group, none of which is cut off.

    For that the minimum is rounded down to float16 and the scale up: no weight is off by more than half a step.
    """
    weights = tensor.float32()
    groups = weights.reshape(len(weights), -1, GROUP)
    minimum = _round_half(groups.min(axis=-1), -np.inf)
    scale = _round_half((groups.max(axis=-1) - minimum.astype(np.float32)) / 255, np.inf)
    pairs = _half_pairs(scale, minimum)
    _check(tensor, pairs)
    step = np.where(scale > 0, scale, 1).astype(np.float32)
    q = np.rint((groups - minimum.astype(np.float32)[..., None]) / step[..., None])
    return _Groups(_bytes_as_words(q), pairs)


def _round_half(x: Float32, towards: float) -> NDArray[np.float16]:
    """To float16, towards an infinity."""
    nearest = x.astype(np.float16)
    beyond = np.nextafter(nearest, np.float16(towards))
    is_short = nearest > x if towards < 0 else nearest < x
    return np.where(is_short, beyond, nearest)
