"""What a caller submits: checked at once where that needs no tokenizer, and made into a Request."""

from __future__ import annotations

import operator
import secrets
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import SupportsIndex, cast

from minipaged.errors import InvalidRequestError
from minipaged.params import SamplingParams
from minipaged.scheduling.request import Request

Prompt = str | Sequence[int]
"""A text, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request whose prompt is not known yet: the keywords of `generate`.

    Raises `InvalidRequestError` for one out of its range.
    """

    params: SamplingParams
    id: str
    priority: int
    deadline: float | None
    """Seconds from `submitted_at`."""
    cache_salt: str | None
    arrival: int
    """Counts the requests of this engine."""
    submitted_at: float
    """Seconds on the engine's clock."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise InvalidRequestError(f"request_id is {self.id!r}; expected a non-empty string.")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidRequestError(f"priority is {self.priority!r}; expected an integer, lower for sooner.")
        deadline = self.deadline
        is_number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
        if deadline is not None and not (is_number and 0 < deadline <= sys.float_info.max):
            raise InvalidRequestError(f"deadline is {deadline!r}; expected a finite number of seconds > 0.")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise InvalidRequestError(f"cache_salt is {self.cache_salt!r}; expected a string.")

    @property
    def expires_at(self) -> float | None:
        """When the deadline is, in seconds on the engine's clock."""
        return None if self.deadline is None else self.submitted_at + self.deadline

    def request(self, prompt: array[int], *, eos_token_ids: Sequence[int], max_model_len: int) -> Request:
        """The request as the scheduler sees it, with its prompt's token ids."""
        params = self.params
        max_length = max_model_len
        if params.max_tokens is not None:
            max_length = min(max_length, len(prompt) + params.max_tokens)
        return Request(
            id=self.id,
            prompt=prompt,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            arrival=self.arrival,
            stop_token_ids=frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids),
            max_length=max_length,
            priority=self.priority,
            namespace=self.cache_salt or "",
        )


def check_text(prompt: str) -> None:
    """Raise `InvalidRequestError` for a text without characters."""
    if not prompt:
        raise InvalidRequestError("The prompt is an empty string; expected at least one character.")


def check_prompt_ids(prompt: Sequence[int], vocab_size: int) -> array[int]:
    """The token ids as an array. Raises `InvalidRequestError` for anything else than ids in [0, vocab_size)."""
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping) or not hasattr(prompt, "__getitem__"):
        raise InvalidRequestError(
            f"The prompt is a {type(prompt).__name__}; expected a string or a sequence of token ids."
        )
    if len(prompt) == 0:
        raise InvalidRequestError("The prompt has no tokens; expected at least one.")
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= vocab_size:
        for position, token_id in enumerate(prompt):
            check_token_id(token_id, vocab_size, f"Token {position} of the prompt")
    return array("i", prompt)


def check_token_id(token_id: object, vocab_size: int, where: str) -> None:
    """Raise `InvalidRequestError` unless it is an integer in [0, vocab_size); a bool is none."""
    with suppress(TypeError):
        if not isinstance(token_id, bool) and 0 <= operator.index(cast(SupportsIndex, token_id)) < vocab_size:
            return
    raise InvalidRequestError(
        f"{where} is {token_id!r}; expected a token id, an integer in [0, {vocab_size}) for this model."
    )


def check_params(params: SamplingParams, *, vocab_size: int, max_running: int) -> None:
    """Raise `InvalidRequestError` for parameters that this engine and its model cannot serve."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params is a {type(params).__name__}; expected SamplingParams.")
    for token_id in params.stop_token_ids:
        check_token_id(token_id, vocab_size, "An entry of SamplingParams.stop_token_ids")
    for token_id in params.logit_bias:
        check_token_id(token_id, vocab_size, "A key of SamplingParams.logit_bias")
    for name in ("logprobs", "prompt_logprobs"):
        count: int | None = getattr(params, name)
        if count is not None and count > vocab_size:
            raise InvalidRequestError(f"SamplingParams.{name} is {count}; the model has {vocab_size} tokens.")
    if params.n > max_running:
        raise InvalidRequestError(
            f"SamplingParams.n is {params.n} but the engine runs at most {max_running} sequences at once; "
            "lower n or raise max_running."
        )
