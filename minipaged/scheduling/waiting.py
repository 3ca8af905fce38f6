"""WaitingQueue: the sequences that wait for a row."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from minipaged.scheduling.request import Sequence, Status

MIN_SWEEP = 64
"""Entries below which finished ones are not looked for."""


class WaitingQueue:
    """Sequences by rank: those of new requests, and preempted ones.

    A request is new until its first sequence is scheduled.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._sweep_at = MIN_SWEEP
        self.num_new = 0
        """Requests that wait to be scheduled for the first time."""

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._heap if sequence.status is Status.WAITING)

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence: the first one of a new request, or one that was preempted."""
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        self.num_new += _is_new(sequence)
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> Sequence | None:
        """The best-ranked one, if any waits."""
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out the first one, which is about to be scheduled."""
        _, sequence = heapq.heappop(self._heap)
        self.num_new -= _is_new(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that never ran is about to finish; `first` skips it from then on."""
        self.num_new -= _is_new(sequence)

    def _sweep(self) -> None:
        """Drop the finished ones: behind a first one that waits for long there may be any number of them."""
        self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
        heapq.heapify(self._heap)
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))


def _is_new(sequence: Sequence) -> bool:
    return sequence.index == 0 and sequence.request.scheduled_at is None
