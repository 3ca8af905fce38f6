"""PlanBuilder: a step plan while the scheduler makes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from minipaged.scheduling.request import Sequence
from minipaged.scheduling.running import NO_DECODES, Decodes
from minipaged.step import Admission, Chunk, Fork, StepPlan, TableUpdate, Transfer


@dataclass(slots=True)
class PlanBuilder:
    """What the plan will hold, and what its making has to remember."""

    swap_out: list[Transfer] = field(default_factory=list)
    swap_in: list[Transfer] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    decodes: Decodes = NO_DECODES
    chunks: list[Chunk] = field(default_factory=list)
    chunked: list[Sequence] = field(default_factory=list)
    """The sequences of `chunks`."""
    complete: list[Sequence] = field(default_factory=list)
    """Sequences whose known tokens are all computed by this plan."""
    preempted: set[Sequence] = field(default_factory=set)
    extended: set[Sequence] = field(default_factory=set)
    """Sequences whose tables this plan changes; it cannot preempt them any more."""
    stalled: set[Sequence] = field(default_factory=set)
    """Sequences that wait for a copy to the host to free their next block."""

    @property
    def has_tokens(self) -> bool:
        """Whether anything is to be computed."""
        return bool(self.decodes.rows or self.chunks)

    def build(self, plan_id: int, poison: tuple[int, ...]) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            id=plan_id,
            poison=poison,
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple(self.copies),
            admissions=tuple(self.admissions),
            forks=tuple(self.forks),
            table_updates=tuple(self.table_updates),
            decode_rows=self.decodes.rows,
            decode_version=self.decodes.version,
            chunks=tuple(self.chunks),
        )
