"""Rows: the runner's state of each running sequence, and the layout of a step's tokens in arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minipaged.step import Admission, Chunk, StepPlan, TableUpdate

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The work of one step: T tokens of S sequences, N of which sample. Not to be written to."""

    token_ids: Int32
    """[T], sequence after sequence"""
    positions: Int32
    """[T]"""
    kv_extents: Int32
    """[T]: how many tokens' KV of its sequence each token sees, its own as the last"""
    slots: Int64
    """[T]: block * block_size + (kv_extent - 1) % block_size"""
    cu_seqlens: Int32
    """[S + 1]: tokens [cu_seqlens[s], cu_seqlens[s + 1]) belong to sequence s."""
    rows: Int32
    """[S]"""
    sampling: Int32
    """[N]: which of the S sequences sample, ascending."""
    sampling_rows: Int32
    """[N]: their rows. The same object as before while the same rows decode."""
    sampled: Int32
    """[N]: their last tokens, as indices into T."""
    next_positions: Int32
    """[N]: of the tokens to be chosen."""
    outputs: Int32
    """[N]: which of the plan's sampling rows they are."""
    prompt_logprobs: tuple[int, ...] = ()
    """Which of the S sequences want log-probabilities of their prompt tokens."""

    def select(self, sequences: Int32) -> StepArrays:
        """The work of some of the sequences, at least one, ascending."""
        starts, ends = self.cu_seqlens[sequences], self.cu_seqlens[sequences + 1]
        tokens = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        of_these = np.isin(self.sampling, sequences)
        cu_seqlens = _starts((ends - starts).tolist())
        sampling = np.searchsorted(sequences, self.sampling[of_these]).astype(np.int32)
        return StepArrays(
            token_ids=self.token_ids[tokens],
            positions=self.positions[tokens],
            kv_extents=self.kv_extents[tokens],
            slots=self.slots[tokens],
            cu_seqlens=cu_seqlens,
            rows=self.rows[sequences],
            sampling=sampling,
            sampling_rows=self.sampling_rows[of_these],
            sampled=_last_tokens(cu_seqlens, sampling),
            next_positions=self.next_positions[of_these],
            outputs=self.outputs[of_these],
            prompt_logprobs=tuple(i for i, s in enumerate(sequences.tolist()) if s in self.prompt_logprobs),
        )

    def split(self) -> Iterator[StepArrays]:
        """The work of each sequence alone."""
        for sequence in range(len(self.rows)):
            yield self.select(np.array([sequence], np.int32))


class Rows:
    """What the runner knows of each row: tokens, how many have KV, block table.

    Preparing a decode step is a few gathers over the decoding rows, whatever their lengths.
    """

    def __init__(self, *, max_running: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._admissions: dict[int, Admission] = {}
        self._num_computed = np.zeros(max_running, np.int32)
        self._kv_extent = np.zeros(max_running, np.int32)  # tokens whose KV is in the blocks
        self._last_token = np.zeros(max_running, np.int32)
        self._decodes = np.zeros(max_running, np.bool_)
        self._tables = np.full((max_running, -(-max_model_len // block_size)), -1, np.int32)
        self._changed: list[Int64] = []
        self._decode_rows: tuple[int, ...] = ()
        self._decode_array = np.empty(0, np.int32)
        self._decode_cu_seqlens = np.zeros(1, np.int32)

    @property
    def block_tables(self) -> Int32:
        """int32 [max_running, blocks of the longest sequence there may be]; -1: no block. Always the same array."""
        return self._tables

    def changed_places(self) -> Int64:
        """The places in `block_tables`, counted row after row, that were set since the last call."""
        changed, self._changed = self._changed, []
        return np.concatenate(changed) if changed else np.empty(0, np.int64)

    def admission(self, row: int) -> Admission:
        """Of the sequence that has the row."""
        return self._admissions[row]

    def prepare(self, plan: StepPlan) -> StepArrays:
        """Apply the plan's admissions and table updates, lay out its tokens, and count them as computed."""
        for admission in plan.admissions:
            self._admit(admission)
        if plan.table_updates:
            self._update_tables(plan.table_updates)
        decodes = self._prepare_decodes(plan.decode_rows)
        return self._with_chunks(decodes, plan.chunks) if plan.chunks else decodes

    def append(self, rows: Int32, token_ids: Int32) -> None:
        """These tokens were chosen, one per row: the next that the row computes."""
        self._last_token[rows] = token_ids

    def check(self, plan: StepPlan) -> None:
        """Before `prepare`: assert that the plan does not contradict what is known of its rows (debug mode)."""
        num_computed, decodes = self._num_computed.copy(), self._decodes.copy()
        tables, admissions = self._tables.copy(), self._admissions.copy()
        for admission in plan.admissions:
            row, known = admission.row, len(admission.token_ids)
            assert 0 < admission.prompt_length <= known, f"row {row}: the prompt is longer than its {known} tokens"
            assert 0 <= admission.num_computed < known, f"row {row}: nothing is left to compute of {known} tokens"
            num_computed[row], decodes[row] = admission.num_computed, admission.num_computed == known - 1
            tables[row] = -1
            tables[row, : len(admission.blocks)] = admission.blocks
            admissions[row] = admission
        for row, column, block in plan.table_updates:
            assert row in admissions, f"row {row} gets a block without an admission"
            tables[row, column] = block

        for row in plan.decode_rows:
            assert row in admissions, f"row {row} decodes without an admission"
            assert decodes[row], f"row {row} decodes with {num_computed[row]} tokens computed, fewer than known"
        for row, start, num_tokens, samples, _ in plan.chunks:
            assert row in admissions, f"row {row} has a chunk without an admission"
            known, end = len(admissions[row].token_ids), start + num_tokens
            assert start == num_computed[row], f"row {row}: chunk from {start}, but {num_computed[row]} are computed"
            assert start < end <= known, f"row {row}: chunk [{start}, {end}) of {known} known tokens"
            assert samples == (end == known), f"row {row}: chunk [{start}, {end}) of {known} has samples={samples}"

        work = [(row, int(num_computed[row]), 1) for row in plan.decode_rows]
        work += [(chunk.row, chunk.start, chunk.num_tokens) for chunk in plan.chunks]
        assert len({row for row, _, _ in work}) == len(work), "a row is computed twice in one step"
        written: set[tuple[int, int]] = set()
        for row, start, num_tokens in work:
            assert start + num_tokens <= self._max_model_len, f"row {row} passes max_model_len {self._max_model_len}"
            for position in range(start, start + num_tokens):
                block = int(tables[row, position // self._block_size])
                slot = (block, position % self._block_size)
                assert block >= 0, f"row {row} has no block for position {position}"
                assert slot not in written, f"two sequences write slot {slot[1]} of block {block}"
                written.add(slot)

    def _admit(self, admission: Admission) -> None:
        row, known = admission.row, len(admission.token_ids)
        self._admissions[row] = admission
        self._num_computed[row] = self._kv_extent[row] = admission.num_computed
        self._last_token[row] = admission.token_ids[-1]
        self._decodes[row] = admission.num_computed == known - 1
        self._tables[row] = -1
        self._tables[row, : len(admission.blocks)] = admission.blocks
        start = row * self._tables.shape[1]
        self._changed.append(np.arange(start, start + len(admission.blocks)))

    def _update_tables(self, updates: Sequence[TableUpdate]) -> None:
        rows, columns, blocks = np.array(updates, np.int64).T
        self._tables[rows, columns] = blocks
        self._changed.append(rows * self._tables.shape[1] + columns)

    def _prepare_decodes(self, decode_rows: tuple[int, ...]) -> StepArrays:
        if decode_rows is not self._decode_rows:
            self._decode_rows = decode_rows
            self._decode_array = np.array(decode_rows, np.int32)
            self._decode_cu_seqlens = np.arange(len(decode_rows) + 1, dtype=np.int32)
        rows, starts = self._decode_array, self._decode_cu_seqlens
        positions = self._num_computed[rows]
        next_positions, kv_extents = positions + np.int32(1), self._kv_extent[rows] + np.int32(1)
        self._num_computed[rows], self._kv_extent[rows] = next_positions, kv_extents
        return StepArrays(
            token_ids=self._last_token[rows],
            positions=positions,
            kv_extents=kv_extents,
            slots=self._slots(rows, kv_extents),
            cu_seqlens=starts,
            rows=rows,
            sampling=starts[:-1],
            sampling_rows=rows,
            sampled=starts[:-1],
            next_positions=next_positions,
            outputs=starts[:-1],
        )

    def _with_chunks(self, decodes: StepArrays, chunks: tuple[Chunk, ...]) -> StepArrays:
        num_decodes = len(decodes.rows)
        token_ids, positions = [decodes.token_ids], [decodes.positions]
        kv_extents, slots = [decodes.kv_extents], [decodes.slots]
        for row, start, num_tokens, samples, _ in chunks:
            end = start + num_tokens
            token_ids.append(np.array(self._admissions[row].token_ids[start:end], np.int32))
            positions.append(np.arange(start, end, dtype=np.int32))
            kv_extents.append(self._kv_extent[row] + np.arange(1, num_tokens + 1, dtype=np.int32))
            slots.append(self._slots(np.int32(row), kv_extents[-1]))
            self._kv_extent[row] += num_tokens
            self._num_computed[row] = end
            self._decodes[row] = samples
        rows = np.concatenate([decodes.rows, np.array([chunk.row for chunk in chunks], np.int32)])
        sampling, sampling_rows, outputs = decodes.sampling, decodes.rows, decodes.outputs
        if any(chunk.samples for chunk in chunks):
            of_chunks = [num_decodes + index for index, chunk in enumerate(chunks) if chunk.samples]
            sampling = np.concatenate([sampling, np.array(of_chunks, np.int32)])
            sampling_rows = rows[sampling]
            outputs = np.arange(len(sampling), dtype=np.int32)
        cu_seqlens = _starts([1] * num_decodes + [chunk.num_tokens for chunk in chunks])
        sampled, all_positions = _last_tokens(cu_seqlens, sampling), np.concatenate(positions)
        return StepArrays(
            token_ids=np.concatenate(token_ids),
            positions=all_positions,
            kv_extents=np.concatenate(kv_extents),
            slots=np.concatenate(slots),
            cu_seqlens=cu_seqlens,
            rows=rows,
            sampling=sampling,
            sampling_rows=sampling_rows,
            sampled=sampled,
            next_positions=all_positions[sampled] + np.int32(1),
            outputs=outputs,
            prompt_logprobs=tuple(num_decodes + i for i, chunk in enumerate(chunks) if chunk.prompt_logprobs),
        )

    def _slots(self, rows: Int32 | np.int32, kv_extents: Int32) -> Int64:
        """Where the KV of the last token of each extent stands."""
        columns, offsets = np.divmod(kv_extents - np.int32(1), np.int32(self._block_size))
        blocks: Int64 = self._tables[rows, columns].astype(np.int64)
        return blocks * self._block_size + offsets


def _last_tokens(cu_seqlens: Int32, sequences: Int32) -> Int32:
    return cu_seqlens[sequences + 1] - np.int32(1)


def _starts(lengths: list[int]) -> Int32:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
