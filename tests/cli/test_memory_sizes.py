from __future__ import annotations

import pytest

from minipaged.cli.memory_sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2048", 2048),
        ("2048B", 2048),
        ("1k", 1024),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2 GB", 2 * 10**9),
        ("2G", 2 * 2**30),
        ("1tib", 2**40),
        ("9" * 400 + "G", int("9" * 400) * 2**30),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2XB", "1e9", "1.GiB", "two"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (98_362_432, "93.8 MiB"),
        (720 * 1024, "720 KiB"),
        (2**30, "1 GiB"),
        (3 * 2**41, "6 TiB"),
    ],
)
def test_sizes_are_shown(size: int, text: str) -> None:
    assert format_size(size) == text
