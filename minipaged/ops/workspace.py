"""Places: which parts of a workspace are free."""

from __future__ import annotations

from bisect import insort


class WorkspaceFullError(Exception):
    """There is no free place of the size that was asked for."""


class Places:
    """Hands out aligned places in a span of memory, first fit: the same calls in the same order get the same places.

    It knows offsets in bytes only; whoever uses it owns the memory.
    """

    def __init__(self, num_bytes: int, alignment: int) -> None:
        self._free = [(0, num_bytes)]
        self._alignment = alignment
        self.highest = 0
        """Where the place that reached furthest ended."""

    def take(self, num_bytes: int) -> int:
        """The offset of a free place. Raises `WorkspaceFullError`."""
        size = self._aligned(num_bytes)
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index] = (start + size, end)
                self.highest = max(self.highest, start + size)
                return start
        raise WorkspaceFullError

    def take_at(self, wanted: int, num_bytes: int) -> None:
        """This very place, which must be free."""
        wanted_end = wanted + self._aligned(num_bytes)
        index = next(i for i, (start, end) in enumerate(self._free) if start <= wanted and wanted_end <= end)
        start, end = self._free[index]
        self._free[index : index + 1] = [(start, wanted), (wanted_end, end)]

    def give_back(self, start: int, num_bytes: int) -> None:
        """A place that was taken is free again, and joined with its free neighbours."""
        insort(self._free, (start, start + self._aligned(num_bytes)))
        merged: list[tuple[int, int]] = []
        for piece in self._free:
            if merged and merged[-1][1] == piece[0]:
                merged[-1] = (merged[-1][0], piece[1])
            elif piece[0] < piece[1]:
                merged.append(piece)
        self._free = merged

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment
