"""Whatever shares the engine with a request, its greedy tokens are those of the same request alone in a fresh engine.

Debug mode is on: every fresh KV block is filled with NaN, and the invariants are checked after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import anyio
import pytest

from minipaged import Completion, Engine, SamplingParams
from minipaged.config import DeviceName, PreemptionMode
from minipaged.settings import EngineSettings
from tests.engine.engines import gated_engine, tiny_engine, until

BLOCK = 16
DEVICES: tuple[DeviceName, ...] = ("reference", "cpu")
NUM_TOKENS = 6


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without an obvious pattern."""
    return [4 + (seed * 31 + 7 * i * i + 3 * i) % 300 for i in range(length)]


def greedy(max_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


async def answer(engine: Engine, tokens: Sequence[int], max_tokens: int = NUM_TOKENS) -> Completion:
    return await engine.generate(tokens, greedy(max_tokens)).completion()


class Alone:
    """Answers of requests that had an engine to themselves."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    async def __call__(self, tokens: Sequence[int], max_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
        key = (tuple(tokens), max_tokens)
        if key not in self._known:
            async with Engine.load(self._model, device="reference", prefix_caching=False) as engine:
                self._known[key] = (await answer(engine, tokens, max_tokens)).token_ids
        return self._known[key]


@pytest.fixture(scope="session")
def alone(tiny_model: Path) -> Alone:
    return Alone(tiny_model)


def on(name: DeviceName, **settings: Unpack[EngineSettings]) -> EngineSettings:
    """The settings on a device, with KV in float32 like the reference's."""
    settings["device"] = name
    settings["kv_dtype"] = "float32"
    return settings


@pytest.mark.parametrize("device", DEVICES)
def test_a_pool_of_four_blocks(tiny_model: Path, alone: Alone, device: DeviceName) -> None:
    """X, Y, X where Y needs all blocks: nothing of X is found, nothing of Y is mistaken for it."""

    async def main() -> None:
        async with tiny_engine(tiny_model, **on(device, num_blocks=4)) as engine:
            x, y = prompt(3 * BLOCK, 1), prompt(3 * BLOCK, 2)
            for tokens, cached in ((x, 0), (x, 2 * BLOCK), (y, 0), (x, 0)):
                completion = await answer(engine, tokens)
                assert completion.token_ids == await alone(tokens)
                assert completion.usage.cached_tokens == cached

    anyio.run(main)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_whole_blocks_twice_then_extended(tiny_model: Path, alone: Alone, device: DeviceName, blocks: int) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model, **on(device)) as engine:
            tokens = prompt(blocks * BLOCK)
            extended = [*tokens, 5, 6, 7]
            for request, cached in ((tokens, 0), (tokens, (blocks - 1) * BLOCK), (extended, blocks * BLOCK)):
                completion = await answer(engine, request)
                assert completion.token_ids == await alone(request)
                assert completion.usage.cached_tokens == cached

    anyio.run(main)


@pytest.mark.parametrize("device", DEVICES)
def test_a_cached_prefix_and_every_suffix_length(tiny_model: Path, alone: Alone, device: DeviceName) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model, **on(device)) as engine:
            prefix = prompt(2 * BLOCK)
            await answer(engine, prefix)
            for length in range(1, 2 * BLOCK + 2):
                request = [*prefix, *prompt(length, seed=length)]
                completion = await answer(engine, request)
                assert completion.token_ids == await alone(request), length
                assert completion.usage.cached_tokens == 2 * BLOCK

    anyio.run(main)


@pytest.mark.parametrize("device", DEVICES)
def test_identical_prompts_at_once_and_during_prefill(tiny_model: Path, alone: Alone, device: DeviceName) -> None:
    async def main() -> None:
        tokens = prompt(5 * BLOCK + 3)
        settings = on(device, max_batched_tokens=2 * BLOCK, overlap=False)
        async with gated_engine(tiny_model, **settings) as (engine, gate):
            gate.shut()
            completions: list[Completion] = []

            async def client() -> None:
                completions.append(await answer(engine, tokens))

            async with anyio.create_task_group() as group:
                group.start_soon(client)
                group.start_soon(client)
                gate.allow(2)
                await until(lambda: gate.num_executed == 2)  # the first is in the middle of its prefill
                group.start_soon(client)
                await anyio.wait_all_tasks_blocked()
                gate.open()
            assert [completion.token_ids for completion in completions] == [await alone(tokens)] * 3
            assert max(completion.usage.cached_tokens for completion in completions) > 0

    anyio.run(main)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [1, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("warm", [False, True])
def test_chunks_of_every_size(tiny_model: Path, alone: Alone, device: DeviceName, chunk: int, warm: bool) -> None:
    """For prompts of 1 to 3 blocks; nothing is yielded before the last chunk."""

    async def main() -> None:
        settings = on(device, max_running=1, max_batched_tokens=chunk, overlap=False)
        async with gated_engine(tiny_model, **settings) as (engine, gate):
            for length in range(1, 3 * BLOCK + 1):
                tokens = prompt(length, seed=length)
                if warm:
                    await answer(engine, tokens)
                before = gate.num_executed
                steps_at_first_token = 0
                stream = engine.generate(tokens, greedy())
                async for _ in stream:
                    steps_at_first_token = steps_at_first_token or gate.num_executed - before
                completion = await stream.completion()
                assert completion.token_ids == await alone(tokens), length
                cached = completion.usage.cached_tokens
                assert cached == ((length - 1) // BLOCK * BLOCK if warm else 0)
                assert steps_at_first_token >= -(-(length - cached) // chunk)

    anyio.run(main)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK + 1])
def test_preemption_at_every_edge_of_a_block(
    tiny_model: Path, alone: Alone, device: DeviceName, mode: PreemptionMode, length: int
) -> None:
    """When a request has `length` tokens, an urgent one takes the pool; its stream goes on without gap or repeat."""

    async def main() -> None:
        max_tokens, start = 3 * BLOCK, prompt(3)
        settings = on(device, num_blocks=6, swap_blocks=6, preemption=mode)
        async with tiny_engine(tiny_model, **settings) as engine:
            streamed: list[int] = []
            urgent: list[Completion] = []

            async def interrupt() -> None:
                stream = engine.generate(prompt(5 * BLOCK), greedy(4), priority=-1)
                urgent.append(await stream.completion())

            async with anyio.create_task_group() as group:
                async for token in engine.generate(start, greedy(max_tokens)):
                    streamed.append(token.id)
                    if len(start) + len(streamed) == length:
                        group.start_soon(interrupt)
            assert tuple(streamed) == await alone(start, max_tokens)
            assert urgent[0].token_ids == await alone(prompt(5 * BLOCK), 4)
            stats = engine.stats()
            preemptions = {"swap": stats.preemptions_by_swap, "recompute": stats.preemptions_by_recompute}
            assert preemptions[mode] >= 1
            assert sum(preemptions.values()) == preemptions[mode]

    anyio.run(main)


@pytest.mark.parametrize("device", DEVICES)
def test_swap_space_of_two_blocks_and_ten_oversized_jobs(tiny_model: Path, alone: Alone, device: DeviceName) -> None:
    async def main() -> None:
        settings = on(device, num_blocks=8, swap_blocks=2, preemption="swap")
        async with tiny_engine(tiny_model, **settings) as engine:
            answers: dict[int, tuple[int, ...]] = {}

            async def client(seed: int) -> None:
                answers[seed] = (await answer(engine, prompt(BLOCK + 5, seed), 4 * BLOCK)).token_ids

            async with anyio.create_task_group() as group:
                for seed in range(10):
                    group.start_soon(client, seed)
            for seed in range(10):
                assert answers[seed] == await alone(prompt(BLOCK + 5, seed), 4 * BLOCK)

    anyio.run(main)
