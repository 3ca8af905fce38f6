"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


def parse_size(text: str) -> int:
    """Bytes: "2GiB" and "2G" are 2 * 2**30, "2GB" is 2 * 10**9, "2048" is itself. Raises `ValueError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not an amount of memory; expected one such as 512MiB, 2GiB or 2GB")
    return int(Fraction(match[1]) * units[match[2].lower()])


def format_size(size: int) -> str:
    """The largest binary unit that leaves at least 1, three significant digits: "93.8 MiB"."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"
