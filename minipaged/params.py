"""SamplingParams: how the tokens of one request are chosen and when it stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from minipaged.errors import InvalidRequestError

MAX_LOGPROBS = 64
MAX_SAMPLES = 128
MAX_STOP_CHARACTERS = 4096

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
"""The largest and the smallest positive number that sampling, in float32, can divide and multiply by."""

LogitsCallback = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]
"""Receives the token ids so far (prompt and output) and the float32 logits [vocab_size]; returns the logits to use.

It runs on the worker thread, after penalties and bias and before temperature. What it raises fails its request alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Immutable sampling settings, validated when constructed; token ids are validated again at submit.

    Raises `InvalidRequestError` for a value of another type or out of range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 means greedy (the most likely token)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0, -1 or anything >= vocab_size means no limit."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach top_p, in (0, 1] (arXiv:1904.09751)."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one, in [0, 1] (arXiv:2407.01082)."""
    seed: int | None = None
    """Makes a request repeat exactly, in [0, 2**64); None draws one from the operating system."""
    max_tokens: int | None = None
    """Most tokens to generate per sample; None means up to `max_model_len`."""
    min_tokens: int = 0
    """Tokens to generate before one that ends the sequence may be chosen, or a stop string is looked for."""
    stop: str | Sequence[str] = ()
    """Strings that end the text, of 4096 characters together; they are not part of it."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the sequence besides the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of every token in prompt or output, > 0 (arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of every token in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence from the logits of every token in the output, in [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of single token ids; -inf forbids a token."""
    logprobs: int | None = None
    """None: no log-probabilities. k: the chosen token's and those of the k most likely tokens, from the raw logits."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for every prompt token after the first; the prefix cache is then not read for this request."""
    n: int = 1
    """Samples drawn in parallel from one prompt; they share the prompt's KV blocks."""
    logits_callback: LogitsCallback | None = None
    """A function over each step's logits, see `LogitsCallback`."""

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, "a finite float32 >= 0", lambda x: 0 <= x <= _LARGEST)
        _integer("top_k", self.top_k, "an integer >= -1", lambda x: x >= -1)
        _number("top_p", self.top_p, "a number in (0, 1]", lambda x: 0 < x <= 1)
        _number("min_p", self.min_p, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        if self.seed is not None:
            _integer("seed", self.seed, "None or an integer in [0, 2**64)", lambda x: 0 <= x < 2**64)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, "None or an integer >= 1", lambda x: x >= 1)
        most = math.inf if self.max_tokens is None else self.max_tokens
        _integer("min_tokens", self.min_tokens, "an integer from 0 to max_tokens", lambda x: 0 <= x <= most)
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "True or False")
        if self.logits_callback is not None and not callable(self.logits_callback):
            _refuse("logits_callback", self.logits_callback, "None or a function of token ids and logits")
        positive = "a finite float32 > 0"
        _number("repetition_penalty", self.repetition_penalty, positive, lambda x: _SMALLEST <= x <= _LARGEST)
        for penalty in ("presence_penalty", "frequency_penalty"):
            _number(penalty, getattr(self, penalty), "a number in [-2, 2]", lambda x: -2 <= x <= 2)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                expected = f"None or an integer in [0, {MAX_LOGPROBS}]"
                _integer(name, getattr(self, name), expected, lambda x: 0 <= x <= MAX_LOGPROBS)
        _integer("n", self.n, f"an integer in [1, {MAX_SAMPLES}]", lambda x: 1 <= x <= MAX_SAMPLES)
        self._freeze_collections()

    def _freeze_collections(self) -> None:
        """Copies that the caller cannot change afterwards."""
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, "a string or strings")
        if not all(isinstance(string, str) and string for string in stop):
            _refuse("stop", self.stop, "a string or strings, none of them empty")
        if sum(len(string) for string in stop if isinstance(string, str)) > MAX_STOP_CHARACTERS:
            _refuse("stop", self.stop, f"at most {MAX_STOP_CHARACTERS} characters altogether")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(
            self, "stop_token_ids", _items("stop_token_ids", self.stop_token_ids, "a sequence of token ids")
        )
        if not isinstance(self.logit_bias, Mapping):
            _refuse("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            expected = "a finite float32, or -inf"
            _number(f"logit_bias[{token_id!r}]", bias, expected, lambda x: abs(x) <= _LARGEST or x == -math.inf)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _number(name: str, found: object, expected: str, is_valid: Callable[[float], bool]) -> None:
    """NaN is refused by every comparison."""
    if isinstance(found, bool) or not isinstance(found, Real) or not is_valid(cast(float, found)):
        _refuse(name, found, expected)


def _integer(name: str, found: object, expected: str, is_valid: Callable[[int], bool]) -> None:
    if isinstance(found, bool) or not isinstance(found, Integral) or not is_valid(int(found)):
        _refuse(name, found, expected)


def _items(name: str, found: Iterable[object], expected: str) -> tuple[object, ...]:
    if isinstance(found, str | bytes | Mapping):
        _refuse(name, found, expected)
    try:
        return tuple(found)
    except TypeError:
        _refuse(name, found, expected)


def _refuse(name: str, found: object, expected: str) -> NoReturn:
    raise InvalidRequestError(f"SamplingParams.{name} is {found!r}; expected {expected}.")
