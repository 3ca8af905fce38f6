"""FreeSpans: which parts of a workspace are free."""

from __future__ import annotations

from bisect import insort


class FreeSpans:
    """Hands out places in a span of memory, first fit: the same requests in the same order get the same places."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]

    def take(self, size: int) -> int | None:
        """The start of a free place; None if there is none of that size."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index] = (start + size, end)
                return start
        return None

    def take_at(self, wanted: int, size: int) -> None:
        """This very place, which must be free."""
        index = next(i for i, (start, end) in enumerate(self._free) if start <= wanted and wanted + size <= end)
        start, end = self._free[index]
        self._free[index : index + 1] = [(start, wanted), (wanted + size, end)]

    def give_back(self, start: int, end: int) -> None:
        """It is free again, and one with its free neighbours."""
        insort(self._free, (start, end))
        merged: list[tuple[int, int]] = []
        for piece in self._free:
            if merged and merged[-1][1] == piece[0]:
                merged[-1] = (merged[-1][0], piece[1])
            elif piece[0] < piece[1]:
                merged.append(piece)
        self._free = merged
