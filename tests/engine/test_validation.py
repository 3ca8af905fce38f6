"""Bad requests are refused when they are submitted, and nothing is left of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_type_hints

import numpy as np
import pytest

from minipaged import (
    ConfigError,
    Engine,
    EngineConfig,
    InvalidRequestError,
    PromptTooLongError,
    SamplingParams,
)
from minipaged.engine.capacity import plan_capacity
from minipaged.models.config import DefaultRope, ModelConfig
from minipaged.settings import EngineSettings
from minipaged.text.chat import Message
from tests.conftest import RunAsync
from tests.engine.engines import tiny_engine

VOCAB_SIZE = 384


@pytest.mark.parametrize(
    "token_id", [-1, VOCAB_SIZE, 2**40, -(2**70), True, 5.0, "5", None, np.float32(5), np.bool_(True)]
)
def test_token_ids(run: RunAsync, tiny_model: Path, token_id: object) -> None:
    bad = cast(int, token_id)

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            for prompt in ([bad], [5, bad, 6]):
                with pytest.raises(InvalidRequestError, match="of the prompt is"):
                    engine.generate(prompt)
            with pytest.raises(InvalidRequestError, match="stop_token_ids"):
                engine.generate([5], SamplingParams(stop_token_ids=[bad]))
            with pytest.raises(InvalidRequestError, match="logit_bias"):
                engine.generate([5], SamplingParams(logit_bias={bad: 1.0}))
            with pytest.raises(InvalidRequestError, match="logit_bias"):
                engine.generate("a text", SamplingParams(logit_bias={bad: 1.0}))

    run(main)


def test_every_sequence_of_integers_is_a_prompt(run: RunAsync, tiny_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            prompts: list[Sequence[int]] = [
                [5, 6, 7],
                (5, 6, 7),
                range(5, 8),
                cast(Sequence[int], np.array([5, 6, 7])),
                cast(Sequence[int], np.array([5, 6, 7], np.uint8)),
            ]
            completions = [await engine.generate(prompt, params).completion() for prompt in prompts]
            assert {completion.prompt_token_ids for completion in completions} == {(5, 6, 7)}
            assert len({completion.token_ids for completion in completions}) == 1

    run(main)


@pytest.mark.parametrize("prompt", ["", [], b"bytes", 5, None, {5: 6}.keys(), np.zeros((2, 2), np.int32), [[5]]])
def test_prompts_that_are_none(run: RunAsync, tiny_model: Path, prompt: object) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            with pytest.raises(InvalidRequestError):
                engine.generate(cast(str, prompt))

    run(main)


def test_keywords(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            for request_id in ("", cast(str, 5)):
                with pytest.raises(InvalidRequestError, match="request_id"):
                    engine.generate([5], request_id=request_id)
            for priority in (True, cast(int, 0.5), cast(int, "1")):
                with pytest.raises(InvalidRequestError, match="priority"):
                    engine.generate([5], priority=priority)
            for deadline in (0, -1.0, 10**400, math.nan, math.inf, True, cast(float, "1")):
                with pytest.raises(InvalidRequestError, match="deadline"):
                    engine.generate("a text", deadline=deadline)
            with pytest.raises(InvalidRequestError, match="cache_salt"):
                engine.generate([5], cache_salt=cast(str, 5))
            with pytest.raises(InvalidRequestError, match="params is a dict"):
                engine.chat([{"role": "user", "content": "hello"}], cast(SamplingParams, {"temperature": 0}))
            with pytest.raises(InvalidRequestError, match=r"n is 17 .* 16"):
                engine.generate([5], SamplingParams(n=17))

    run(main)


def test_conversations(run: RunAsync, tiny_model: Path) -> None:
    user = {"role": "user", "content": "hello"}

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            for messages in ((each for each in [user]), [{**user, "lock": threading.Lock()}]):
                with pytest.raises(InvalidRequestError, match="cannot be copied"):
                    engine.chat(cast(list[Message], messages))
            for tools in (5, [5], {"name": "search"}):
                with pytest.raises(InvalidRequestError, match="tools is"):
                    await engine.chat([user], tools=cast(list[Message], tools)).completion()
            for variables in (5, {5: 6}, cast(object, {"messages": []})):
                with pytest.raises(InvalidRequestError, match="variable"):
                    await engine.chat([user], template_variables=cast(Message, variables)).completion()
            for template in ("absent", cast(str, 5), cast(str, [])):
                with pytest.raises(InvalidRequestError, match="no chat template named"):
                    await engine.chat([user], template=template).completion()

    run(main)


def test_request_id_in_use(run: RunAsync, tiny_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            first = engine.generate("a text", params, request_id="mine")
            with pytest.raises(InvalidRequestError, match="'mine'"):
                engine.generate([5], params, request_id="mine")
            await first.completion()
            await engine.generate([5], params, request_id="mine").completion()

    run(main)


def test_prompt_too_long(run: RunAsync, tiny_model: Path) -> None:
    async def main() -> None:
        async with tiny_engine(tiny_model, max_model_len=32) as engine:
            with pytest.raises(PromptTooLongError, match="32"):
                engine.generate([5] * 32)
            with pytest.raises(PromptTooLongError, match="32"):
                await engine.generate("5" * 100).completion()
            assert len((await engine.generate([5] * 31).completion()).token_ids) == 1

    run(main)


def test_settings() -> None:
    assert get_type_hints(EngineSettings) == get_type_hints(EngineConfig)
    with pytest.raises(ConfigError, match="'max_model_length'; did you mean 'max_model_len'"):
        Engine.load("model", max_model_length=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="the settings are device, "):
        Engine.load("model", xyz=5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="block_size"):
        Engine.load("model", block_size=0)
    engine = Engine.load("model", config=EngineConfig(block_size=8, num_blocks=5), num_blocks=6)
    assert (engine.config.block_size, engine.config.num_blocks) == (8, 6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "gpu"),
        ("kv_dtype", "float8"),
        ("preemption", ["swap"]),
        ("preemption", "swpa"),
        ("overlap", "no"),
        ("prefix_caching", 0),
        ("debug", None),
        ("swap_bandwidth", "fast"),
        ("swap_bandwidth", 0),
        ("max_running", 2.0),
        ("num_threads", 0),
        ("dtype", "float32"),
        ("cuda_graphs", 1),
        ("memory_fraction", 0),
        ("memory_fraction", 1.01),
        ("memory_fraction", float("nan")),
        ("memory_fraction", "half"),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"EngineConfig\.{name} is .*; expected"):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


MODEL = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=512,
    rope_theta=10000.0,
    rope_scaling=DefaultRope(),
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=False,
    sliding_windows=(None,) * 3,
    eos_token_ids=(1,),
)
BLOCK = 16 * 2 * 3 * 2 * 16 * 4
"""Bytes: 16 tokens x (K, V) x 3 layers x 2 KV heads x head_dim 16 x float32."""
GIB = 2**30
LAYOUT = MODEL.kv_layout(16, "float32")


def test_kv_budget_is_exact() -> None:
    for memory, num_blocks in ((BLOCK, 1), (10 * BLOCK - 1, 9), (10 * BLOCK, 10), (10 * BLOCK + 1, 10)):
        capacity = plan_capacity(EngineConfig(kv_cache_memory=memory), MODEL, LAYOUT, GIB, 512)
        assert (capacity.num_blocks, capacity.block_bytes) == (num_blocks, BLOCK)
        assert capacity.max_model_len == min(512, num_blocks * 16)
    halved = MODEL.kv_layout(16, "bfloat16")
    assert plan_capacity(EngineConfig(kv_cache_memory=BLOCK), MODEL, halved, GIB, 512).num_blocks == 2
    assert plan_capacity(EngineConfig(swap_memory=5 * BLOCK + 7), MODEL, LAYOUT, GIB, 512).swap_blocks == 5
    assert plan_capacity(EngineConfig(swap_blocks=3), MODEL, LAYOUT, GIB, 512).swap_blocks == 3


def test_default_kv_budget() -> None:
    """What the device has for it, or what `max_running` sequences can need if that is less."""
    assert plan_capacity(EngineConfig(), MODEL, LAYOUT, 7 * BLOCK + 1, 512).num_blocks == 7
    assert plan_capacity(EngineConfig(), MODEL, LAYOUT, GIB, 512).num_blocks == min(GIB // BLOCK, 256 * 32)
    assert plan_capacity(EngineConfig(max_running=2), MODEL, LAYOUT, GIB, 512).num_blocks == 2 * 32
    assert plan_capacity(EngineConfig(max_running=2, max_model_len=100), MODEL, LAYOUT, GIB, 512).num_blocks == 2 * 7


def test_default_size_of_a_step() -> None:
    """What suits the device, or a token for each sequence that may run if that is more."""
    for config, expected in (
        (EngineConfig(), 300),
        (EngineConfig(max_running=400), 400),
        (EngineConfig(max_batched_tokens=256), 256),
        (EngineConfig(max_batched_tokens=900), 900),
    ):
        assert plan_capacity(config, MODEL, LAYOUT, GIB, 300).max_batched_tokens == expected


def test_budgets_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_memory is {BLOCK - 1} bytes.*{BLOCK}"):
        plan_capacity(EngineConfig(kv_cache_memory=BLOCK - 1), MODEL, LAYOUT, GIB, 512)
    with pytest.raises(ConfigError, match="swap_memory is 1 bytes"):
        plan_capacity(EngineConfig(swap_memory=1), MODEL, LAYOUT, GIB, 512)
    with pytest.raises(ConfigError, match=r"max_model_len is 600.*512"):
        plan_capacity(EngineConfig(max_model_len=600), MODEL, LAYOUT, GIB, 512)
    with pytest.raises(ConfigError, match=f"max_model_len is 65 .*4 KV blocks.*num_blocks >= 5.*{5 * BLOCK} bytes"):
        plan_capacity(EngineConfig(max_model_len=65, num_blocks=4), MODEL, LAYOUT, GIB, 512)
    assert plan_capacity(EngineConfig(max_model_len=64, num_blocks=4), MODEL, LAYOUT, GIB, 512).max_model_len == 64


def test_sampling_edges_that_equal_greedy(run: RunAsync, tiny_model: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    same = [
        SamplingParams(top_p=1e-8, max_tokens=12, ignore_eos=True),
        SamplingParams(top_k=1, max_tokens=12, ignore_eos=True),
    ]
    unlimited = [
        SamplingParams(top_k=top_k, seed=3, max_tokens=12, ignore_eos=True)
        for top_k in (0, -1, VOCAB_SIZE, VOCAB_SIZE + 1)
    ]

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            expected = (await engine.generate([5, 6, 7], greedy).completion()).token_ids
            for params in same:
                assert (await engine.generate([5, 6, 7], params).completion()).token_ids == expected
            drawn = {(await engine.generate([5, 6, 7], params).completion()).token_ids for params in unlimited}
            assert len(drawn) == 1
            assert drawn != {expected}

    run(main)


def test_seeded_requests_repeat_alone_and_in_any_batch(run: RunAsync, tiny_model: Path) -> None:
    params = [
        SamplingParams(
            seed=seed,
            max_tokens=20,
            ignore_eos=True,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.2,
        )
        for seed in range(5)
    ]

    async def main() -> None:
        async with tiny_engine(tiny_model) as engine:
            alone = [(await engine.generate([5, 6, 7], each).completion()).token_ids for each in params]
            streams = [engine.generate([5, 6, 7], each) for each in reversed(params)]
            together = [(await stream.completion()).token_ids for stream in streams]
            assert together == alone[::-1]
            assert len(set(alone)) == 5

    run(main)
