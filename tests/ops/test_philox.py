from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from minipaged.ops.philox import Words, philox4x32, uniforms

# From the file of known answers of the Random123 library: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def word(value: int) -> Words:
    return np.array([value], np.uint64)


def one(seed: int, sample_index: int, position: int) -> float:
    return float(
        uniforms(np.array([seed], np.uint64), np.array([sample_index], np.uint32), np.array([position], np.uint32))[0]
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = map(word, counter)
    result = philox4x32((c0, c1, c2, c3), (word(key[0]), word(key[1])))
    assert tuple(int(x[0]) for x in result) == expected


def test_uniform_is_the_first_word_of_position_and_stream_under_the_seed() -> None:
    seed = 0x299F31D0_A4093822  # the low word is the first of the key
    zero = word(0)
    first, *_ = philox4x32((word(17), word(3), zero, zero), (word(0xA4093822), word(0x299F31D0)))
    assert one(seed, 3, 17) == int(first[0]) / 2**32


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=9))
def test_each_row_is_a_number_below_one_that_depends_on_its_own_three_numbers(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, np.uint64).reshape(-1, 3).T
    together: NDArray[np.float64] = uniforms(columns[0], columns[1].astype(np.uint32), columns[2].astype(np.uint32))
    assert together.tolist() == [one(*row) for row in rows]
    assert all(0 <= number < 1 for number in together)


def test_seed_stream_and_position_each_give_another_number() -> None:
    numbers = {
        one(seed, sample_index, position)
        for seed in (0, 1, 2**32, 2**63)
        for sample_index in (0, 1)
        for position in (0, 1)
    }
    assert len(numbers) == 16


def test_numbers_are_spread_evenly() -> None:
    positions = np.arange(100_000, dtype=np.uint32)
    numbers = uniforms(np.full(100_000, 42, np.uint64), np.zeros(100_000, np.uint32), positions)
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
    assert 50 < chi_squared < 160  # 99 degrees of freedom
