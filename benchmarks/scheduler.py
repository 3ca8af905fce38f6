"""Host overhead of one decode step: plan, array preparation and commit, in microseconds; and of admitting a request.

No model runs: the "sampled" tokens are made up. Median over many steps, in steady state (new blocks every 16 steps, no
arrivals). Run: python -m benchmarks.scheduler. The last line is one JSON object:

step_us_64, step_us_256          64 and 256 running sequences with prompts of 1,000 tokens, block size 16
step_us_256_ctx4000              256 with prompts of 4,000 tokens
plan_us_256, prepare_us_256, commit_us_256   the parts of step_us_256
admit_us_1000                    submit and plan of one request of 1,000 tokens, nothing cached
admit_us_1000_cached             the same with 62 of its 63 blocks in the prefix cache
"""

from __future__ import annotations

import json
import random
import statistics
import time
from array import array

import numpy as np

from minipaged.config import EngineConfig
from minipaged.execution.runner import Runner
from minipaged.kv.layout import KVLayout
from minipaged.ops.base import Batch, KVPool
from minipaged.ops.reference.ops import ReferenceOps
from minipaged.params import SamplingParams
from minipaged.scheduling.request import Request
from minipaged.scheduling.scheduler import Scheduler
from minipaged.step import SequenceResult, StepPlan, StepResult

VOCAB_SIZE = 50_000
STEPS = 200


class NoModel:
    """Never called: only the preparation of its input is timed."""

    def forward(self, batch: Batch[np.ndarray], cache: KVPool[np.ndarray]) -> np.ndarray:
        raise NotImplementedError

    def logits(self, hidden: np.ndarray, batch: Batch[np.ndarray]) -> np.ndarray:
        raise NotImplementedError


def make_request(number: int, length: int, rng: random.Random) -> Request:
    return Request(
        id=str(number),
        prompt=array("i", (rng.randrange(VOCAB_SIZE) for _ in range(length))),
        params=SamplingParams(temperature=0),
        seed=0,
        arrival=number,
        stop_token_ids=frozenset({VOCAB_SIZE}),
        max_length=length + 4 * STEPS,
    )


class Host:
    """A scheduler and a runner that only prepares."""

    def __init__(self, running: int, length: int) -> None:
        self.config = EngineConfig(max_running=running)
        max_model_len = length + 4 * STEPS
        num_blocks = (running + 2) * -(-max_model_len // self.config.block_size)
        self.scheduler = Scheduler(
            self.config, num_blocks=num_blocks, swap_blocks=0, block_bytes=1, max_batched_tokens=max(2048, running)
        )
        self.runner = Runner(
            ReferenceOps(),
            NoModel(),
            KVPool(KVLayout(0, self.config.block_size, ()), 0, np.zeros(0)),
            np.zeros((0, 0), np.uint8),
            self.config,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
        )
        self.parts: list[tuple[float, float, float]] = []
        self.is_prefilling = True

    def step(self) -> None:
        started = time.perf_counter()
        plan = self.scheduler.plan(started)
        assert plan is not None
        planned = time.perf_counter()
        self.is_prefilling = bool(plan.chunks)
        arrays = self.runner.prepare(plan)
        self.runner.upload(arrays)
        prepared = time.perf_counter()
        result = StepResult(plan.id, results(plan))
        committing = time.perf_counter()
        self.scheduler.commit(result)
        self.parts.append((planned - started, prepared - planned, time.perf_counter() - committing))


def results(plan: StepPlan) -> list[SequenceResult]:
    """Token 1 wherever one is chosen."""
    chosen = [(row, True) for row in plan.decode_rows] + [(chunk.row, chunk.samples) for chunk in plan.chunks]
    return [SequenceResult(row, (1,) if samples else ()) for row, samples in chosen]


def decode_step(running: int, length: int) -> tuple[float, float, float, float]:
    """Microseconds of a decode step: in all, to plan, to prepare, to commit."""
    host, rng = Host(running, length), random.Random(0)
    for number in range(running):
        host.scheduler.submit(make_request(number, length, rng))
    while host.scheduler.num_running < running or host.is_prefilling:
        host.step()
    host.parts.clear()
    for _ in range(STEPS):
        host.step()
    total = statistics.median(sum(parts) for parts in host.parts)
    plan, prepare, commit = (statistics.median(part) for part in zip(*host.parts, strict=True))
    return total * 1e6, plan * 1e6, prepare * 1e6, commit * 1e6


def admission(length: int, *, cached: bool) -> float:
    """Microseconds to submit and plan one request."""
    host, rng, times = Host(4, length), random.Random(1), []
    request = make_request(0, length, rng)
    for number in range(100):
        prompt = request.prompt
        request = make_request(number, length, rng)
        if cached and number:
            request.prompt = prompt
        started = time.perf_counter()
        host.scheduler.submit(request)
        plan = host.scheduler.plan(started)
        times.append(time.perf_counter() - started)
        assert plan is not None
        assert plan.admissions
        host.scheduler.commit(StepResult(plan.id, results(plan)))
        host.scheduler.abort(request)
        assert request.cached_tokens == (length - 1) // 16 * 16 * (cached and number > 0)
    return statistics.median(times) * 1e6


def main() -> None:
    total_64, *_ = decode_step(64, 1000)
    total_256, plan, prepare, commit = decode_step(256, 1000)
    total_4000, *_ = decode_step(256, 4000)
    figures = {
        "step_us_64": total_64,
        "step_us_256": total_256,
        "step_us_256_ctx4000": total_4000,
        "plan_us_256": plan,
        "prepare_us_256": prepare,
        "commit_us_256": commit,
        "admit_us_1000": admission(1000, cached=False),
        "admit_us_1000_cached": admission(1000, cached=True),
    }
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
