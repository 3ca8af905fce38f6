"""Hugging Face transformers on PyTorch: `generate` on a batch, of the de-quantised model.

The model is held in bfloat16 where the processor multiplies matrices in it, otherwise in float32: the faster choice.
Prefix caching is what its documentation recommends: the prefix is computed once, and its cache copied per request.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.peers.engine import Answer, Settings


class TransformersEngine:
    """See `PeerEngine`."""

    def __init__(self, model: Path, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(model.parent),
            gguf_file=model.name,
            quantization_config=transformers.GgufConfig(dequantize=True),
            dtype=torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32,
        )
        self._prefix = torch.empty(0, dtype=torch.long)
        self._prefix_cache = transformers.DynamicCache(config=self._model.config)

    def answer(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Answer]:
        input_ids = torch.tensor(prompts)
        arrivals: list[float] = []

        def note_time(input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            """Called after every token of the batch, to say for each row whether it is to stop."""
            arrivals.append(time.monotonic())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                past_key_values=self._cache_of_prefix(input_ids) if self._settings.prefix_caching else None,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[note_time],
            )
        return [Answer(row, arrivals) for row in output[:, input_ids.shape[1] :].tolist()]

    def _cache_of_prefix(self, input_ids: torch.Tensor) -> transformers.DynamicCache:
        """KV of the tokens [count, length] in which all rows agree, for each row; computed unless it was before."""
        differ = (input_ids != input_ids[0]).any(dim=0).nonzero()
        prefix = input_ids[0, : int(differ[0]) if len(differ) else -1]
        if not torch.equal(prefix, self._prefix):
            self._prefix, self._prefix_cache = prefix, transformers.DynamicCache(config=self._model.config)
            self._model(prefix[None], past_key_values=self._prefix_cache, logits_to_keep=1)
        cache = copy.deepcopy(self._prefix_cache)
        cache.batch_repeat_interleave(len(input_ids))
        return cache
