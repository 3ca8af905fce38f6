"""StepPlan and StepResult: the immutable values that the scheduler and the runner exchange.

The runner keeps one row per running sequence: its tokens, its block table, how many tokens have KV. A plan says what
changes in the rows, which blocks to copy, and which tokens to compute; it carries nothing that the runner already has,
so that a decode step costs the same at any context length. Plans are executed in the order in which they were made.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minipaged.output import TokenLogprob
from minipaged.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a row, new or after a preemption."""

    row: int
    token_ids: array[int]
    """All known tokens, typecode 'i'; never changed after the plan is made."""
    prompt_length: int
    """How many of them are the prompt's (penalties tell prompt from output)."""
    num_computed: int
    """Leading tokens whose KV is in the blocks already."""
    blocks: tuple[int, ...]
    """The block table so far."""
    params: SamplingParams
    seed: int
    """Key of the request's random numbers, in [0, 2**64)."""
    sample_index: int
    """Which of the request's n samples."""


class TableUpdate(NamedTuple):
    """`block_table[row][column] = block`."""

    row: int
    column: int
    block: int


class Chunk(NamedTuple):
    """Prefill of tokens [start, start + num_tokens) of a row."""

    row: int
    start: int
    num_tokens: int
    samples: bool
    """Whether it ends at the last known token, so that the next token is sampled."""
    prompt_logprobs: bool
    """Whether log-probabilities of its prompt tokens are wanted."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies between the device pool and the host pool. Reported in `StepResult.finished_transfers` when complete."""

    id: int
    pairs: tuple[tuple[int, int], ...]
    """(source block, destination block)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The runner applies the fields from top to bottom."""

    id: int
    poison: tuple[int, ...] = ()
    """Debug mode: freshly allocated device blocks, to be filled with NaN."""
    swap_out: tuple[Transfer, ...] = ()
    """Device blocks to host blocks, read before anything of this step writes to them."""
    swap_in: tuple[Transfer, ...] = ()
    """Host blocks to device blocks, complete before this step's forward reads them."""
    copies: tuple[tuple[int, int], ...] = ()
    """Copy-on-write: (source, destination) device blocks."""
    admissions: tuple[Admission, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    decode_rows: tuple[int, ...] = ()
    """Rows that each compute their latest token and sample the next; the same object as before while none changes."""
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.decode_rows) + sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one sampled position."""

    chosen: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. Sampling rows are the plan's decode rows, then its sampling chunks, in plan order."""

    plan_id: int
    token_ids: Sequence[int]
    """One per sampling row; -1 where that row is in `failures`."""
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)
    """By index into the sampling rows, for those that asked."""
    prompt_logprobs: Mapping[int, tuple[tuple[TokenLogprob, ...], ...]] = field(default_factory=dict)
    """By row: for each token of its chunk after position 0, the token itself and then the most likely ones.

    The entry for the prompt token at position p comes with the chunk that computes position p - 1.
    """
    failures: Mapping[int, Exception] = field(default_factory=dict)
    """By row, sampling or not: what failed that sequence alone."""
    finished_transfers: tuple[int, ...] = ()
    """Transfers completed since the last result, of this plan or earlier ones."""
    forward_seconds: float = 0.0
    """How long the forward pass and the choice of tokens took."""
