"""Engines on tiny models whose steps a test can hold back, count, or make fail."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import anyio

from minipaged import Engine, EngineConfig
from minipaged.engine.loading import LoadedModel, load_model
from minipaged.engine.step_loop import StepRunner
from minipaged.progress import Progress
from minipaged.settings import EngineSettings
from minipaged.step import StepPlan, StepResult


class GatedRunner:
    """Executes so many steps as it is allowed to. Open until `shut`."""

    def __init__(self, inner: StepRunner) -> None:
        self.inner = inner
        self.num_executed = 0
        self.failure: BaseException | None = None
        """Raised by the next step, if set."""
        self._permits = 0
        self._open = True
        self._changed = threading.Condition()

    def execute(self, plan: StepPlan) -> StepResult:
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._permits > 0)
            if not self._open:
                self._permits -= 1
        if self.failure is not None:
            raise self.failure
        self.num_executed += 1
        return self.inner.execute(plan)

    def shut(self) -> None:
        with self._changed:
            self._open = False
            self._permits = 0

    def allow(self, steps: int) -> None:
        with self._changed:
            self._permits += steps
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()


SMALL: EngineSettings = {"num_blocks": 64, "max_batched_tokens": 64, "max_running": 16, "debug": True}


@asynccontextmanager
async def tiny_engine(model: Path, **settings: Unpack[EngineSettings]) -> AsyncIterator[Engine]:
    """An engine with debug checks. Afterwards, if the test went well, every block must have been given back."""
    async with Engine.load(model, config=EngineConfig(**SMALL), **settings) as engine:
        yield engine
        await engine.drain()
        check_nothing_in_use(engine)


@asynccontextmanager
async def gated_engine(model: Path, **settings: Unpack[EngineSettings]) -> AsyncIterator[tuple[Engine, GatedRunner]]:
    """The same, with its steps under control. Leaving opens the gate."""
    gates: list[GatedRunner] = []

    def load(config: EngineConfig, progress: Progress) -> LoadedModel:
        loaded = load_model(model, config, progress)
        gates.append(GatedRunner(loaded.runner))
        return replace(loaded, runner=gates[0])

    engine = Engine(replace(EngineConfig(**SMALL), **settings), load)
    await engine.start()
    try:
        yield engine, gates[0]
        gates[0].open()
        await engine.drain()
        check_nothing_in_use(engine)
    finally:
        gates[0].open()
        await engine.close()


def check_nothing_in_use(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.blocks.in_use, stats.host_blocks.in_use) == (0, 0, 0, 0)


def minipaged_threads() -> list[str]:
    """Names of the threads that engines have in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("minipaged-")]


async def until(condition: Callable[[], bool]) -> None:
    """Let the engine work until a condition holds."""
    while not condition():  # noqa: ASYNC110 (there is no event for what a test may look at)
        await anyio.sleep(0.001)
