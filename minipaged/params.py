"""SamplingParams: how the tokens of one request are chosen and when it stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minipaged.errors import InvalidRequestError

MAX_LOGPROBS = 64
MAX_SAMPLES = 128

LogitsCallback = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]
"""Receives the token ids so far (prompt and output) and the float32 logits [vocab_size]; returns the logits to use.

It runs on the worker thread, after penalties and bias and before temperature. What it raises fails its request alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Immutable sampling settings, validated when constructed; token ids are validated again at submit.

    Raises `InvalidRequestError` for a value out of range.
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
    """Tokens to generate before end-of-sequence or a stop token id may be chosen."""
    stop: str | Sequence[str] = ()
    """Strings that end the text; they are not part of it."""
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
    """Likewise for every prompt token after the first; the prefix cache is then not read for this request."""
    n: int = 1
    """Samples drawn in parallel from one prompt; they share the prompt's KV blocks."""
    logits_callback: LogitsCallback | None = None
    """A function over each step's logits, see `LogitsCallback`."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        check = _check
        check("temperature", self.temperature, 0 <= self.temperature < math.inf, "a finite number >= 0")
        check("top_k", self.top_k, self.top_k >= -1, "an integer >= -1")
        check("top_p", self.top_p, 0 < self.top_p <= 1, "a number in (0, 1]")
        check("min_p", self.min_p, 0 <= self.min_p <= 1, "a number in [0, 1]")
        check("seed", self.seed, self.seed is None or 0 <= self.seed < 2**64, "None or an integer in [0, 2**64)")
        check(
            "max_tokens",
            self.max_tokens,
            self.max_tokens is None or self.max_tokens >= 1,
            "None or an integer >= 1",
        )
        check("min_tokens", self.min_tokens, self.min_tokens >= 0, "an integer >= 0")
        if self.max_tokens is not None:
            check(
                "min_tokens",
                self.min_tokens,
                self.min_tokens <= self.max_tokens,
                f"at most max_tokens ({self.max_tokens})",
            )
        check("stop", self.stop, all(isinstance(s, str) and s for s in stop), "non-empty strings")
        penalty = self.repetition_penalty
        check("repetition_penalty", penalty, 0 < penalty < math.inf, "a finite number > 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value: float = getattr(self, name)
            check(name, value, -2 <= value <= 2, "a number in [-2, 2]")
        for token_id, bias in self.logit_bias.items():
            check("logit_bias", f"{token_id}: {bias}", bias < math.inf, "numbers, not NaN and not +inf")
        for name in ("logprobs", "prompt_logprobs"):
            count: int | None = getattr(self, name)
            check(
                name,
                count,
                count is None or 0 <= count <= MAX_LOGPROBS,
                f"None or an integer in [0, {MAX_LOGPROBS}]",
            )
        check("n", self.n, 1 <= self.n <= MAX_SAMPLES, f"an integer in [1, {MAX_SAMPLES}]")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check(name: str, found: object, ok: bool, expected: str) -> None:
    if not ok:
        raise InvalidRequestError(f"SamplingParams.{name} is {found!r}; expected {expected}.")
