"""Invariant 5 on the CPU backend: the logits of a request are the same to the last bit, whatever runs beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from minipaged import EngineConfig
from minipaged.config import KVDtype
from tests.engine.neighbours import TOGETHER, Recorder, check_company, random_jobs
from tests.tiny import write_tiny_model
from tests.tiny_gguf import write_tiny_gguf

KV_DTYPES: dict[str, KVDtype] = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q4_1": "bfloat16",
    "Q8_0": "float16",
}
"""Of the KV cache, by the encoding of the weights."""


def make_model(folder: Path, encoding: str) -> Path:
    floats = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if encoding in floats:
        return write_tiny_model(folder / "tiny", dtype=floats[encoding])
    return write_tiny_gguf(folder / "tiny.gguf", quantization=encoding)


@pytest.mark.parametrize("encoding", KV_DTYPES)
def test_logits_are_the_same_bits_alone_and_in_any_company(tmp_path: Path, encoding: str) -> None:
    model = make_model(tmp_path, encoding)
    recorder = Recorder()
    jobs = random_jobs(recorder, seed=list(KV_DTYPES).index(encoding))
    common = EngineConfig(device="cpu", debug=True, max_model_len=160, num_blocks=200, kv_dtype=KV_DTYPES[encoding])
    anyio.run(check_company, model, common, jobs, recorder, TOGETHER)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_small_stacks_of_the_program_are_its_own_threads_only(tmp_path: Path, kv_dtype: str) -> None:
    """In a process of its own, which an overflow of the stack would end."""
    model = write_tiny_model(tmp_path / "tiny")
    program = f"""
import threading
threading.stack_size(128 << 10)
from minipaged import LLM, SamplingParams
with LLM({str(model)!r}, device="cpu", kv_dtype={kv_dtype!r}, max_model_len=64, num_blocks=8) as llm:
    llm.generate(["one", "two"], SamplingParams(max_tokens=2, top_p=0.5))
assert threading.stack_size() == 128 << 10
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
