"""OpenVINO GenAI, through its continuous-batching pipeline, which reads GGUF files itself.

Its numerical defaults are kept: KV in 8 bits, and bfloat16 where the processor computes in it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.engine import Answer, Settings


class OpenVinoEngine:
    """See `PeerEngine`."""

    def __init__(self, model: Path, settings: Settings) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = settings.prefix_caching
        scheduler.max_num_seqs = settings.max_requests
        if settings.prompt_tokens_per_step is not None:
            scheduler.max_num_batched_tokens = settings.prompt_tokens_per_step
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": settings.threads}
        )
        self._ids = itertools.count()

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = new_tokens
        generation.ignore_eos = True
        generation.do_sample = False
        handles = [
            self._pipeline.add_request(next(self._ids), openvino.Tensor(np.array([prompt], np.int64)), generation)
            for prompt in prompts
        ]
        answers = [Answer([], []) for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.monotonic()
            for handle, answer in zip(handles, answers, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        answer.token_ids.extend(output.generated_ids)
                        answer.arrivals.extend([now] * len(output.generated_ids))
        return answers
