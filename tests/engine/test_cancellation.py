"""Whichever way a caller loses interest, and whenever: the request ends and its blocks are free within two steps."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from minipaged import Completion, Engine, SamplingParams, TokenStream
from tests.conftest import RunAsync
from tests.engine.engines import GatedRunner, gated_engine, tiny_engine, until

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPT = [5, 6, 7] * 30

# Stages: how many steps are allowed before the caller leaves, with 32 tokens a step for a prompt of 90.
QUEUED, MID_PREFILL, MID_DECODE = 0, 2, 6
STAGES = {"queued": QUEUED, "mid-prefill": MID_PREFILL, "mid-decode": MID_DECODE}

Leave = Callable[[Engine, TokenStream], Awaitable[None]]


async def _abort(engine: Engine, stream: TokenStream) -> None:
    stream.abort()


async def _abort_by_id(engine: Engine, stream: TokenStream) -> None:
    assert engine.abort(stream.request_id)
    assert not engine.abort(stream.request_id)


async def _close(engine: Engine, stream: TokenStream) -> None:
    async with aclosing(stream):
        pass


async def _leave_context(engine: Engine, stream: TokenStream) -> None:
    async with stream:
        pass


async def _cancel_iteration(engine: Engine, stream: TokenStream) -> None:
    async def iterate() -> None:
        async for _ in stream:
            pass

    await _cancel_when_blocked(iterate)


async def _cancel_anext(engine: Engine, stream: TokenStream) -> None:
    async def take_all() -> None:
        while True:
            await anext(stream)

    await _cancel_when_blocked(take_all)


async def _cancel_completion(engine: Engine, stream: TokenStream) -> None:
    await _cancel_when_blocked(stream.completion)


async def _cancel_when_blocked(wait: Callable[[], Awaitable[object]]) -> None:
    async def task() -> None:
        await wait()

    async with anyio.create_task_group() as group:
        group.start_soon(task)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()


WAYS: dict[str, Leave] = {
    "abort": _abort,
    "abort by id": _abort_by_id,
    "aclose": _close,
    "async with": _leave_context,
    "cancelled iteration": _cancel_iteration,
    "cancelled anext": _cancel_anext,
    "cancelled completion": _cancel_completion,
}


async def _reach(gate: GatedRunner, stage: int) -> None:
    """Let so many steps finish."""
    before = gate.num_executed
    gate.allow(stage)
    await until(lambda: gate.num_executed == before + stage)
    await anyio.wait_all_tasks_blocked()


async def _expect_end_within_two_steps(engine: Engine, gate: GatedRunner) -> None:
    before = gate.num_executed
    gate.allow(2)
    await until(lambda: engine.stats().running == engine.stats().waiting == engine.stats().blocks.in_use == 0)
    assert gate.num_executed <= before + 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_leaving(run: RunAsync, tiny_model: Path, way: str, stage: str) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):
            gate.shut()
            stream = engine.generate(PROMPT, LONG)
            await _reach(gate, STAGES[stage])
            await WAYS[way](engine, stream)
            await _expect_end_within_two_steps(engine, gate)
            completion = await stream.completion()
            assert completion.finish_reason == "abort"
            if not way.startswith("cancelled"):  # then the tokens are still there to be read
                assert [token.id async for token in stream] == list(completion.token_ids)

    run(main)


@pytest.mark.parametrize("stage", STAGES)
def test_losing_the_stream(run: RunAsync, tiny_model: Path, stage: str) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):
            gate.shut()
            stream = engine.generate(PROMPT, LONG)
            await _reach(gate, STAGES[stage])
            cycle: list[object] = [stream]
            cycle.append(cycle)
            del stream, cycle
            gc.collect()
            await _expect_end_within_two_steps(engine, gate)

    run(main)


def test_losing_the_stream_on_another_thread(run: RunAsync, tiny_model: Path) -> None:
    """Garbage collection runs on whichever thread it likes."""

    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):
            gate.shut()
            streams = [engine.generate(PROMPT, LONG)]
            await anyio.to_thread.run_sync(streams.clear)
            await _expect_end_within_two_steps(engine, gate)

    run(main)


def test_break_while_holding_the_stream(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):
            stream = engine.generate(PROMPT, LONG)
            async for _ in stream:
                gate.shut()
                break
            await _expect_end_within_two_steps(engine, gate)
            assert (await stream.completion()).finish_reason == "abort"

    run(main)


def test_exception_in_the_loop(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):
            stream = engine.generate(PROMPT, LONG)

            async def iterate() -> None:
                async for _ in stream:
                    gate.shut()
                    raise LookupError

            with pytest.raises(LookupError) as caught:
                await iterate()
            await _expect_end_within_two_steps(engine, gate)
            assert caught.value.__traceback__ is not None  # which keeps the frame, and so the stream, alive

    run(main)


async def texts(stream: TokenStream) -> AsyncGenerator[str, None]:
    """A caller's own generator around the stream, such as a web framework's response body."""
    async for token in stream:
        yield token.text


def test_closed_while_suspended_at_yield(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):
            body = texts(engine.generate(PROMPT, LONG))
            await anext(body)
            gate.shut()
            await body.aclose()
            await _expect_end_within_two_steps(engine, gate)

    run(main)


def test_cancelled_while_suspended_at_yield(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):

            async def respond() -> None:
                async with aclosing(texts(engine.generate(PROMPT, LONG))) as body:
                    async for _ in body:
                        gate.shut()
                        await anyio.sleep_forever()

            await _cancel_when_blocked(respond)
            await _expect_end_within_two_steps(engine, gate)

    run(main)


def test_lost_while_suspended_at_yield(tiny_model: Path) -> None:
    """Trio forbids to lose a generator; asyncio closes it."""

    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):
            body = texts(engine.generate(PROMPT, LONG))
            await anext(body)
            gate.shut()
            del body
            await _expect_end_within_two_steps(engine, gate)

    asyncio.run(main())


def test_cancelled_asyncio_task(tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_batched_tokens=32) as (engine, gate):
            gate.shut()

            async def consume() -> Completion:
                stream = engine.generate(PROMPT, LONG)
                async for _ in stream:
                    pass
                return await stream.completion()

            task = asyncio.create_task(consume())
            await until(lambda: engine.stats().running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await _expect_end_within_two_steps(engine, gate)

    asyncio.run(main())


def test_abort_while_the_text_is_being_encoded(
    run: RunAsync, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model) as (engine, gate):
            encoding, released = threading.Event(), threading.Event()
            encode = engine.tokenizer.encode

            def slow_encode(text: str) -> list[int]:
                encoding.set()
                assert released.wait(30)
                return encode(text)

            monkeypatch.setattr(engine.tokenizer, "encode", slow_encode)
            first, second = engine.generate("a text", LONG), engine.generate("another", LONG)
            assert engine.stats().waiting == 2
            await until(encoding.is_set)
            first.abort()
            second.abort()
            assert engine.stats().waiting == 0
            completion = await first.completion()
            assert (completion.finish_reason, completion.token_ids) == ("abort", ())
            released.set()
            assert [token async for token in second] == []
            assert gate.num_executed == 0

    run(main)


def test_a_lost_iteration_leaves_the_request_to_others(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            stream = engine.generate(PROMPT, LONG)
            completions: list[Completion] = []

            async def wait() -> None:
                completions.append(await stream.completion())

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                async for _ in stream:
                    break
            assert completions[0].finish_reason == "length"

    run(main)


def test_cancelled_completion_leaves_the_request_to_an_iteration(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            stream = engine.generate(PROMPT, LONG)
            num_tokens = 0
            async for _ in stream:
                num_tokens += 1
                if num_tokens == 3:
                    await _cancel_when_blocked(stream.completion)
            assert num_tokens == 200

    run(main)


def test_one_of_many_is_aborted_and_the_others_are_not_changed(run: RunAsync, tiny_model: Path) -> None:
    prompts = [[index, index + 1, index + 2] for index in range(20, 28)]

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            alone = [(await engine.generate(prompt, LONG).completion()).token_ids for prompt in prompts]
            streams = [engine.generate(prompt, LONG) for prompt in prompts]
            async for _ in streams[3]:
                break
            together = [await stream.completion() for stream in streams]
            assert together[3].finish_reason == "abort"
            for index, completion in enumerate(together):
                assert completion.token_ids == alone[index][: len(completion.token_ids)]
                assert index == 3 or completion.finish_reason == "length"

    run(main)


def test_aborting_some_samples_keeps_what_ended_before(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            params = SamplingParams(n=8, seed=1, max_tokens=100, stop_token_ids=list(range(4, 14)))
            stream = engine.generate([5, 6, 7], params)
            async for token in stream:
                if token.finish_reason is not None:
                    break
            completion = await stream.completion()
            reasons = [choice.finish_reason for choice in completion.choices]
            assert reasons[token.index] == "stop"
            assert "abort" in reasons

    run(main)
