"""minipaged, through its asynchronous engine: one task per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.engine import Answer, Settings
from minipaged import Engine, SamplingParams


class MinipagedEngine:
    """See `PeerEngine`."""

    def __init__(self, model: Path, settings: Settings) -> None:
        per_step = settings.prompt_tokens_per_step
        self._loop = asyncio.Runner()
        self._engine = Engine.load(
            model,
            max_running=settings.max_requests,
            max_batched_tokens=None if per_step is None else max(per_step, settings.max_requests),
            max_model_len=settings.max_length,
            prefix_caching=settings.prefix_caching,
            num_threads=settings.threads,
        )
        self._loop.run(self._engine.start())

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
        return self._loop.run(self._answer_all(prompts, new_tokens))

    async def _answer_all(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return await asyncio.gather(*(self._answer(prompt, params) for prompt in prompts))

    async def _answer(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        answer = Answer([], [])
        async for token in self._engine.generate(prompt, params):
            answer.token_ids.append(token.id)
            answer.arrivals.append(time.monotonic())
        return answer
