"""Many requests of all kinds at once, ended in all ways: nothing is lost, nothing is left."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest

from minipaged import Engine, RequestTimeoutError, SamplingParams
from minipaged.settings import EngineSettings
from tests.engine.engines import tiny_engine

SETTINGS: dict[str, EngineSettings] = {
    "recompute": {"num_blocks": 40, "preemption": "recompute"},
    "swap": {"num_blocks": 40, "swap_blocks": 16, "preemption": "swap"},
    "no overlap, no cache": {"num_blocks": 40, "overlap": False, "prefix_caching": False},
}


async def one_request(engine: Engine, choice: random.Random) -> str:
    """Submit a request, maybe lose interest in it; returns how it ended."""
    prompt = [choice.randrange(4, 12) for _ in range(choice.choice((1, 15, 16, 17, 40, 100)))]
    params = SamplingParams(
        seed=choice.randrange(9), n=choice.choice((1, 1, 2, 3, 4)), max_tokens=choice.randrange(1, 30)
    )
    patience = choice.choice((0, 1, 5, 1000, 1000))
    deadline = choice.choice((None, None, None, 0.0005, 100.0))
    stream = engine.generate(prompt, params, priority=choice.randrange(3), deadline=deadline)
    num_tokens = 0
    try:
        if patience == 0:
            if choice.random() < 0.5:
                stream.abort()
        else:
            async for _ in stream:
                num_tokens += 1
                if num_tokens == patience:
                    break
        if patience < 1000:
            return "left"
        completion = await stream.completion()
    except RequestTimeoutError:
        assert deadline == 0.0005
        return "late"
    assert completion.usage.completion_tokens == num_tokens
    assert len(completion.choices) == params.n
    assert all(sample.finish_reason in ("stop", "length") for sample in completion.choices)
    return "finished"


@pytest.mark.parametrize("settings", SETTINGS)
def test_three_hundred_requests(tiny_model: Path, settings: str) -> None:
    choice = random.Random(7)
    ends: list[str] = []

    async def main() -> None:
        async with tiny_engine(tiny_model, **SETTINGS[settings]) as engine:

            async def client(requests: int) -> None:
                for _ in range(requests):
                    ends.append(await one_request(engine, choice))

            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(client, 15)
            stats = engine.stats()
        assert len(ends) == 300
        assert ends.count("finished") > 50
        assert ends.count("left") > 50
        assert (stats.preemptions_by_recompute > 0) or settings != "recompute"
        assert (stats.preemptions_by_swap > 0) or settings != "swap"

    anyio.run(main)
