"""What a request gives back: Token by token, and the Completion at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""stop: end-of-sequence, a stop token id or stop string. length: max_tokens or max_model_len. abort: by the caller."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability under the raw logits."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token, as it arrives.

    `text` is what may be shown now: it never ends inside a character nor holds the beginning of a stop string, so it
    can be empty, or longer than the token itself. The texts of one sample, joined, are its completion's text.
    """

    text: str
    id: int
    index: int = 0
    """Which of the request's n samples it belongs to."""
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] | None = None
    """The most likely tokens at this position, most likely first."""
    finish_reason: FinishReason | None = None
    """Set on the last token of its sample."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished sample."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, where one did."""
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that the request took."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    completion_tokens: int
    """Over all samples."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of wall-clock time."""

    queued: float
    """Time from submit until first scheduled."""
    prefill: float
    """Time from first scheduled until the first token."""
    time_to_first_token: float
    """Time from submit until the first token."""
    decode: float
    """Time from the first token until the last."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `text`, `token_ids` and `finish_reason` are those of its first sample."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    """For each prompt token after the first: itself, then the most likely ones."""

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sample."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first sample ended."""
        return self.choices[0].finish_reason
