"""Batches over a paged cache, laid out as unfriendly as they may be, for tests of ops and models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minipaged.ops.base import Array, Batch, HostArray, Ops, Weight

NOWHERE = 2**30
"""A block number that must not be used: where a table says nothing yet."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of one sequence to compute: `token_ids` at positions start, start + 1, …"""

    row: int
    start: int
    token_ids: Sequence[int]
    num_evicted: int = 0
    """How many tokens before `start` have no KV any more: so much shorter is the KV extent than the position."""

    @property
    def kv_extents(self) -> NDArray[np.int32]:
        """How far the sequence's KV reaches with each of the tokens."""
        first = self.start - self.num_evicted + 1
        return np.arange(first, first + len(self.token_ids), dtype=np.int32)


def shuffled_tables(
    generator: np.random.Generator, lengths: Sequence[int], block_size: int, *, num_blocks: int
) -> NDArray[np.int32]:
    """Block tables int32 [len(lengths), blocks of the longest + 1] of sequences that own blocks in random order."""
    needed = [-(-length // block_size) for length in lengths]
    tables = np.full((len(lengths), max(needed, default=0) + 1), NOWHERE, np.int32)
    free = generator.permutation(num_blocks)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    return tables


def slots_of(table: NDArray[np.int32], positions: NDArray[np.int32], block_size: int) -> NDArray[np.int64]:
    """Where the KV at those places of a sequence lives."""
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size


def make_batch(
    ops: Ops[Array, Weight],
    spans: Sequence[TokenSpan],
    tables: NDArray[np.int32],
    block_size: int,
    sampled: Sequence[int] = (),
) -> Batch[Array]:
    """The step that computes these spans, one after the other."""
    positions = [np.arange(span.start, span.start + len(span.token_ids), dtype=np.int32) for span in spans]
    slots = [slots_of(tables[span.row], span.kv_extents - 1, block_size) for span in spans]
    counts = [len(span.token_ids) for span in spans]
    at, indices = np.concatenate(positions), np.array(sampled, np.int32)
    host: Batch[HostArray] = Batch(
        token_ids=np.array([token for span in spans for token in span.token_ids], np.int32),
        positions=at,
        kv_extents=np.concatenate([span.kv_extents for span in spans]),
        slots=np.concatenate(slots),
        cu_seqlens=np.cumsum([0, *counts]).astype(np.int32),
        rows=np.array([span.row for span in spans], np.int32),
        block_tables=tables,
        sampled=indices,
        next_positions=(at[indices] + 1).astype(np.uint32),
    )
    return ops.upload_batch(host, np.arange(tables.size))
