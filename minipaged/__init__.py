"""minipaged: the language-model inference engine that a Python program imports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minipaged.blocking.llm import LLM
    from minipaged.config import EngineConfig
    from minipaged.engine.capacity import Capacity
    from minipaged.engine.engine import Engine
    from minipaged.engine.token_stream import TokenStream
    from minipaged.errors import (
        ConfigError,
        DeviceError,
        EngineBusyError,
        EngineDeadError,
        InvalidRequestError,
        MinipagedError,
        ModelLoadError,
        PromptTooLongError,
        RequestAbortedError,
        RequestError,
        RequestFailedError,
        RequestTimeoutError,
    )
    from minipaged.models.config import ModelConfig
    from minipaged.output import Choice, Completion, FinishReason, Timings, Token, TokenLogprob, Usage
    from minipaged.params import SamplingParams
    from minipaged.stats import BlockCounts, EngineStats
    from minipaged.text.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BlockCounts",
    "Capacity",
    "Choice",
    "Completion",
    "ConfigError",
    "DeviceError",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FinishReason",
    "InvalidRequestError",
    "MinipagedError",
    "ModelConfig",
    "ModelLoadError",
    "PromptTooLongError",
    "RequestAbortedError",
    "RequestError",
    "RequestFailedError",
    "RequestTimeoutError",
    "SamplingParams",
    "Timings",
    "Token",
    "TokenLogprob",
    "TokenStream",
    "Tokenizer",
    "Usage",
]

_MODULES = {
    "blocking.llm": ["LLM"],
    "config": ["EngineConfig"],
    "engine.capacity": ["Capacity"],
    "engine.engine": ["Engine"],
    "engine.token_stream": ["TokenStream"],
    "errors": [name for name in __all__ if name.endswith("Error")],
    "models.config": ["ModelConfig"],
    "output": ["Choice", "Completion", "FinishReason", "Timings", "Token", "TokenLogprob", "Usage"],
    "params": ["SamplingParams"],
    "stats": ["BlockCounts", "EngineStats"],
    "text.tokenizer": ["Tokenizer"],
}
_MODULE_OF = {name: f"minipaged.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import minipaged` takes no time."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'minipaged' has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
