"""Request and Sequence: what the engine and the scheduler know of the work that was asked for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from minipaged.kv.table import BlockTable
from minipaged.output import FinishReason, TokenLogprob
from minipaged.params import SamplingParams
from minipaged.step import Logprobs


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()
    """In the waiting queue, new or preempted, or about to fork from another sequence of its request."""
    RUNNING = auto()
    """Has a row and blocks."""
    FINISHED = auto()


class Recipient(Protocol):
    """Whom a request's tokens are for: the engine's `Generation`."""

    @property
    def ended(self) -> bool:
        """Whether it wants no more."""

    def add_text(self, index: int, token_id: int) -> str | None:
        """Continue the text of a sample by a token, before the token is delivered.

        Returns the stop string that is complete now and so ends the sample, if one is. What this raises fails the
        request alone.
        """

    def deliver(self, sequence: Sequence, num_tokens: int, logprobs: SequenceOf[Logprobs], now: float) -> None:
        """Hand out the latest tokens of a sequence, and the completion if all sequences of the request have ended."""

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what was asked of it. Read-only for the scheduler, down to `sequences`."""

    id: str
    prompt: array[int]
    """Token ids, typecode 'i', not empty, each in [0, vocab_size)."""
    params: SamplingParams
    seed: int
    """`params.seed`, or one drawn at submit."""
    arrival: int
    """Counts submitted requests of this engine; earlier is served first among equals."""
    stop_token_ids: frozenset[int]
    """Ids that end a sequence: end-of-sequence ids unless ignored, and `params.stop_token_ids`."""
    max_length: int
    """Tokens, prompt included, at which a sequence ends with reason "length"."""
    priority: int = 0
    """Lower is served first and preempted last."""
    namespace: str = ""
    """Prefix-cache entries are shared only within one namespace (cache salt)."""
    recipient: Recipient | None = None
    """None where nobody listens (in tests and benchmarks)."""
    sequences: list[Sequence] = field(default_factory=list)
    """The n samples; index 0 computes the prompt, the others fork from it."""
    pending_forks: list[Sequence] = field(default_factory=list)
    """The samples that have not been forked yet."""
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    """Committed so far: for each prompt token after the first, itself and then the most likely ones."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first scheduled."""
    scheduled_at: float | None = None
    """When first scheduled, seconds on the engine's clock."""

    def output_of(self, sequence: Sequence) -> array[int]:
        """The tokens that one of the samples has generated."""
        return sequence.token_ids[len(self.prompt) :]


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request: its tokens and where their KV stands.

    0 <= num_computed <= num_scheduled. `num_computed` counts the leading tokens whose KV committed steps have written;
    `num_scheduled` those whose KV is written when each step in flight has brought as many tokens as it may.
    """

    request: Request
    index: int
    token_ids: array[int]
    """Prompt and output."""
    table: BlockTable = field(default_factory=BlockTable)
    status: Status = Status.WAITING
    row: int = -1
    """The runner's row, while running."""
    num_scheduled: int = 0
    num_computed: int = 0
    check_at: int = 0
    """While `num_scheduled` is less, the next decode step needs no block, no copy, and is not the last."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended it, where one did."""
    ready_after: int = -1
    """Preempted: the last plan that it took part in; its token is known once that plan is committed."""
    swap_transfer: int | None = None
    """Swapped out: the transfer that must finish before it can come back."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: smaller first, served before and preempted after larger."""
        return (self.request.priority, self.request.arrival, self.index)

    @property
    def pending_forks(self) -> SequenceOf[Sequence]:
        """The samples that will fork from this sequence when its prompt is computed."""
        return self.request.pending_forks if self.index == 0 else ()
