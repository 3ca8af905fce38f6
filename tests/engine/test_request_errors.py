"""Errors of requests say which request they are of, whether they are raised at submit or out of the stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged import (
    Engine,
    EngineBusyError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    SamplingParams,
)
from tests.conftest import RunAsync

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def fail(token_ids: object, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    raise ZeroDivisionError("a callback that fails")


def test_out_of_the_stream(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with Engine.load(tiny_model, num_blocks=40, max_model_len=100) as engine:
            failing = SamplingParams(logits_callback=fail)
            for stream, kind in (
                (engine.generate("too many words " * 200, request_id="long"), PromptTooLongError),
                (engine.chat([{"role": "user"}], request_id="without content"), InvalidRequestError),
                (engine.generate([5, 6], ENDLESS, deadline=1e-9, request_id="late"), RequestTimeoutError),
                (engine.generate([5, 6], failing, request_id="failing"), RequestFailedError),
                (engine.generate([5, 6], failing), RequestFailedError),
            ):
                with pytest.raises(kind) as caught:
                    await stream.completion()
                assert isinstance(caught.value, RequestError)
                assert caught.value.request_id == stream.request_id
            running = engine.generate([5, 6], ENDLESS, request_id="running")
        with pytest.raises(RequestAbortedError) as aborted:
            await running.completion()
        assert aborted.value.request_id == "running"

    run(main)


def test_at_submit(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with Engine.load(tiny_model, num_blocks=40, max_model_len=100, max_waiting=1) as engine:
            engine.generate([5, 6], ENDLESS, request_id="first")
            with pytest.raises(InvalidRequestError) as taken:
                engine.generate([5, 6], ENDLESS, request_id="first")
            with pytest.raises(EngineBusyError) as busy:
                engine.generate([5, 6], ENDLESS, request_id="second")
            with pytest.raises(InvalidRequestError) as empty:
                engine.generate([], ENDLESS, request_id="third")
            with pytest.raises(InvalidRequestError) as nameless:
                engine.generate([5, 6], ENDLESS, request_id="")
            named = [each.value.request_id for each in (taken, busy, empty)]
            assert named == ["first", "second", "third"]
            assert nameless.value.request_id == ""
        with pytest.raises(EngineDeadError) as dead:
            engine.generate([5, 6], ENDLESS, request_id="fourth")
        assert not isinstance(dead.value, RequestError)

    run(main)


def test_too_long_a_prompt_of_ids(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with Engine.load(tiny_model, num_blocks=40, max_model_len=100) as engine:
            with pytest.raises(PromptTooLongError) as caught:
                engine.generate([5] * 100, request_id="long")
            assert caught.value.request_id == "long"

    run(main)
