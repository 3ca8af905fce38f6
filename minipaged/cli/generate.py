"""`minipaged generate`: one prompt, one answer."""

from __future__ import annotations

from contextlib import closing

from minipaged.cli.answer import Answer
from minipaged.cli.loading_bar import load
from minipaged.config import EngineConfig
from minipaged.errors import InvalidRequestError
from minipaged.params import SamplingParams


def run(
    prompt: str, *, model: str | None, config: EngineConfig, params: SamplingParams, system: str | None, raw: bool
) -> None:
    """Answer through the model's chat template; continue the prompt as it is if there is none, or if `raw`."""
    with load(model, config) as llm:
        if raw or not llm.tokenizer.chat_templates:
            if system is not None:
                raise InvalidRequestError("This model has no chat template, so it cannot take a system prompt.")
            tokens = llm.stream(prompt, params)
        else:
            messages = [] if system is None else [{"role": "system", "content": system}]
            tokens = llm.stream_chat([*messages, {"role": "user", "content": prompt}], params)
        with closing(tokens):
            Answer().write(tokens)
