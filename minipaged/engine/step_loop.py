"""StepLoop: plan, execute, commit, deliver, again and again while there is work.

It is no task but a chain of callbacks on the event loop: the worker's result of a step calls for the next plan. So it
belongs to no task's cancel scope, an engine may be closed by another task than the one that started it, and between
steps the event loop is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import anyio.lowlevel

from minipaged.engine.event_loop import EventLoop
from minipaged.engine.generation import Generation
from minipaged.engine.worker import Worker
from minipaged.errors import EngineDeadError, RequestTimeoutError
from minipaged.scheduling.request import Request
from minipaged.scheduling.scheduler import Scheduler
from minipaged.step import StepPlan, StepResult
from minipaged.text.tokenizer import Tokenizer


class StepRunner(Protocol):
    """What executes plans on the worker thread."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. What it raises is fatal to the engine."""


class StepLoop:
    """Owns the requests of an engine and drives its scheduler. Every method runs on the event loop's thread.

    When the loop dies, all generations fail with `EngineDeadError`, and so does everything later.
    """

    clock = staticmethod(time.monotonic)

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        tokenizer: Tokenizer,
        worker: Worker,
        loop: EventLoop,
        *,
        depth: int,
    ) -> None:
        """`depth`: how many steps may be queued with the worker: 2 overlaps planning and delivery with execution."""
        self.scheduler = scheduler
        """To ask it things."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._worker = worker
        self._post = loop.post
        self._changed = loop.signal()
        self._depth = depth
        self._in_flight = 0
        self._woken = False
        self._generations: dict[str, Generation] = {}
        self._timed: dict[str, Generation] = {}  # those with a deadline
        self._num_preparing = 0
        self.error: EngineDeadError | None = None
        """Why no step runs any more."""

    # Requests

    def register(self, generation: Generation) -> None:
        """A request has come; its prompt may still be unknown."""
        assert generation.id not in self._generations
        self._generations[generation.id] = generation
        self._num_preparing += 1
        if generation.submission.deadline is not None:
            self._timed[generation.id] = generation

    def forget(self, generation: Generation) -> None:
        """A registered request ends: give back what it holds."""
        del self._generations[generation.id]
        self._timed.pop(generation.id, None)
        if generation.request is None:
            self._num_preparing -= 1
        else:
            self._guard(partial(self.scheduler.abort, generation.request))
        self._changed.notify()

    def start(self, generation: Generation, request: Request) -> None:
        """A registered request's prompt is known: queue it. Raises as `Scheduler.submit`; the caller then fails it."""
        self._num_preparing -= 1
        generation.begin(request, self._tokenizer)
        self.scheduler.submit(request)
        self._wake()

    def find(self, request_id: str) -> Generation | None:
        """The request with this id that has not ended."""
        return self._generations.get(request_id)

    def stop(self, error: EngineDeadError, failure: Callable[[str], Exception]) -> None:
        """Run no further step; every request fails with `failure(its id)`. Steps with the worker are ignored."""
        if self.error is None:
            self.error = error
        for generation in list(self._generations.values()):
            generation.fail(failure(generation.id))
        self._changed.notify()

    @property
    def num_waiting(self) -> int:
        """Requests not scheduled yet, those whose prompt is still unknown included."""
        return self._num_preparing + self.scheduler.num_waiting

    @property
    def idle(self) -> bool:
        """Whether every request has ended and no step is under way."""
        return not self._generations and self._in_flight == 0

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if no step runs any more."""
        if self.error is not None:
            raise EngineDeadError(str(self.error)) from self.error.__cause__

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds; looked at after every step and every request's end. Raises as `check_alive`."""
        await anyio.lowlevel.checkpoint()
        self.check_alive()
        while not condition():
            await self._changed.wait()
            self.check_alive()

    # The loop: plan and execute, commit and deliver, then plan again

    def _plan_and_execute(self) -> None:
        now = self.clock()
        self._expire(now)
        while self._in_flight < self._depth and (plan := self.scheduler.plan(now)) is not None:
            self._in_flight += 1
            self._worker.submit(partial(self._execute, plan), self._on_result, self._die)
        if self._in_flight == 0 and self.scheduler.has_work:
            raise RuntimeError("the scheduler has work but plans no step; this is a bug in minipaged")
        self._changed.notify()

    def _execute(self, plan: StepPlan) -> StepResult:
        """On the worker thread."""
        if self.error is not None:
            raise self.error  # stopped while the plan was queued
        return self._runner.execute(plan)

    def _on_result(self, result: StepResult) -> None:
        self._in_flight -= 1
        self._guard(partial(self._commit_and_deliver, result))
        self._guard(self._plan_and_execute)

    def _commit_and_deliver(self, result: StepResult) -> None:
        committed = self.scheduler.commit(result)
        now = self.clock()
        for sequence, error in committed.failed:
            if (recipient := sequence.request.recipient) is not None:
                recipient.fail(error)
        for sequence, num_tokens, logprobs in committed.advanced:
            recipient = sequence.request.recipient
            if recipient is not None and not recipient.ended:
                try:
                    recipient.deliver(sequence, num_tokens, logprobs, now)
                except Exception as error:  # one request's text concerns no other
                    recipient.fail(error)

    # What starts and ends it

    def _wake(self) -> None:
        """Plan soon, together with whatever else is submitted before the event loop comes to it."""
        if not self._woken:
            self._woken = True
            self._post(self._on_wake)

    def _on_wake(self) -> None:
        self._woken = False
        self._guard(self._plan_and_execute)

    def _guard(self, action: Callable[[], None]) -> None:
        """What the scheduler raises is nobody's own error: it kills the loop. Does nothing once the loop is dead."""
        if self.error is None:
            try:
                action()
            except Exception as error:
                self._die(error)

    def _die(self, cause: BaseException) -> None:
        if self.error is None:
            self.stop(_engine_failed(cause), lambda _: _engine_failed(cause))

    def _expire(self, now: float) -> None:
        for generation in list(self._timed.values()):
            submission = generation.submission
            if submission.expires_at is not None and submission.expires_at <= now:
                waited = now - submission.submitted_at
                message = f"Request {generation.id!r} passed its deadline: it has taken {waited:.3f} s."
                generation.fail(RequestTimeoutError(message))


def _engine_failed(cause: BaseException) -> EngineDeadError:
    """The error that every request and every later call gets, with `cause` chained to it."""
    error = EngineDeadError(f"The engine failed in a step and has stopped: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
