"""RunningBatch: the sequences that have a row, and what each of them does next."""

from __future__ import annotations

from collections.abc import Container

from minipaged.scheduling.request import Sequence


class RunningBatch:
    """Rows 0..max_running-1 and the sequences in them, each in exactly one of three groups."""

    def __init__(self, max_running: int) -> None:
        self.sequences: dict[Sequence, None] = {}
        self.prefilling: dict[Sequence, None] = {}
        """Known tokens are left to compute."""
        self.decoding: dict[Sequence, None] = {}
        """Each step computes its latest token."""
        self.ending: dict[Sequence, None] = {}
        """Nothing is left to compute; its last token is in flight."""
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._decodes: tuple[tuple[Sequence, ...], tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody has or keeps."""
        return len(self._free_rows)

    def keep_rows(self, sequence: Sequence) -> None:
        """Give rows to a sequence that is about to enter, and to those that will fork from it."""
        for member in (sequence, *sequence.unforked):
            member.row = self._free_rows.pop()

    def enter(self, sequence: Sequence) -> None:
        """A sequence with a row starts to compute its known tokens."""
        self.sequences[sequence] = None
        self.prefilling[sequence] = None

    def start_decoding(self, sequence: Sequence) -> None:
        """All known tokens are computed."""
        del self.prefilling[sequence]
        self.decoding[sequence] = None
        self._decodes = None

    def stop_decoding(self, sequence: Sequence) -> None:
        """Only its last token is to be awaited."""
        del self.decoding[sequence]
        self.ending[sequence] = None
        self._decodes = None

    def leave(self, sequence: Sequence) -> None:
        """A sequence finishes, or is preempted: it gives up its row, and those that have not forked from it theirs."""
        del self.sequences[sequence]
        self.prefilling.pop(sequence, None)
        self.ending.pop(sequence, None)
        if sequence in self.decoding:
            del self.decoding[sequence]
            self._decodes = None
        for member in (sequence, *sequence.unforked):
            self._free_rows.append(member.row)
            member.row = -1

    def decodes(self, stalled: Container[Sequence]) -> tuple[tuple[Sequence, ...], tuple[int, ...]]:
        """The decoding sequences that are not stalled, and their rows: the same objects while nothing changes."""
        if self._decodes is None:
            sequences = tuple(self.decoding)
            self._decodes = (sequences, tuple(sequence.row for sequence in sequences))
        if not stalled:
            return self._decodes
        sequences = tuple(sequence for sequence in self.decoding if sequence not in stalled)
        return sequences, tuple(sequence.row for sequence in sequences)

    def check(self) -> None:
        """Assert that groups and rows are consistent (debug mode)."""
        groups = [*self.prefilling, *self.decoding, *self.ending]
        assert len(groups) == len(self.sequences), "a running sequence is in no group, or in two"
        assert set(groups) == set(self.sequences), "a group has a sequence that does not run"
        rows = [sequence.row for sequence in self.sequences]
        assert len(rows) == len(set(rows)), "two sequences share a row"
        assert not set(rows) & set(self._free_rows), "a row is taken and free"
