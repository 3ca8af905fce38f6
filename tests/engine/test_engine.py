from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from minipaged import (
    Completion,
    ConfigError,
    DeviceError,
    Engine,
    EngineConfig,
    EngineDeadError,
    ModelLoadError,
    RequestAbortedError,
    RequestTimeoutError,
    SamplingParams,
    Token,
    TokenStream,
)
from minipaged.engine.event_loop import current_event_loop
from minipaged.engine.loading import LoadedModel, load_model
from minipaged.progress import Progress
from minipaged.settings import EngineSettings
from tests.conftest import RunAsync
from tests.engine.engines import SMALL, gated_engine, minipaged_threads, tiny_engine, until

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=200)


async def collect(stream: TokenStream) -> list[Token]:
    return [token async for token in stream]


# Generating


def test_stream_and_completion_agree(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            stream = engine.generate("The quick brown fox", GREEDY, request_id="mine")
            tokens = await collect(stream)
            completion = await stream.completion()
            assert completion.request_id == stream.request_id == "mine"
            assert [token.id for token in tokens] == list(completion.token_ids)
            assert "".join(token.text for token in tokens) == completion.text
            assert [token.finish_reason for token in tokens] == [None] * 11 + ["length"]
            assert completion.usage.completion_tokens == 12
            assert list(completion.prompt_token_ids) == engine.tokenizer.encode("The quick brown fox")
            timings = completion.timings
            assert timings.queued + timings.prefill == pytest.approx(timings.time_to_first_token)
            assert timings.decode > 0

    run(main)


def test_completion_without_iteration_and_tokens_after_it(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            stream = engine.generate([5, 6, 7], GREEDY)
            completion = await stream.completion()
            assert [token.id for token in await collect(stream)] == list(completion.token_ids)
            assert await collect(stream) == []  # a token is taken once
            assert await anext(stream, None) is None
            assert await stream.completion() == completion

    run(main)


def test_completion_beside_iteration(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            stream = engine.generate([5, 6, 7], GREEDY)
            completions: list[Completion] = []

            async def wait() -> None:
                completions.append(await stream.completion())

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                group.start_soon(wait)
                tokens = await collect(stream)
            assert [list(completion.token_ids) for completion in completions] == [[token.id for token in tokens]] * 2

    run(main)


def test_overlap_and_batching_change_nothing(run: RunAsync, tiny_model: Path) -> None:
    prompts = [[7, 8, 9, index] for index in range(8)]

    async def main() -> None:
        answers: list[list[str]] = []
        for overlap in (True, False):
            async with tiny_engine(tiny_model, overlap=overlap) as engine:
                streams = [engine.generate(prompt, GREEDY) for prompt in prompts]
                answers.append([(await stream.completion()).text for stream in streams])
                answers.append([(await engine.generate(prompt, GREEDY).completion()).text for prompt in prompts])
        assert answers.count(answers[0]) == 4

    run(main)


def test_samples_of_one_request(run: RunAsync, tiny_model: Path) -> None:
    params = SamplingParams(n=3, max_tokens=8, seed=5, ignore_eos=True, logprobs=2)

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            stream = engine.generate("There are three things", params)
            tokens = await collect(stream)
            completion = await stream.completion()
            for choice in completion.choices:
                own = [token for token in tokens if token.index == choice.index]
                assert tuple(token.id for token in own) == choice.token_ids
                assert "".join(token.text for token in own) == choice.text
                assert tuple(token.logprob for token in own) == choice.logprobs
                assert tuple(token.top_logprobs for token in own) == choice.top_logprobs
                assert own[-1].finish_reason == choice.finish_reason == "length"
            assert len({choice.token_ids for choice in completion.choices}) == 3
            assert completion.usage.completion_tokens == 24

    run(main)


def test_stop_string_ends_the_text_before_it(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            whole = (await engine.generate([5, 6, 7], replace(GREEDY, max_tokens=40)).completion()).text
            stop = whole[len(whole) // 2 :][:3]
            stream = engine.generate([5, 6, 7], replace(GREEDY, max_tokens=40, stop=["never", stop]))
            tokens = await collect(stream)
            completion = await stream.completion()
            assert completion.text == "".join(token.text for token in tokens) == whole[: whole.index(stop)]
            assert completion.finish_reason == tokens[-1].finish_reason == "stop"
            assert completion.choices[0].stop_reason == stop

    run(main)


def test_stop_string_ends_only_its_own_sample(run: RunAsync, tiny_model: Path) -> None:
    params = SamplingParams(n=4, max_tokens=30, seed=5, ignore_eos=True)

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            whole = [choice.text for choice in (await engine.generate([5, 6, 7], params).completion()).choices]
            stop = whole[2][10:13]
            completion = await engine.generate([5, 6, 7], replace(params, stop=stop)).completion()
            assert [choice.text for choice in completion.choices] == [text.split(stop)[0] for text in whole]
            assert {choice.finish_reason for choice in completion.choices} == {"stop", "length"}

    run(main)


def test_stop_string_complete_with_the_last_token_wins_over_length(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            whole = (await engine.generate([5, 6, 7], GREEDY).completion()).text
            completion = await engine.generate([5, 6, 7], replace(GREEDY, stop=whole[-2:])).completion()
            assert whole.count(whole[-2:]) == 1
            assert completion.finish_reason == "stop"
            assert completion.text == whole[:-2]

    run(main)


def test_stop_token_is_in_the_ids_and_not_in_the_text(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            tokens = await collect(engine.generate([5, 6, 7], GREEDY))
            stop_id = tokens[5].id
            first = [token.id for token in tokens].index(stop_id)
            completion = await engine.generate([5, 6, 7], replace(GREEDY, stop_token_ids=[stop_id])).completion()
            assert completion.token_ids == tuple(token.id for token in tokens[: first + 1])
            assert completion.choices[0].stop_reason == stop_id
            assert completion.text == engine.tokenizer.decode(completion.token_ids[:-1])

    run(main)


def test_model_length_ends_a_sequence(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model, max_model_len=20) as engine:
            completion = await engine.generate([5] * 15, replace(GREEDY, max_tokens=None)).completion()
            assert (len(completion.token_ids), completion.finish_reason) == (5, "length")

    run(main)


def test_chat_takes_the_messages_as_they_are_at_the_call(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            messages = [{"role": "user", "content": "Why is the sea salty?"}]
            stream = engine.chat(messages, GREEDY)
            messages.append({"role": "assistant", "content": "Because."})
            prompt = (await stream.completion()).prompt_token_ids
            expected = engine.tokenizer.encode_chat("<|user|>Why is the sea salty?<|assistant|>")
            assert list(prompt) == expected

    run(main)


def test_prefix_cache_its_salt_and_its_reset(run: RunAsync, tiny_model: Path) -> None:
    prompt = list(range(10, 60))

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:

            async def cached_tokens(salt: str | None) -> int:
                return (await engine.generate(prompt, GREEDY, cache_salt=salt).completion()).usage.cached_tokens

            assert await cached_tokens(None) == 0
            assert await cached_tokens(None) == 48
            assert await cached_tokens("tenant") == 0
            assert await cached_tokens("tenant") == 48
            assert engine.stats().prefix_cache_hits == 96
            assert engine.stats().prefix_cache_queries == 200
            engine.reset_prefix_cache()
            assert engine.stats().blocks.cached == 0
            assert await cached_tokens(None) == 0

    run(main)


def test_prompt_logprobs(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model, max_batched_tokens=16) as engine:
            prompt = list(range(10, 60))
            completion = await engine.generate(prompt, replace(GREEDY, prompt_logprobs=1)).completion()
            assert completion.prompt_logprobs is not None
            assert [entry[0].id for entry in completion.prompt_logprobs] == prompt[1:]

    run(main)


def test_priority_is_served_first(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model, max_running=1) as (engine, gate):
            gate.shut()
            ended: list[str] = []

            async def follow(stream: TokenStream) -> None:
                await stream.completion()
                ended.append(stream.request_id)

            async with anyio.create_task_group() as group:
                for name, priority in (("late", 2), ("first", -1), ("middle", 0), ("middle 2", 0)):
                    group.start_soon(follow, engine.generate([5, 6], GREEDY, request_id=name, priority=priority))
                gate.open()
            assert ended == ["first", "middle", "middle 2", "late"]

    run(main)


def test_deadline(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model) as (engine, gate):
            gate.shut()
            neighbour = engine.generate([5, 6, 7], GREEDY)
            late = engine.generate([5, 6, 7], LONG, deadline=0.001, request_id="late")
            in_time = engine.generate([5, 6, 7], GREEDY, deadline=1000)
            await anyio.sleep(0.002)
            gate.open()
            with pytest.raises(RequestTimeoutError, match="'late' passed its deadline"):
                await collect(late)
            with pytest.raises(TimeoutError):
                await late.completion()
            assert (await neighbour.completion()).finish_reason == "length"
            assert (await in_time.completion()).finish_reason == "length"

    run(main)


def test_slow_consumer_gets_every_token_and_slows_nobody(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model) as (engine, gate):
            slow = engine.generate([5, 6, 7], LONG)
            iterator = aiter(slow)
            first = await anext(iterator)
            assert len(await collect(engine.generate([5, 6, 7], LONG))) == 200
            steps = gate.num_executed
            rest = [token async for token in iterator]
            assert [first, *rest][-1].finish_reason == "length"
            assert len(rest) == 199
            assert gate.num_executed - steps <= 2  # all its tokens were there already

    run(main)


def test_several_engines_at_once(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as one, tiny_engine(tiny_model, block_size=8) as other:
            streams = [engine.generate([5, 6, 7], GREEDY) for engine in (one, other)]
            completions = [await stream.completion() for stream in streams]
            assert completions[0].token_ids == completions[1].token_ids

    run(main)


# Lifecycle


def test_loading_leaves_the_event_loop_free(run: RunAsync, tiny_model: Path) -> None:
    released = threading.Event()
    told: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        told.append(what)
        assert released.wait(30)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(load)
            await until(lambda: bool(told))
            released.set()

    async def load() -> None:
        async with Engine.load(tiny_model, config=EngineConfig(**SMALL), progress=progress) as engine:
            assert (await engine.generate([5], GREEDY).completion()).finish_reason == "length"

    run(main)


def test_cancelled_loading_ends_early(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        reports: list[int] = []
        post = current_event_loop().post

        def progress(what: str, done: int, total: int) -> None:
            reports.append(done)
            post(group.cancel_scope.cancel)
            while is_loading():
                time.sleep(0.001)

        def is_loading() -> bool:
            with pytest.raises(EngineDeadError) as refusal:
                engine.stats()
            return "loading" in str(refusal.value)

        engine = Engine.load(tiny_model, config=EngineConfig(**SMALL), progress=progress)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.start)
        assert len(reports) == 1
        with pytest.raises(EngineDeadError, match="was closed"):
            engine.generate([5], GREEDY)

    run(main)


def test_load_errors_are_raised_on_entering(run: RunAsync, tiny_model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ModelLoadError, match=r"neither config\.json nor"):
            async with Engine.load(tmp_path):
                pass
        with pytest.raises(DeviceError, match=r'"cuda".*"cpu"'):
            async with Engine.load(tiny_model, device="cuda"):
                pass
        with pytest.raises(ConfigError, match=r"513.*512"):
            async with Engine.load(tiny_model, max_model_len=513):
                pass
        too_much: list[EngineSettings] = [
            {"num_blocks": 10**15},
            {"num_blocks": 10**30},
            {"max_running": 10**12, "max_batched_tokens": 10**12, "num_blocks": 1},
        ]
        for settings in too_much:
            with pytest.raises(DeviceError, match="not enough memory"):
                async with Engine.load(tiny_model, **settings):
                    pass

    run(main)


def test_errors_of_the_body_come_out_unchanged(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        error = LookupError("the user's own")

        async def fail() -> None:
            async with Engine.load(tiny_model, config=EngineConfig(**SMALL)) as engine:
                engine.generate([5, 6, 7], LONG)
                raise error

        with pytest.raises(LookupError) as caught:
            await fail()
        assert caught.value is error

    run(main)


def test_engine_refuses_before_start_and_after_close(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        engine = Engine.load(tiny_model, config=EngineConfig(**SMALL))
        with pytest.raises(EngineDeadError, match="has not been started"):
            engine.generate([5, 6, 7])
        async with engine:
            with pytest.raises(EngineDeadError, match="only once"):
                await engine.start()
        for use in (lambda: engine.generate([5]), lambda: engine.abort("x"), engine.stats, lambda: engine.tokenizer):
            with pytest.raises(EngineDeadError, match="was closed"):
                use()
        await engine.close()

    run(main)


def test_close_while_requests_run(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with Engine.load(tiny_model, config=EngineConfig(**SMALL)) as engine:
            errors: list[Exception] = []

            async def follow(stream: TokenStream) -> None:
                try:
                    await collect(stream)
                except RequestAbortedError as error:
                    errors.append(error)

            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(follow, engine.generate([5, 6, 7], LONG))
                group.start_soon(follow, engine.generate("a text", LONG))
                await until(lambda: engine.stats().running >= 3)
                group.start_soon(engine.close)
                group.start_soon(engine.close)
            assert len(errors) == 4

    run(main)


def test_close_from_another_task_than_start(run: RunAsync, tiny_model: Path) -> None:
    """Test fixtures and web frameworks do so."""

    async def main() -> None:
        engine = Engine.load(tiny_model, config=EngineConfig(**SMALL))
        async with anyio.create_task_group() as group:
            group.start_soon(engine.start)
        assert (await engine.generate([5, 6, 7], GREEDY).completion()).finish_reason == "length"
        async with anyio.create_task_group() as group:
            group.start_soon(engine.close)

    run(main)


def test_drain_finishes_what_was_accepted(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with gated_engine(tiny_model) as (engine, gate):
            gate.shut()
            streams = [engine.generate("a text", GREEDY) for _ in range(5)]
            async with anyio.create_task_group() as group:
                group.start_soon(engine.drain)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(EngineDeadError, match="draining"):
                    engine.generate([5], GREEDY)
                gate.open()
            assert [(await stream.completion()).finish_reason for stream in streams] == ["length"] * 5

    run(main)


def test_closed_engine_keeps_nothing_alive(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        runners: list[weakref.ref[object]] = []

        def load(config: EngineConfig, progress: Progress) -> LoadedModel:
            loaded = load_model(tiny_model, config, progress)
            runners.append(weakref.ref(loaded.runner))
            return loaded

        async with Engine(EngineConfig(**SMALL), load) as engine:
            stream = engine.generate([5, 6, 7], GREEDY)
            await stream.completion()
            running = engine.generate([5, 6, 7], LONG)
        gc.collect()
        assert runners[0]() is None
        with pytest.raises(RequestAbortedError):
            await running.completion()
        assert minipaged_threads() == []

    run(main)


def test_engine_belongs_to_its_event_loop(run: RunAsync, tiny_model: Path) -> None:
    engines = [Engine.load(tiny_model, config=EngineConfig(**SMALL))]

    async def main() -> None:
        (engine,) = engines
        await engine.start()
        for call in (engine.stats, partial(engine.generate, [5, 6, 7])):
            with pytest.raises(RuntimeError, match="use LLM"):
                await anyio.to_thread.run_sync(call)

    async def another() -> None:
        (engine,) = engines
        with pytest.raises(RuntimeError, match="event loop that it was started in"):
            engine.generate([5, 6, 7])
        with pytest.raises(RuntimeError, match="event loop that it was started in"):
            await engine.close()

    run(main)
    run(another)
    engines.clear()  # all that is left to do with an engine whose event loop has ended
    while minipaged_threads():
        gc.collect()
        time.sleep(0.001)
