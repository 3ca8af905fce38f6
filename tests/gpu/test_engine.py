"""The whole engine on a GPU: the same bits whatever shares the batch, close to the reference, nothing left behind."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from minipaged import Completion, Engine, EngineConfig, ModelLoadError, SamplingParams
from minipaged.models.hub import default_model_path
from minipaged.output import Choice
from tests.engines import check_nothing_in_use
from tests.test_smollm2 import assert_clear_choices
from tests.tiny import write_tiny_model

CONFIG = EngineConfig(device="cuda", num_blocks=128, max_running=8, max_batched_tokens=64, debug=True)
PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=5, logprobs=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of a size that the kernels take."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny_model(path, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


def prompts(count: int) -> list[list[int]]:
    """Of many lengths, some of which begin alike."""
    generator = np.random.default_rng(1)
    common: list[int] = generator.integers(4, 384, 40).tolist()
    return [common[: 40 * (index % 2)] + generator.integers(4, 384, 1 + 17 * index).tolist() for index in range(count)]


async def answers(engine: Engine, asked: Sequence[list[int]], params: SamplingParams = PARAMS) -> list[Completion]:
    """All at once."""
    streams = [engine.generate(prompt, params) for prompt in asked]
    return [await stream.completion() for stream in streams]


ALONE = replace(CONFIG, max_running=1, prefix_caching=False, overlap=False, cuda_graphs=False)
OTHERS = {
    "together": CONFIG,
    "without graphs": replace(CONFIG, cuda_graphs=False),
    "in small chunks": replace(CONFIG, max_batched_tokens=8),
    "swapped": replace(CONFIG, num_blocks=24, swap_blocks=64, preemption="swap"),
    "recomputed": replace(CONFIG, num_blocks=24, preemption="recompute"),
}


def run_engine(model: Path, config: EngineConfig, asked: Sequence[list[int]]) -> tuple[list[tuple[Choice, ...]], int]:
    """Token ids with their log-probabilities, and how many sequences were preempted."""

    async def main() -> tuple[list[tuple[Choice, ...]], int]:
        async with Engine.load(model, config=config) as engine:
            assert engine.device == "cuda"
            completions = await answers(engine, asked)
            stats = engine.stats()
            check_nothing_in_use(engine)
        preemptions = stats.preemptions_by_swap + stats.preemptions_by_recompute
        return [completion.choices for completion in completions], preemptions

    return anyio.run(main)


@pytest.fixture(scope="module")
def alone(model: Path) -> list[tuple[Choice, ...]]:
    return run_engine(model, ALONE, prompts(6))[0]


@pytest.mark.parametrize("name", OTHERS)
def test_a_request_has_the_same_bits_in_any_company(model: Path, alone: list[tuple[Choice, ...]], name: str) -> None:
    found, preemptions = run_engine(model, OTHERS[name], prompts(6))
    assert found == alone
    assert (preemptions > 0) == (OTHERS[name].num_blocks == 24)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_log_probabilities_are_close_to_the_reference(model: Path, dtype: str) -> None:
    async def main() -> None:
        prompt = prompts(6)[-1]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        found: list[list[float]] = []
        for device in ("cuda", "reference"):
            config = replace(CONFIG, device=device, dtype=dtype if device == "cuda" else "auto")  # type: ignore[arg-type]
            async with Engine.load(model, config=config) as engine:
                completion = await engine.generate(prompt, params).completion()
            assert completion.prompt_logprobs is not None
            found.append([position[0].logprob for position in completion.prompt_logprobs])
        np.testing.assert_allclose(found[0], found[1], rtol=0, atol=0.03 if dtype == "float16" else 0.25)

    anyio.run(main)


def test_smollm2_chooses_as_transformers_wherever_the_choice_is_clear() -> None:
    try:
        default_model_path()
    except ModelLoadError as error:
        pytest.skip(str(error))
    anyio.run(assert_clear_choices, "cuda", 0.2)


def test_closing_an_engine_frees_the_memory_of_the_gpu(model: Path) -> None:
    import cupy

    def free() -> int:
        gc.collect()
        free_bytes: int = cupy.cuda.Device().mem_info[0]
        return free_bytes

    run_engine(model, CONFIG, prompts(2))  # CUDA keeps the code of kernels, and what it needs for itself
    before = free()
    for _ in range(3):
        run_engine(model, replace(CONFIG, num_blocks=4096), prompts(2))
    assert free() >= before
    pool = cupy.get_default_memory_pool()
    assert (pool.used_bytes(), pool.total_bytes()) == (0, 0)
