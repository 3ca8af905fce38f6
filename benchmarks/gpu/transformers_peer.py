"""transformers' `generate` on a model of the same sizes, its weights random too. Optional."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence

from benchmarks.gpu.random_model import transformers_config
from minipaged.models.config import ModelConfig

ABSENT = "transformers or torch is not installed"


def has_transformers() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


class TransformersPeer:
    """In bfloat16, with PyTorch's own attention."""

    def __init__(self, model: ModelConfig) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        self._torch = torch
        config = LlamaConfig(**transformers_config(model))
        with torch.device("meta"):
            on_meta = LlamaForCausalLM(config)
        self._model = on_meta.to(torch.bfloat16).to_empty(device="cuda").eval()
        with torch.inference_mode():
            for parameter in self._model.parameters():
                if parameter.dim() > 1:
                    parameter.uniform_(-0.02, 0.02)
                else:
                    parameter.fill_(1.0)
            rotary = self._model.model.rotary_emb
            rotary.inv_freq.copy_(
                model.rope_theta ** (-torch.arange(0, model.head_dim, 2, device="cuda").float() / model.head_dim)
            )

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Seconds for so many tokens of each prompt, all of one length, greedily."""
        torch = self._torch
        ids = torch.tensor(prompts, device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        torch.cuda.synchronize()
        return time.perf_counter() - started
