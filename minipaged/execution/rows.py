"""Rows: the runner's state of each running sequence, and the layout of a step's tokens in arrays."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from minipaged.step import Admission, Chunk, Fork, StepPlan, TableUpdate

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
    """[N]: their rows."""
    sampled: Int32
    """[N]: their last tokens, as indices into T."""
    next_positions: Int32
    """[N]: positions of the tokens to be chosen."""
    prompt_logprobs: tuple[int, ...] = ()
    """Which of the S sequences want log-probabilities of their prompt tokens."""
    sampling_version: int | None = None
    """Steps with the same number have the same `sampling_rows`; None: nothing is known of other steps."""

    def without_sampling(self, rows: Sequence[int]) -> StepArrays:
        """The work of the same step, in which these rows do not sample."""
        kept = ~np.isin(self.sampling_rows, rows)
        return replace(
            self,
            sampling=self.sampling[kept],
            sampling_rows=self.sampling_rows[kept],
            sampled=self.sampled[kept],
            next_positions=self.next_positions[kept],
            sampling_version=None,
        )

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
        self._decode_version: int | None = None
        self._decode_rows = np.empty(0, np.int32)
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
        """The admission of the sequence that has the row."""
        return self._admissions[row]

    def prepare(self, plan: StepPlan) -> StepArrays:
        """Apply the plan's changes, lay out its tokens, and count them as computed."""
        self._change(plan)
        arrays = self._prepare_decodes(plan)
        if plan.chunks:
            arrays = self._with_chunks(arrays, plan.chunks)
        return arrays.without_sampling([row for row, _ in plan.supplied]) if plan.supplied else arrays

    def append(self, rows: Int32, token_ids: Int32) -> None:
        """These tokens were chosen, one per row: the next that the row computes."""
        self._last_token[rows] = token_ids

    def check(self, plan: StepPlan) -> None:
        """Before `prepare`: assert that the plan does not contradict what is known of its rows (debug mode)."""
        self._check_changes(plan)
        after = self._copy()
        after._change(plan)
        after._check_work(plan)

    def _check_changes(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            row, known = admission.row, len(admission.token_ids)
            assert 0 < admission.prompt_length <= known, f"row {row}: the prompt is longer than its {known} tokens"
            assert 0 <= admission.num_computed < known, f"row {row}: nothing is left to compute of {known} tokens"
        taken = {*self._admissions, *(admission.row for admission in plan.admissions)}
        decoding = {row for row in self._admissions if self._decodes[row]} - {each.row for each in plan.admissions}
        children = [fork.child for fork in plan.forks]
        assert len(children) == len(set(children)), "two forks have the same child"
        for parent, child, token, _ in plan.forks:
            assert parent in taken, f"row {child} forks from row {parent}, which has no admission"
            assert token is None or parent in decoding, f"row {child} replaces a token of the prompt of row {parent}"
        taken |= set(children)
        for row in plan.drops:
            assert row in taken, f"row {row} is dropped without an admission"
            assert row not in children, f"row {row} is dropped as soon as it is forked"
        taken -= set(plan.drops)
        for row, _, _ in plan.table_updates:
            assert row in taken, f"row {row} gets a block without an admission"

    def _copy(self) -> Rows:
        rows = copy.copy(self)
        rows._num_computed, rows._last_token = self._num_computed.copy(), self._last_token.copy()
        rows._decodes, rows._tables = self._decodes.copy(), self._tables.copy()
        rows._kv_extent = self._kv_extent.copy()
        rows._admissions, rows._changed = self._admissions.copy(), []
        return rows

    def _check_work(self, plan: StepPlan) -> None:
        num_computed, admissions = self._num_computed, self._admissions
        for row in plan.decode_rows:
            assert row in admissions, f"row {row} decodes without an admission"
            assert self._decodes[row], f"row {row} decodes with {num_computed[row]} tokens computed, fewer than known"
        for row, start, num_tokens, samples, _ in plan.chunks:
            assert row in admissions, f"row {row} has a chunk without an admission"
            known, end = len(admissions[row].token_ids), start + num_tokens
            assert start == num_computed[row], f"row {row}: chunk from {start}, but {num_computed[row]} are computed"
            assert start < end <= known, f"row {row}: chunk [{start}, {end}) of {known} known tokens"
            assert samples == (end == known), f"row {row}: chunk [{start}, {end}) of {known} has samples={samples}"
        sampling = {*plan.decode_rows, *(chunk.row for chunk in plan.chunks if chunk.samples)}
        for row, _ in plan.supplied:
            assert row in sampling, f"row {row} is supplied with a token, but is not computed up to its latest one"
        assert len({row for row, _ in plan.supplied}) == len(plan.supplied), "a row is supplied with two tokens"

        work = [(row, int(num_computed[row]), 1) for row in plan.decode_rows]
        work += [(chunk.row, chunk.start, chunk.num_tokens) for chunk in plan.chunks]
        assert len({row for row, _, _ in work}) == len(work), "a row is computed twice in one step"
        if plan.decode_version == self._decode_version:
            same = self._decode_rows.tolist() == list(plan.decode_rows)
            assert same, f"other rows decode, but decode_version is {plan.decode_version} again"
        written: set[tuple[int, int]] = set()
        for row, start, num_tokens in work:
            assert start + num_tokens <= self._max_model_len, f"row {row} passes max_model_len {self._max_model_len}"
            kv_extent = int(self._kv_extent[row])
            for place in range(kv_extent, kv_extent + num_tokens):
                block = int(self._tables[row, place // self._block_size])
                slot = (block, place % self._block_size)
                assert block >= 0, f"row {row} has no block for position {start + place - kv_extent}"
                assert slot not in written, f"two sequences write slot {slot[1]} of block {block}"
                written.add(slot)

    def _change(self, plan: StepPlan) -> None:
        """Apply the plan's admissions, forks, drops and table updates, in this order."""
        for admission in plan.admissions:
            self._admit(admission)
        if plan.forks:
            self._fork(plan.forks)
        for row in plan.drops:
            del self._admissions[row]
        if plan.table_updates:
            self._update_tables(plan.table_updates)

    def _admit(self, admission: Admission) -> None:
        row, known = admission.row, len(admission.token_ids)
        self._admissions[row] = admission
        self._num_computed[row] = self._kv_extent[row] = admission.num_computed
        self._last_token[row] = admission.token_ids[-1]
        self._decodes[row] = admission.num_computed == known - 1
        self._tables[row] = -1
        self._tables[row, : len(admission.blocks)] = admission.blocks
        self._note_changes(row, len(admission.blocks))

    def _fork(self, forks: Sequence[Fork]) -> None:
        parents, children = [fork.parent for fork in forks], [fork.child for fork in forks]
        of_parents = [self._admissions[row] for row in parents]
        computed = [
            self._num_computed[row] if self._decodes[row] else len(admission.token_ids) - 1
            for row, admission in zip(parents, of_parents, strict=True)
        ]
        self._last_token[children] = [
            self._last_token[fork.parent] if fork.token is None else fork.token for fork in forks
        ]
        self._tables[children] = self._tables[parents]
        self._kv_extent[children] = self._kv_extent[parents] - (self._num_computed[parents] - computed)
        self._num_computed[children] = computed
        self._decodes[children] = True
        for fork, admission in zip(forks, of_parents, strict=True):
            self._admissions[fork.child] = replace(admission, row=fork.child, sample_index=fork.sample_index)
            self._note_changes(fork.child, int(self._kv_extent[fork.child]) // self._block_size + 1)

    def _update_tables(self, updates: Sequence[TableUpdate]) -> None:
        rows, columns, blocks = np.array(updates, np.int64).T
        self._tables[rows, columns] = blocks
        self._changed.append(rows * self._tables.shape[1] + columns)

    def _note_changes(self, row: int, num_blocks: int) -> None:
        start = row * self._tables.shape[1]
        self._changed.append(np.arange(start, start + num_blocks))

    def _prepare_decodes(self, plan: StepPlan) -> StepArrays:
        if plan.decode_version != self._decode_version:
            self._decode_version = plan.decode_version
            self._decode_rows = np.array(plan.decode_rows, np.int32)
            self._decode_cu_seqlens = np.arange(len(plan.decode_rows) + 1, dtype=np.int32)
        rows, starts = self._decode_rows, self._decode_cu_seqlens
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
            sampling_version=plan.decode_version,
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
        sampling, sampling_rows, sampling_version = decodes.sampling, decodes.rows, decodes.sampling_version
        if any(chunk.samples for chunk in chunks):
            of_chunks = [num_decodes + index for index, chunk in enumerate(chunks) if chunk.samples]
            sampling = np.concatenate([sampling, np.array(of_chunks, np.int32)])
            sampling_rows, sampling_version = rows[sampling], None
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
            prompt_logprobs=tuple(num_decodes + i for i, chunk in enumerate(chunks) if chunk.prompt_logprobs),
            sampling_version=sampling_version,
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
