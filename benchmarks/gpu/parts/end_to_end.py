"""A whole engine on a model with random weights: decoding and the first token, against transformers and the memory.

Decoding, in tokens per second: what B requests of so many new tokens take, less what they take with one new token. The
memory's limit: every step reads all weights and all KV once, at the speed of a copy.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import numpy as np

from benchmarks.gpu.clock import copy_bandwidth
from benchmarks.gpu.device import RandomOps
from benchmarks.gpu.measured_sizes import Sizes
from benchmarks.gpu.random_model import write_random_model
from benchmarks.gpu.rows import Row
from benchmarks.gpu.transformers_peer import ABSENT, TransformersPeer, has_transformers
from minipaged import Engine, EngineConfig, SamplingParams
from minipaged.engine.loading import LoadedModel, load_onto
from minipaged.models.config import ModelConfig
from minipaged.models.llama_tensors import expected_shapes
from minipaged.progress import Progress

LIMIT_BAR, PEER_BAR, PEER_BAR_BATCH = 0.75, 5.0, 64
WARM_UP_TOKENS = 4
"""A decode's graph is captured the second time that its size occurs."""
Prompts = list[list[int]]


@dataclass(slots=True)
class Times:
    """Of one engine."""

    decode: dict[int, float] = field(default_factory=dict)
    """Tokens per second by batch."""
    first_token: float = math.nan
    """Seconds."""


def run(sizes: Sizes) -> Iterator[Row]:
    bandwidth = copy_bandwidth(sizes.effort, sizes.copy_bytes)
    ours = anyio.run(_measure_engine, sizes)
    peer, absent = Times(), ABSENT
    if has_transformers():
        try:
            peer, absent = _measure_transformers(sizes), ""
        except Exception as error:  # what was measured of minipaged is worth having
            absent = f"transformers failed: {type(error).__name__}: {error}"
    for batch, speed in ours.decode.items():
        limit = batch * bandwidth / _bytes_per_step(sizes, batch)
        bar = LIMIT_BAR if batch == 1 else None
        yield Row(f"decode, batch {batch}", speed, "tokens/s", "memory's limit", limit, bar)
        bar = PEER_BAR if batch == PEER_BAR_BATCH else None
        yield Row(f"decode, batch {batch}", speed, "tokens/s", "transformers", peer.decode.get(batch), bar, note=absent)
    what = f"prompts of {sizes.long_prompt_tokens:,} tokens until the first token"
    other = None if absent else 1 / peer.first_token
    yield Row(what, 1 / ours.first_token, "prompts/s", "transformers", other, note=absent)


def _bytes_per_step(sizes: Sizes, batch: int) -> float:
    model = sizes.model
    weights = 2 * sum(math.prod(shape) for shape in expected_shapes(model).values())
    weights -= 2 * model.vocab_size * model.hidden_size  # of the embedding table a few rows are read
    context = sizes.prompt_tokens + sizes.new_tokens / 2
    return weights + batch * context * model.num_layers * 2 * model.num_kv_heads * model.head_dim * 2


def _prompts(model: ModelConfig, batch: int, length: int) -> Prompts:
    prompts: Prompts = np.random.default_rng(batch).integers(1, model.vocab_size, (batch, length)).tolist()
    return prompts


async def _measure_engine(sizes: Sizes) -> Times:
    config = EngineConfig(
        device="cuda",
        max_running=max(sizes.batches),
        max_batched_tokens=max(sizes.long_prompt_tokens, *sizes.batches),
        max_model_len=max(sizes.long_prompt_tokens, sizes.prompt_tokens) + sizes.new_tokens,
        prefix_caching=False,
    )
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_model(Path(folder) / "model", sizes.model)

        def load(config: EngineConfig, progress: Progress) -> LoadedModel:
            ops = RandomOps()
            try:
                return load_onto(ops, path, config, progress)
            except BaseException:
                ops.close()
                raise

        async with Engine(config, load) as engine:
            for batch in sizes.batches:
                prompts = _prompts(sizes.model, batch, sizes.prompt_tokens)
                await _generate(engine, prompts, WARM_UP_TOKENS)
                decoding = await _generate(engine, prompts, sizes.new_tokens) - await _generate(engine, prompts, 1)
                times.decode[batch] = batch * (sizes.new_tokens - 1) / max(decoding, 1e-9)
            long_prompt = _prompts(sizes.model, 1, sizes.long_prompt_tokens)
            repeated = [await _generate(engine, long_prompt, 1) for _ in range(sizes.effort.repeats + 1)]
            times.first_token = float(np.median(repeated[1:]))
    return times


async def _generate(engine: Engine, prompts: Prompts, new_tokens: int) -> float:
    """Seconds for so many tokens of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    started = time.perf_counter()
    streams = [engine.generate(prompt, params) for prompt in prompts]
    for stream in streams:
        await stream.completion()
    return time.perf_counter() - started


def _measure_transformers(sizes: Sizes) -> Times:
    peer = TransformersPeer(sizes.model)
    times = Times()
    for batch in sizes.batches:
        prompts = _prompts(sizes.model, batch, sizes.prompt_tokens)
        peer.generate(prompts, WARM_UP_TOKENS)
        decoding = peer.generate(prompts, sizes.new_tokens) - peer.generate(prompts, 1)
        times.decode[batch] = batch * (sizes.new_tokens - 1) / decoding
    long_prompt = _prompts(sizes.model, 1, sizes.long_prompt_tokens)
    repeated = [peer.generate(long_prompt, 1) for _ in range(sizes.effort.repeats + 1)]
    times.first_token = float(np.median(repeated[1:]))
    return times
