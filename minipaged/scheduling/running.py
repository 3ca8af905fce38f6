"""RunningBatch: the sequences that have a row, and what each of them does next."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from minipaged.scheduling.request import Sequence


class Decodes(NamedTuple):
    """The sequences that decode in a step."""

    sequences: tuple[Sequence, ...]
    rows: tuple[int, ...]
    """The rows of those sequences, in the same order."""
    version: int
    """Another number whenever these are other rows than in the step before."""


NO_DECODES = Decodes((), (), 0)


class RunningBatch:
    """Rows 0..max_running-1 and the sequences in them, each in exactly one of three groups."""

    def __init__(self, max_running: int) -> None:
        self.sequences: dict[Sequence, None] = {}
        self.prefilling: dict[Sequence, None] = {}
        """Known tokens are left to compute."""
        self.decoding: dict[Sequence, None] = {}
        """Each step computes its latest token."""
        self.in_last_step: dict[Sequence, None] = {}
        """Nothing is left to compute; its last token comes with a step that is in flight."""
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._decodes = NO_DECODES
        self._decodes_changed = False

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody has, and none is kept for."""
        return len(self._free_rows)

    def keep_rows(self, sequence: Sequence) -> None:
        """Give rows to a sequence that is about to enter, and to those that will fork from it."""
        for member in (sequence, *sequence.pending_forks):
            member.row = self._free_rows.pop()

    def enter(self, sequence: Sequence) -> None:
        """A sequence with a row starts to compute its known tokens."""
        self.sequences[sequence] = None
        self.prefilling[sequence] = None

    def start_decoding(self, sequence: Sequence) -> None:
        """All known tokens but the latest are computed, or will be by a step in flight."""
        self.prefilling.pop(sequence, None)
        self.in_last_step.pop(sequence, None)
        self.decoding[sequence] = None
        self._decodes_changed = True

    def stop_decoding(self, sequence: Sequence) -> None:
        """Only its last token is to be awaited."""
        del self.decoding[sequence]
        self.in_last_step[sequence] = None
        self._decodes_changed = True

    def leave(self, sequence: Sequence) -> None:
        """A sequence finishes, or is preempted; the rows of those that were to fork from it become free as well."""
        del self.sequences[sequence]
        self.prefilling.pop(sequence, None)
        self.in_last_step.pop(sequence, None)
        if sequence in self.decoding:
            del self.decoding[sequence]
            self._decodes_changed = True
        for member in (sequence, *sequence.pending_forks):
            self._free_rows.append(member.row)
            member.row = -1

    def decodes(self, stalled: Container[Sequence]) -> Decodes:
        """The decoding sequences that are not stalled."""
        if self._decodes_changed or stalled:
            sequences = tuple(sequence for sequence in self.decoding if sequence not in stalled)
            rows = tuple(sequence.row for sequence in sequences)
            self._decodes = Decodes(sequences, rows, self._decodes.version + 1)
            self._decodes_changed = bool(stalled)
        return self._decodes

    def check(self) -> None:
        """Assert that groups and rows are consistent (debug mode)."""
        groups = [*self.prefilling, *self.decoding, *self.in_last_step]
        assert len(groups) == len(self.sequences), "a running sequence is in no group, or in two"
        assert set(groups) == set(self.sequences), "a group has a sequence that does not run"
        rows = [sequence.row for sequence in self.sequences]
        assert len(rows) == len(set(rows)), "two sequences share a row"
        assert not set(rows) & set(self._free_rows), "a row is taken and free"
