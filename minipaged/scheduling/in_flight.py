"""StepsInFlight: plans whose results are awaited."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from minipaged.scheduling.plan_builder import PlanDraft
from minipaged.scheduling.request import Sequence
from minipaged.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A plan and the sequences behind its rows."""

    plan: StepPlan
    decoding: tuple[Sequence, ...]
    chunked: tuple[Sequence, ...]


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

    def start(self, draft: PlanDraft, poison: tuple[int, ...]) -> StepPlan:
        """Finish a draft; its result is awaited from now on."""
        self.last_planned += 1
        plan = draft.build(self.last_planned, poison)
        self._steps.append(StepInFlight(plan, draft.decoding, tuple(draft.chunked)))
        return plan

    def finish(self, result: StepResult) -> StepInFlight:
        """The oldest step, whose result this must be."""
        step = self._steps.popleft()
        assert step.plan.id == result.plan_id, "results must be committed in plan order"
        self.last_committed = result.plan_id
        return step
