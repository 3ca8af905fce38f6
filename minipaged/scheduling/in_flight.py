"""StepsInFlight: plans whose results are awaited."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from minipaged.scheduling.plan_builder import PlanBuilder
from minipaged.scheduling.request import Sequence
from minipaged.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A plan and the sequences behind its rows."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    """The sequences of the plan's decode rows, then those of its chunks."""

    @property
    def chunked(self) -> tuple[Sequence, ...]:
        """The sequences of the plan's chunks."""
        return self.sequences[len(self.plan.decode_rows) :]


class StepsInFlight:
    """Numbers plans from 0; their results come back in the same order."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.last_planned = -1
        self.last_committed = -1

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepInFlight]:
        return iter(self._steps)

    def start(self, builder: PlanBuilder, poison: tuple[int, ...]) -> StepPlan:
        """Finish a plan; its result is awaited from now on."""
        self.last_planned += 1
        plan = builder.build(self.last_planned, poison)
        sequences = (*builder.decodes.sequences, *builder.chunked) if builder.chunked else builder.decodes.sequences
        self._steps.append(StepInFlight(plan, sequences))
        return plan

    def finish(self, result: StepResult) -> StepInFlight:
        """The oldest step, whose result this must be."""
        step = self._steps.popleft()
        assert step.plan.id == result.plan_id, "results must be committed in plan order"
        self.last_committed = result.plan_id
        return step
