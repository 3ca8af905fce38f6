"""The whole engine on the fake GPU."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from minipaged import (
    Completion,
    ConfigError,
    DeviceError,
    Engine,
    EngineConfig,
    EngineDeadError,
    SamplingParams,
    TokenLogprob,
)
from minipaged.config import DeviceName
from minipaged.execution.runner import Runner
from minipaged.models.files.model_source import open_model
from minipaged.models.llama import load_llama
from minipaged.ops.base import Array, Weight
from minipaged.ops.reference.ops import ReferenceOps
from minipaged.settings import EngineSettings
from minipaged.step import StepPlan, StepResult
from tests.batches import TokenSpan, make_batch
from tests.engine.engines import minipaged_threads, tiny_engine
from tests.engine.neighbours import TOGETHER, Recorder, check_company, random_jobs
from tests.engine.test_engine_random import SETTINGS, one_request
from tests.ops.cuda.fake_cupy import Function
from tests.ops.cuda.fake_gpu import CudaError, Gpu, Timing
from tests.ops.cuda.machine import assert_nothing_left, use_fake_gpu
from tests.tiny import write_tiny_model

TOLERANCE = 0.05
"""Of logits up to 9: activations are rounded to float16."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("cuda") / "tiny",
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        dtype="float16",
    )


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with use_fake_gpu(Gpu(memory_bytes=48 << 20)) as gpu:
        yield gpu


def reference_logits(model: Path, token_ids: list[int]) -> NDArray[np.float32]:
    """At every position."""
    ops, source = ReferenceOps(), open_model(model)
    config, length = source.config, len(token_ids)
    llama = load_llama(source.checkpoint, config, ops, length)
    cache = ops.allocate_cache(config.kv_layout(length, "float32"), 1)
    batch = make_batch(ops, [TokenSpan(0, 0, token_ids)], np.zeros((1, 1), np.int32), length, range(length))
    return ops.download(llama.logits(llama.forward(batch, cache), batch))


@pytest.mark.usefixtures("gpu")
def test_logits_are_the_same_bits_alone_and_in_any_company(model: Path) -> None:
    """With prefix hits, chunks, preemption by swap and by recomputing, graphs and none; and near the reference."""
    recorder = Recorder()
    jobs = random_jobs(recorder, seed=1, count=14)
    common = EngineConfig(device="cuda", debug=True, max_model_len=160, num_blocks=120)
    companies = dict(TOGETHER)
    companies["small chunks"] = {**TOGETHER["small chunks"], "cuda_graphs": False}
    anyio.run(check_company, model, common, jobs, recorder, companies)

    whole = [
        history for history in recorder.logits if not any(is_beginning(history, other) for other in recorder.logits)
    ]
    compared = 0
    for history in whole:
        expected = reference_logits(model, list(history))
        for length in range(1, len(history) + 1):
            if history[:length] in recorder.logits:
                logits = np.frombuffer(recorder.logits[history[:length]], np.float32)
                np.testing.assert_allclose(logits, expected[length - 1], rtol=0, atol=TOLERANCE)
                compared += 1
    assert compared >= len(recorder.logits)


@pytest.mark.parametrize("timing", [Timing.EARLY_COPIES, Timing.SHUFFLED])
def test_blocks_are_swapped_in_time_whatever_the_streams_do(model: Path, timing: Timing) -> None:
    """With nothing but events to keep the copies of blocks and the kernels in order."""
    recorder = Recorder()
    jobs = random_jobs(recorder, seed=1, count=7)
    common = EngineConfig(device="cuda", debug=True, max_model_len=160, num_blocks=120)
    with use_fake_gpu(Gpu(memory_bytes=48 << 20, timing=timing)):
        company: dict[str, EngineSettings] = {"swap": {**TOGETHER["swap"], "overlap": True, "num_blocks": 12}}
        anyio.run(check_company, model, common, jobs, recorder, company)


def is_beginning(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) < len(other) and other[: len(one)] == one


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("graphs", [True, False])
def test_what_requests_can_ask_for(model: Path, graphs: bool) -> None:
    """Samples, penalties, biases, log-probabilities of prompt and output, as on the reference."""
    asked = [
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3),
        SamplingParams(temperature=0, max_tokens=5, logit_bias={7: 100.0, 9: -100.0}, prompt_logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=5, n=3, max_tokens=6, min_tokens=6, logprobs=0),
        SamplingParams(temperature=0, max_tokens=3),
    ]
    prompts = [[5, 6, 7], [9, 8] * 20, [11, 12], [13] * 16]

    async def answers(device: DeviceName) -> list[Completion]:
        results: dict[int, Completion] = {}

        async def ask(engine: Engine, number: int) -> None:
            stream = engine.generate(prompts[number], asked[number])
            results[number] = await stream.completion()

        async with tiny_engine(model, device=device, cuda_graphs=graphs) as engine, anyio.create_task_group() as group:
            for number in range(len(asked)):
                group.start_soon(ask, engine, number)
        return [results[number] for number in range(len(asked))]

    for ours, expected in zip(anyio.run(answers, "cuda"), anyio.run(answers, "reference"), strict=True):
        assert (ours.prompt_logprobs is None) == (expected.prompt_logprobs is None)
        for sample, wanted in zip(ours.choices, expected.choices, strict=True):
            assert (sample.token_ids, sample.finish_reason) == (wanted.token_ids, wanted.finish_reason)
            np.testing.assert_allclose(sample.logprobs or (), wanted.logprobs or (), rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(values(sample.top_logprobs), values(wanted.top_logprobs), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(
            values(ours.prompt_logprobs), values(expected.prompt_logprobs), rtol=0, atol=TOLERANCE
        )


def values(entries: tuple[tuple[TokenLogprob, ...], ...] | None) -> list[list[float]]:
    return [[entry.logprob for entry in position] for position in entries or ()]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("settings", ["swap", "no overlap, no cache"])
def test_requests_that_end_in_all_ways(model: Path, settings: str) -> None:
    choice = random.Random(3)
    ends: list[str] = []
    on_cuda: EngineSettings = {**SETTINGS[settings], "device": "cuda"}

    async def main() -> None:
        async with tiny_engine(model, **on_cuda) as engine:

            async def client() -> None:
                for _ in range(4):
                    ends.append(await one_request(engine, choice))

            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(client)

    anyio.run(main)
    assert len(ends) == 32
    assert {"finished", "left"} <= set(ends)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0), 1),
        (SamplingParams(temperature=0.7), 1),
        (SamplingParams(temperature=0.7, presence_penalty=0.5, logit_bias={7: 1.0}), 2),
    ],
)
def test_a_step_is_one_copy_to_the_gpu_and_another_for_penalties_and_biases(
    model: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, expected: int
) -> None:
    """And one more where other rows run than in the step before."""
    copies: list[int] = []
    execute = Runner.execute

    def counted(runner: Runner[Array, Weight], plan: StepPlan) -> StepResult:
        before = gpu.num_uploads
        result = execute(runner, plan)
        copies.append(gpu.num_uploads - before)
        return result

    async def main() -> None:
        async with Engine.load(model, device="cuda", num_blocks=20) as engine:
            monkeypatch.setattr(Runner, "execute", counted)
            await engine.generate([5, 6], replace(params, max_tokens=20, ignore_eos=True)).completion()

    anyio.run(main)
    assert copies == [expected + 1] * 2 + [expected] * 18


def test_the_cache_takes_what_the_gpu_has_left(model: Path, gpu: Gpu) -> None:
    async def num_blocks(fraction: float) -> int:
        async with Engine.load(model, device="cuda", memory_fraction=fraction) as engine:
            assert gpu.unpooled_bytes <= fraction * gpu.memory_bytes
            return engine.stats().blocks.total

    small, large = anyio.run(num_blocks, 0.4), anyio.run(num_blocks, 0.5)
    assert large - small == pytest.approx(0.1 * gpu.memory_bytes / (2 * 16 * 64 * 2), abs=2)
    message = r"kv_cache_memory \(by default\) is 0 bytes, less than one KV block.* a larger memory_fraction \(0\.01\)"
    with pytest.raises(ConfigError, match=message):
        anyio.run(num_blocks, 0.01)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("device", "expected"), [("cuda", 2048), ("cpu", 512), ("reference", 512)])
def test_a_step_is_as_large_as_suits_the_device(model: Path, device: DeviceName, expected: int) -> None:
    async def main() -> None:
        async with Engine.load(model, device=device, num_blocks=16) as engine:
            assert engine.capacity.max_batched_tokens == expected

    anyio.run(main)


def test_a_gpu_that_is_too_small_is_a_device_error_and_nothing_is_left(model: Path, gpu: Gpu) -> None:
    async def main() -> None:
        with pytest.raises(
            DeviceError, match=r"could not allocate \d+ bytes for 100000 KV blocks.*smaller kv_cache_memory"
        ):
            async with Engine.load(model, device="cuda", num_blocks=100_000):
                pass

    anyio.run(main)
    assert gpu.unpooled_bytes == 0


def test_an_engine_that_nobody_closes_frees_the_gpu_when_it_is_lost(model: Path, gpu: Gpu) -> None:
    async def main() -> None:
        engine = Engine.load(model, device="cuda", num_blocks=20, swap_blocks=4)
        await engine.start()
        await engine.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)).completion()
        assert gpu.unpooled_bytes > 0
        assert gpu.pinned

    anyio.run(main)
    assert_nothing_left(gpu)  # a thread may be in a step that had been queued already
    while minipaged_threads():
        time.sleep(0.001)


def test_a_gpu_that_fails_is_the_end_of_the_engine(model: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CudaError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    async def main() -> None:
        async with Engine.load(model, device="cuda", num_blocks=20) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(Function, "__call__", fail)
                with pytest.raises(EngineDeadError) as caught:
                    await engine.generate([5, 6], SamplingParams(max_tokens=3)).completion()
            assert isinstance(caught.value.__cause__, DeviceError)

    anyio.run(main)
    assert gpu.unpooled_bytes == 0


@pytest.mark.usefixtures("gpu")
def test_a_model_that_the_kernels_do_not_take_runs_on_the_cpu(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its head_dim is 16. That is an error only if the GPU was asked for."""

    async def load(device: DeviceName) -> None:
        async with Engine.load(tiny_model, device=device, num_blocks=16) as engine:
            await engine.generate([5, 6], SamplingParams(max_tokens=3)).completion()

    anyio.run(load, "auto")
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.message.startswith("Running on the CPU, not on the GPU. The model's head_dim is 16")
    with pytest.raises(ConfigError, match=r'head_dim is 16; the CUDA kernels take .* device="cpu" works'):
        anyio.run(load, "cuda")
