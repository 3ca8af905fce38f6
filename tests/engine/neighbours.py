"""Requests alone and in company: the logits after any history of tokens are the same to the last bit."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from minipaged import Engine, EngineConfig, SamplingParams
from minipaged.settings import EngineSettings
from tests.engine.engines import check_nothing_in_use

ALONE: EngineSettings = {
    "num_threads": 1,
    "max_running": 1,
    "max_batched_tokens": 512,
    "prefix_caching": False,
    "overlap": False,
}
TOGETHER: dict[str, EngineSettings] = {
    "large batches": {"num_threads": 2, "max_running": 24, "max_batched_tokens": 300},
    "small chunks": {"num_threads": 3, "max_running": 7, "max_batched_tokens": 7},
    "recompute": {"num_threads": 2, "max_running": 24, "max_batched_tokens": 30, "num_blocks": 18},
    "swap": {
        "num_threads": 1,
        "max_running": 24,
        "max_batched_tokens": 30,
        "num_blocks": 18,
        "swap_blocks": 40,
        "preemption": "swap",
        "overlap": False,
    },
}


@dataclass
class Recorder:
    """The logits after every history of token ids. A history seen again must have the same ones."""

    logits: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    num_calls: int = 0

    def __call__(self, token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        self.num_calls += 1
        history = tuple(token_ids)
        before = self.logits.setdefault(history, logits.tobytes())
        assert before == logits.tobytes(), f"the logits after {len(history)} tokens are not what they were"
        return logits


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    params: SamplingParams
    priority: int
    delay: int
    """Steps of the event loop to wait before it is submitted."""


def random_jobs(recorder: Recorder, seed: int, count: int = 24) -> list[Job]:
    """Prompts with common beginnings, some sampled, some greedy; some want what is computed without a recording."""
    choice = random.Random(seed)
    beginnings = [[choice.randrange(4, 384) for _ in range(length)] for length in (3, 16, 32, 70)]
    jobs: list[Job] = []
    for number in range(count):
        prompt = choice.choice(beginnings) + [choice.randrange(4, 384) for _ in range(choice.choice((0, 1, 5, 40)))]
        params = SamplingParams(
            temperature=choice.choice((0.0, 1.0)),
            seed=number,
            max_tokens=choice.choice((1, 4, 30, 40)),
            ignore_eos=True,
            prompt_logprobs=choice.choice((None, None, None, None, 0)),
            logits_callback=recorder,
        )
        jobs.append(Job(prompt, params, choice.randrange(2), choice.choice((0, 0, 5, 50))))
    return jobs


async def tokens_of(engine: Engine, job: Job) -> list[int]:
    for _ in range(job.delay):
        await anyio.lowlevel.checkpoint()
    completion = await engine.generate(job.prompt, job.params, priority=job.priority).completion()
    return list(completion.choices[0].token_ids)


async def check_company(
    model: Path, common: EngineConfig, jobs: list[Job], recorder: Recorder, companies: Mapping[str, EngineSettings]
) -> None:
    """Each job alone, then all of them at once under each of the settings: same tokens, same logits."""
    alone: list[list[int]] = []
    async with Engine.load(model, config=common, **ALONE) as engine:
        for job in jobs:
            alone.append(await tokens_of(engine, job))
    histories, calls = len(recorder.logits), recorder.num_calls

    for name, settings in companies.items():
        together: dict[int, list[int]] = {}

        async def one(engine: Engine, number: int, results: dict[int, list[int]]) -> None:
            results[number] = await tokens_of(engine, jobs[number])

        async with Engine.load(model, config=common, **settings) as engine:
            async with anyio.create_task_group() as group:
                for number in random.Random(name).sample(range(len(jobs)), len(jobs)):
                    group.start_soon(one, engine, number, together)
            stats = engine.stats()
            check_nothing_in_use(engine)
        assert [together[number] for number in range(len(jobs))] == alone, name
        assert stats.preemptions_by_recompute > 0 or name != "recompute"
        assert stats.preemptions_by_swap > 0 or name != "swap"
        assert stats.prefix_cache_hits > 0
    assert len(recorder.logits) == histories
    assert recorder.num_calls == (1 + len(companies)) * calls  # each was compared with each
