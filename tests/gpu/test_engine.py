"""The engine on a real GPU: what tests/ops/cuda/test_engine.py asserts on an emulated one, and a little more."""

from __future__ import annotations

import gc
from pathlib import Path

import anyio
import pytest

from minipaged import Engine, ModelLoadError, SamplingParams
from minipaged.models.files.hub import default_model_path
from tests.ops.cuda.test_engine import (  # noqa: F401 (collected here)
    model,
    test_logits_are_the_same_bits_alone_and_in_any_company,
    test_requests_that_end_in_all_ways,
    test_what_requests_can_ask_for,
)
from tests.test_smollm2 import assert_clear_choices

CLEAR = 0.2
"""By so much the best logit must lead, for float16 not to change the choice."""


def test_smollm2_chooses_as_transformers_wherever_the_choice_is_clear() -> None:
    try:
        default_model_path()
    except ModelLoadError as error:
        pytest.skip(str(error))
    anyio.run(assert_clear_choices, "cuda", CLEAR)


def test_closing_an_engine_frees_the_memory_of_the_gpu(model: Path) -> None:  # noqa: F811 (the fixture above)
    import cupy

    async def use() -> None:
        async with Engine.load(model, device="cuda", num_blocks=4096, swap_blocks=64) as engine:
            assert engine.device == "cuda"
            await engine.generate([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)).completion()

    def free_after_use() -> int:
        anyio.run(use)
        gc.collect()
        free_bytes: int = cupy.cuda.Device().mem_info[0]
        return free_bytes

    first = free_after_use()  # CUDA keeps the code of kernels, and what it needs for itself
    assert all(free_after_use() >= first for _ in range(3))
    pool = cupy.get_default_memory_pool()
    assert (pool.used_bytes(), pool.total_bytes()) == (0, 0)
