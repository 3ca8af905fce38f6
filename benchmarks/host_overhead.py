"""The host's share of a decode step: everything between two steps' ends that is not spent inside the CPU kernels.

Requests of 128 tokens decode together through a real engine; its runner is wrapped to note, after each step, the time
and the seconds that the kernels have taken so far. Only steps in which every request decodes count. Medians per step:

wall_ms          from the end of one step to the end of the next
kernel_ms        inside the kernels
execute_ms       inside the runner, but not in the kernels: arrays, sampling settings, results
between_ms       outside the runner: what planning and delivery on the event loop delay the worker thread
host_share       1 - kernel_ms / wall_ms, of the sums

Run: python -m benchmarks.host_overhead. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import statistics
import time
from typing import Annotated, Protocol, runtime_checkable

import typer

from benchmarks.docs import replace_block
from benchmarks.peers.prompts import Prompts
from minipaged import Engine, SamplingParams
from minipaged.config import EngineConfig
from minipaged.engine.loading import LoadedModel, load_model
from minipaged.engine.step_loop import StepRunner
from minipaged.execution.runner import Runner
from minipaged.models.files.hub import default_model_path
from minipaged.models.files.model_source import open_model
from minipaged.progress import Progress
from minipaged.step import StepPlan, StepResult

PROMPT, NEW_TOKENS = 128, 100


@runtime_checkable
class TimesKernels(Protocol):
    """Operations that know how long their kernels ran."""

    @property
    def kernel_seconds(self) -> float:
        """So far."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Times in seconds."""

    started: float
    ended: float
    kernels: float
    decodes: int
    """Rows that decoded, or 0 if the step also computed prompts."""


class RecordingRunner:
    """A runner that notes its steps."""

    def __init__(self, runner: StepRunner, ops: TimesKernels) -> None:
        self._runner = runner
        self._ops = ops
        self.steps: list[Step] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """See `StepRunner`."""
        started, before = time.perf_counter(), self._ops.kernel_seconds
        result = self._runner.execute(plan)
        decodes = 0 if plan.chunks else len(plan.decode_rows)
        self.steps.append(Step(started, time.perf_counter(), self._ops.kernel_seconds - before, decodes))
        return result


async def record(requests: int) -> list[Step]:
    source = open_model(default_model_path())
    prompts = Prompts(source).batch(requests, PROMPT)
    recorders: list[RecordingRunner] = []

    def load(config: EngineConfig, progress: Progress) -> LoadedModel:
        loaded = load_model(source.path, config, progress)
        assert isinstance(loaded.runner, Runner)
        ops = loaded.runner._ops
        if not isinstance(ops, TimesKernels):
            raise TypeError(f"the operations of this device ({ops.name}) do not count their kernels' seconds")
        recorders.append(RecordingRunner(loaded.runner, ops))
        return dataclasses.replace(loaded, runner=recorders[0])

    config = EngineConfig(
        max_running=requests, max_batched_tokens=max(512, requests * PROMPT), max_model_len=PROMPT + NEW_TOKENS
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    async with Engine(config, load) as engine:
        await asyncio.gather(*(engine.generate(prompt, params).completion() for prompt in prompts))
    return recorders[0].steps


def main(
    requests: int = 32,
    docs: Annotated[bool, typer.Option(help="Write the figures into docs/performance.md.")] = False,
) -> None:
    """Where the time of a decode step goes."""
    steps = asyncio.run(record(requests))
    pairs = [(before, step) for before, step in itertools.pairwise(steps) if step.decodes == requests]
    walls = [step.ended - before.ended for before, step in pairs]
    kernels = [step.kernels for _, step in pairs]
    figures = {
        "requests": requests,
        "steps": len(pairs),
        "wall_ms": 1e3 * statistics.median(walls),
        "kernel_ms": 1e3 * statistics.median(kernels),
        "execute_ms": 1e3 * statistics.median(step.ended - step.started - step.kernels for _, step in pairs),
        "between_ms": 1e3 * statistics.median(step.started - before.ended for before, step in pairs),
        "host_share": 1 - sum(kernels) / sum(walls),
    }
    if docs:
        replace_block(
            "host_overhead",
            f"A decode step of {requests} requests takes {figures['wall_ms']:.2f} ms, {figures['kernel_ms']:.2f} ms of "
            f"them in the kernels: the host's share is {figures['host_share']:.1%}.",
        )
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    typer.run(main)
