"""StepPlan and StepResult: the immutable values that the scheduler and the runner exchange.

The runner keeps one row per running sequence: its tokens, its block table, how many tokens have KV. A plan says what
changes in the rows, which blocks to copy, and which tokens to compute; it carries nothing that the runner already has,
so that a decode step costs the same at any context length. Plans are executed in the order in which they were made.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
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
    stop_token_ids: frozenset[int]
    """Ids that end the sequence; none of them is chosen before `params.min_tokens`."""


class Fork(NamedTuple):
    """The row `child` goes on from what the row `parent` has: its tokens, block table, settings and penalties.

    The child's latest token is the parent's, or `token` in its place; the next step that has the child among its
    `decode_rows` computes it. All forks of a plan read their parents before any of them writes, so rows may be
    exchanged, and a row may be its own parent to have its latest token replaced.
    """

    parent: int
    child: int
    token: int | None = None
    """Replaces the parent's latest token, which must be one of its output."""
    sample_index: int = 0
    """Which of the request's n samples the child is."""


class SuppliedToken(NamedTuple):
    """The token that follows in a row, which would have been sampled in this step. No logits are computed for it."""

    row: int
    token: int


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
    forks: tuple[Fork, ...] = ()
    drops: tuple[int, ...] = ()
    """Rows whose sequence is over; the runner forgets what it kept of them. An admission needs no drop before it."""
    table_updates: tuple[TableUpdate, ...] = ()
    decode_rows: tuple[int, ...] = ()
    """Rows that each compute their latest token and sample the next."""
    decode_version: int = 0
    """Two plans with the same number have the same `decode_rows`, so that what was made of them can be kept."""
    supplied: tuple[SuppliedToken, ...] = ()
    """Tokens that follow in rows which this step computes up to their latest token."""
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.decode_rows) + sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at one sampled position."""

    chosen: float
    top: tuple[TokenLogprob, ...]


class SequenceResult(NamedTuple):
    """What a step produced for one sequence."""

    row: int
    token_ids: tuple[int, ...] = ()
    """The tokens that follow: one or more for a decode row, one for a chunk that samples, none after a failure."""
    logprobs: tuple[Logprobs, ...] = ()
    """One for each of them, if the request asked and they were sampled."""
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """If the chunk asked: for each of its tokens after position 0, the token itself and then the most likely ones.

    The entry for the prompt token at position p comes with the chunk that computes position p - 1.
    """
    failure: Exception | None = None
    """What failed this sequence alone."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced."""

    plan_id: int
    sequences: Sequence[SequenceResult] = ()
    """Results of the plan's decode rows, then of its chunks, in plan order."""
    finished_transfers: tuple[int, ...] = ()
    """Transfers completed since the last result, of this plan or earlier ones."""
    forward_seconds: float = 0.0
    """How long the forward pass and the choice of tokens took."""
