"""Philox4x32-10: random numbers that are a function of a key and a counter, with no state in between.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC'11, doi:10.1145/2063384.2063405).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""32-bit words, held in 64 bits so that the product of two fits."""

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds over four counter words and two key words, elementwise; four words of 32 random bits each."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1 = (product1 >> WORD) ^ c1 ^ k0, product1 & LOW
        c2, c3 = (product0 >> WORD) ^ c3 ^ k1, product0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: NDArray[np.uint64], sample_index: NDArray[np.uint32], positions: NDArray[np.uint32]
) -> NDArray[np.float64]:
    """One number in [0, 1) per row, [N]: the first word of counter (position, sample_index, 0, 0) under the
    seed, divided by 2**32."""
    zero = np.zeros(len(seeds), np.uint64)
    counter = (positions.astype(np.uint64), sample_index.astype(np.uint64), zero, zero)
    word, *_ = philox4x32(counter, (seeds & LOW, seeds >> WORD))
    return word.astype(np.float64) * 2.0**-32
