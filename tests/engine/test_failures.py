"""What goes wrong for one request concerns no other; what goes wrong for the engine is told to everyone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged import (
    Completion,
    EngineBusyError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    SamplingParams,
    TokenStream,
)
from minipaged.models.llama import Llama
from minipaged.ops.base import Array, Batch, KVPool, Weight
from minipaged.scheduling.scheduler import Scheduler
from tests.conftest import RunAsync
from tests.engine.engines import gated_engine, tiny_engine, until

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[20 + index, 7, 8] for index in range(4)]
BAD_TOKEN = 99


async def check_neighbours(streams: Sequence[TokenStream], alone: Sequence[Completion]) -> None:
    for stream, expected in zip(streams, alone, strict=True):
        assert (await stream.completion()).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", ["raises", "exits", "NaN", "wrong shape"])
@pytest.mark.parametrize("position", [0, 5])
def test_logits_callback_fails_its_request_alone(run: RunAsync, tiny_model: Path, kind: str, position: int) -> None:
    def callback(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(token_ids) < 3 + position:
            return logits
        if kind == "raises":
            raise LookupError("in the callback")
        if kind == "exits":
            sys.exit()
        return logits * np.float32("nan") if kind == "NaN" else logits[:-1]

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            alone = [await engine.generate(prompt, GREEDY).completion() for prompt in PROMPTS]
            streams = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
            params = SamplingParams(temperature=0, max_tokens=12, logits_callback=callback)
            bad = engine.generate([5, 6, 7], params)
            for _ in range(position):
                await anext(bad)
            with pytest.raises(RequestFailedError) as caught:
                await anext(bad)
            if kind == "raises":
                assert isinstance(caught.value.__cause__, LookupError)
            with pytest.raises(RequestFailedError):
                await bad.completion()
            await check_neighbours(streams, alone)

    run(main)


def test_forward_that_fails_for_one_request(run: RunAsync, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Llama.forward

    def failing(self: Llama[Array, Weight], batch: Batch[Array], cache: KVPool[Array]) -> Array:
        if BAD_TOKEN in np.asarray(batch.token_ids):
            raise ArithmeticError("in the forward pass")
        return forward(self, batch, cache)

    monkeypatch.setattr(Llama, "forward", failing)

    async def main() -> None:
        # On the reference, which calls the model in each step: the CPU records it, and then it sees no tokens.
        async with tiny_engine(tiny_model, device="reference") as engine:
            alone = [await engine.generate(prompt, GREEDY).completion() for prompt in PROMPTS]
            streams = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
            with pytest.raises(RequestFailedError, match="in the forward pass"):
                await engine.generate([5, BAD_TOKEN, 7, 8, 9], GREEDY).completion()
            await check_neighbours(streams, alone)

    run(main)


def test_tokenizer_that_raises(run: RunAsync, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(text: str) -> list[int]:
        if text == "bad":
            raise LookupError("in the tokenizer")
        return {"nothing": [], "outside": [5, 384], "long": [5] * 600}.get(text, [5, 6, 7])

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            monkeypatch.setattr(engine.tokenizer, "encode", encode)
            good = engine.generate("good", GREEDY)
            bad = engine.generate("bad", GREEDY)
            with pytest.raises(RequestFailedError, match="in the tokenizer") as caught:
                await anext(bad)
            assert isinstance(caught.value.__cause__, LookupError)
            for text in ("nothing", "outside", "long"):
                with pytest.raises(InvalidRequestError):
                    await engine.generate(text, GREEDY).completion()
            assert len((await good.completion()).token_ids) == 12

    run(main)


def test_text_that_cannot_be_encoded(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            with pytest.raises(InvalidRequestError, match="surrogate"):
                await engine.generate("\ud800", GREEDY).completion()
            with pytest.raises(InvalidRequestError, match="role"):
                await engine.chat([{"content": "no role"}], GREEDY).completion()

    run(main)


def test_failing_sample_fails_its_whole_request(run: RunAsync, tiny_model: Path) -> None:
    calls: list[int] = []

    def callback(token_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        calls.append(len(token_ids))
        if len(calls) == 10:
            raise LookupError
        return logits

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            params = SamplingParams(n=3, seed=1, max_tokens=50, ignore_eos=True, logits_callback=callback)
            with pytest.raises(RequestFailedError):
                await engine.generate([5, 6, 7], params).completion()
            assert (await engine.generate([5, 6, 7], GREEDY).completion()).finish_reason == "length"

    run(main)


@pytest.mark.parametrize("where", ["runner", "commit", "plan"])
def test_fatal_error_wakes_every_waiter(
    run: RunAsync, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    cause = ArithmeticError("the device is gone")

    def fail(*arguments: object) -> NoReturn:
        raise cause

    async def main() -> None:
        async with gated_engine(tiny_model, max_running=2) as (engine, gate):
            gate.shut()
            streams = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
            streams.append(engine.generate("a text", GREEDY))
            errors: list[EngineDeadError] = []

            async def iterate(stream: TokenStream) -> None:
                with pytest.raises(EngineDeadError, match="the device is gone") as caught:
                    async for _ in stream:
                        pass
                errors.append(caught.value)

            async def wait(stream: TokenStream) -> None:
                with pytest.raises(EngineDeadError, match="the device is gone") as caught:
                    await stream.completion()
                errors.append(caught.value)

            async def drain() -> None:
                with pytest.raises(EngineDeadError) as caught:
                    await engine.drain()
                errors.append(caught.value)

            async with anyio.create_task_group() as group:
                for stream in streams:
                    group.start_soon(iterate, stream)
                    group.start_soon(wait, stream)
                group.start_soon(drain)
                await anyio.wait_all_tasks_blocked()
                if where == "runner":
                    gate.failure = cause
                else:
                    monkeypatch.setattr(Scheduler, where, fail)
                gate.open()
            monkeypatch.undo()
            assert [error.__cause__ for error in errors] == [cause] * 11
            with pytest.raises(EngineDeadError, match="the device is gone") as caught:
                engine.generate([5, 6, 7])
            assert caught.value.__cause__ is cause
            with pytest.raises(EngineDeadError):
                await engine.wait_for_room()
            raise DoneError

    with pytest.raises(DoneError):  # leaving the engine raises nothing of its own
        run(main)


class DoneError(Exception):
    pass


def test_full_queue(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_running=1, max_waiting=2) as (engine, gate):
            gate.shut()
            streams = [engine.generate([5, 6, 7], GREEDY)]
            await until(lambda: engine.stats().running == 1)
            streams += [engine.generate([5, 6, 7], GREEDY), engine.generate("a text", GREEDY)]
            for prompt in ([5, 6, 7], "another"):
                with pytest.raises(EngineBusyError, match="max_waiting"):
                    engine.generate(prompt, GREEDY)
            streams[1].abort()
            streams[1] = engine.generate("yet another", GREEDY)
            async with anyio.create_task_group() as group:

                async def submit_when_possible() -> None:
                    await engine.wait_for_room()
                    streams.append(engine.generate([5, 6, 7], GREEDY))

                for _ in range(5):
                    group.start_soon(submit_when_possible)
                await anyio.wait_all_tasks_blocked()
                assert len(streams) == 3
                gate.open()
            assert len(streams) == 8
            assert [(await stream.completion()).finish_reason for stream in streams] == ["length"] * 8

    run(main)
