"""`minipaged generate`: one prompt, one answer."""

from __future__ import annotations

from functools import partial

from minipaged.cli.answer import Answer
from minipaged.cli.session import open_session
from minipaged.config import EngineConfig
from minipaged.errors import InvalidRequestError
from minipaged.params import SamplingParams


def run(
    prompt: str, *, model: str | None, config: EngineConfig, params: SamplingParams, system: str | None, raw: bool
) -> None:
    """Answer through the model's chat template; continue the prompt as it is if there is none, or if `raw`."""
    with open_session(model, config) as session:
        engine = session.engine
        if raw or not engine.tokenizer.chat_templates:
            if system is not None:
                raise InvalidRequestError("This model has no chat template, so it cannot take a system prompt.")
            start = partial(engine.generate, prompt, params)
        else:
            messages = [] if system is None else [{"role": "system", "content": system}]
            start = partial(engine.chat, [*messages, {"role": "user", "content": prompt}], params)
        with session.stream(start) as tokens:
            Answer().write(tokens)
