"""Request and Sequence: what the engine and the scheduler know of the work that was asked for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from minipaged.kv.table import BlockTable
from minipaged.output import FinishReason
from minipaged.params import SamplingParams


class Status(Enum):
    """Where a sequence is."""

    WAITING = auto()
    """In the waiting queue: new, or preempted."""
    RUNNING = auto()
    """Has a row and blocks."""
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what was asked of it. Read-only for the scheduler, except `sequences` and the times."""

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
    deadline: float | None = None
    """Seconds on the engine's clock."""
    sequences: list[Sequence] = field(default_factory=list)
    """The n samples; index 0 computes the prompt, the others fork from it."""
    is_forked: bool = False
    """Whether the other samples have been forked from the first."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log-probabilities have been reported."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first scheduled."""
    submitted_at: float = 0.0
    scheduled_at: float | None = None
    """When first scheduled, seconds on the engine's clock."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request: its tokens and where their KV stands.

    0 <= num_computed <= num_scheduled <= number of tokens: `num_scheduled` counts leading tokens whose KV is planned,
    `num_computed` those whose step has been committed.
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
    horizon: int = 0
    """Position from which a decode step needs more than the blocks at hand: a new block, a copy, or nothing at all."""
    finish_reason: FinishReason | None = None
    ready_after: int = -1
    """Preempted: the last plan that it took part in; its token is known once that plan is committed."""
    swap_transfer: int | None = None
    """Swapped out: the transfer that must finish before it can come back."""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: smaller first, served before and preempted after larger."""
        return (self.request.priority, self.request.arrival, self.index)

    @property
    def unforked(self) -> list[Sequence]:
        """The samples that will fork from this sequence when its prompt is computed."""
        if self.index != 0 or self.request.is_forked:
            return []
        return [sibling for sibling in self.request.sequences[1:] if sibling.status is not Status.FINISHED]
