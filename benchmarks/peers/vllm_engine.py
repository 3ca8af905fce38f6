"""vLLM, through its engine's step loop.

It reads no GGUF, so the file is first de-quantised into a folder that it does read; load_s includes that.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import vllm
from transformers import AutoModelForCausalLM, GgufConfig

from benchmarks.peers.engine import Answer, Settings


class VllmEngine:
    """See `PeerEngine`."""

    def __init__(self, model: Path, settings: Settings) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
        limits = (
            {}
            if settings.prompt_tokens_per_step is None
            else {"max_num_batched_tokens": max(settings.prompt_tokens_per_step, settings.max_length)}
        )
        with tempfile.TemporaryDirectory() as folder:
            dense = AutoModelForCausalLM.from_pretrained(
                str(model.parent), gguf_file=model.name, quantization_config=GgufConfig(dequantize=True)
            )
            dense.save_pretrained(folder)
            self._engine = vllm.LLM(
                folder,
                skip_tokenizer_init=True,
                max_num_seqs=settings.max_requests,
                max_model_len=settings.max_length,
                enable_prefix_caching=settings.prefix_caching,
                **limits,
            ).llm_engine
        self._ids = itertools.count()

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        answers: dict[str, Answer] = {}
        for prompt in prompts:
            request_id = str(next(self._ids))
            answers[request_id] = Answer([], [])
            self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                answer, token_ids = answers[output.request_id], output.outputs[0].token_ids
                answer.arrivals.extend([time.monotonic()] * (len(token_ids) - len(answer.token_ids)))
                answer.token_ids[:] = token_ids
        return list(answers.values())
