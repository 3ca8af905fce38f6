"""Runner: executes step plans. It moves blocks, runs the model over the rows, and chooses tokens."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from minipaged.config import EngineConfig
from minipaged.errors import DeviceError, RequestFailedError
from minipaged.execution.rows import Int32, Rows, StepArrays
from minipaged.execution.sampling import SamplingState, Selection
from minipaged.models.architecture import Model
from minipaged.ops.base import Array, Batch, HostArray, KVPool, Ops, PendingCopy, Sampled, Weight
from minipaged.ops.reference.sampling import logprobs
from minipaged.output import TokenLogprob
from minipaged.step import Logprobs, SequenceResult, StepPlan, StepResult

PROMPT_LOGPROBS_ELEMENTS = 2**24
"""Most logits held at a time for prompt log-probabilities: 64 MiB of float32."""


@dataclass(slots=True)
class _Outcome:
    """What becomes of a step, gathered by row while it is computed."""

    token_ids: Int32
    """[max_running]: the token of each row, -1 until it is chosen."""
    logprobs: dict[int, tuple[Logprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[tuple[TokenLogprob, ...], ...]] = field(default_factory=dict)
    failures: dict[int, Exception] = field(default_factory=dict)

    def results(self, rows: Int32) -> list[SequenceResult]:
        """The results of a step's rows, in their order."""
        if self.failures:
            self.token_ids[list(self.failures)] = -1
        token_ids = self.token_ids[rows]
        numbers = rows.tolist()
        if token_ids.min(initial=0) >= 0 and not (self.logprobs or self.prompt_logprobs):
            return list(map(SequenceResult, numbers, zip(token_ids.tolist(), strict=True)))
        return [
            SequenceResult(
                row,
                (token_id,) if token_id >= 0 else (),
                self.logprobs.get(row, ()),
                self.prompt_logprobs.get(row, ()),
                self.failures.get(row),
            )
            for row, token_id in zip(numbers, token_ids.tolist(), strict=True)
        ]


class Runner(Generic[Array, Weight]):
    """Owns rows and device arrays. Used from one thread, with plans in the order in which they were made.

    `cache` and `host_cache` are the pools that `ops` allocated; the host's has no blocks where nothing is swapped.

    What concerns one sequence alone (its forward or its logits callback raises, its logits are NaN) fails that sequence
    in the result. Its row is then left out of the work, and reported as failed again, until its next admission.
    `DeviceError`, `MemoryError`, and what is raised anywhere else, leave `execute` and are fatal: the runner is not to
    be used again.
    """

    def __init__(
        self,
        ops: Ops[Array, Weight],
        model: Model[Array],
        cache: KVPool[Array],
        host_cache: NDArray[np.uint8],
        config: EngineConfig,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._ops = ops
        self._model = model
        self._cache = cache
        self._host_cache = host_cache
        self._debug = config.debug
        self._max_running = config.max_running
        self._vocab_size = vocab_size
        self._rows = Rows(max_running=config.max_running, max_model_len=max_model_len, block_size=config.block_size)
        self._sampling: SamplingState[Array] = SamplingState(
            ops.upload_together, max_running=config.max_running, vocab_size=vocab_size
        )
        self._failed: dict[int, Exception] = {}
        self._pending: list[tuple[int, PendingCopy]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. A plan without tokens computes nothing, but waits for a transfer if any is under way."""
        self._move_blocks(plan)
        arrays = self.prepare(plan)
        outcome = _Outcome(np.full(self._max_running, -1, np.int32))
        started = time.perf_counter()
        work = self._without_failed(arrays, outcome) if self._failed else arrays
        if work is not None and len(work.rows):
            self._compute(work, outcome)
        self._failed.update(outcome.failures)
        supplied = [(row, token) for row, token in plan.supplied if row not in outcome.failures]
        if supplied:
            rows, token_ids = np.array(supplied, np.int32).T
            self._append(rows, token_ids, outcome)
        return StepResult(
            plan_id=plan.id,
            sequences=outcome.results(arrays.rows),
            forward_seconds=time.perf_counter() - started,
            finished_transfers=self._finished_transfers(wait=plan.num_tokens == 0),
        )

    def prepare(self, plan: StepPlan) -> StepArrays:
        """Apply the plan's changes to the rows and lay out its tokens: the host's share of a step."""
        if self._debug:
            self._rows.check(plan)
        arrays = self._rows.prepare(plan)
        for admission in plan.admissions:
            self._sampling.admit(admission)
            self._failed.pop(admission.row, None)
        if plan.forks:
            self._sampling.fork(plan.forks)
            failed = {fork.child: self._failed[fork.parent] for fork in plan.forks if fork.parent in self._failed}
            for fork in plan.forks:
                self._failed.pop(fork.child, None)
            self._failed |= failed
        for row in plan.drops:
            self._sampling.drop(row)
            self._failed.pop(row, None)
        return arrays

    def upload(self, arrays: StepArrays) -> Batch[Array]:
        """Bring a step's arrays to the device."""
        batch: Batch[HostArray] = Batch(
            token_ids=arrays.token_ids,
            positions=arrays.positions,
            kv_extents=arrays.kv_extents,
            slots=arrays.slots,
            cu_seqlens=arrays.cu_seqlens,
            rows=arrays.rows,
            block_tables=self._rows.block_tables,
            sampled=arrays.sampled,
            next_positions=arrays.next_positions.view(np.uint32),
        )
        return self._ops.upload_batch(batch, self._rows.changed_places())

    # Blocks

    def _move_blocks(self, plan: StepPlan) -> None:
        ops = self._ops
        if plan.poison:
            ops.fill_blocks(self._cache, plan.poison, math.nan)
        for transfer in plan.swap_out:
            self._pending.append((transfer.id, ops.blocks_to_host(self._cache, self._host_cache, transfer.pairs)))
        for transfer in plan.swap_in:
            self._pending.append((transfer.id, ops.blocks_from_host(self._host_cache, self._cache, transfer.pairs)))
        if plan.copies:
            ops.copy_blocks(self._cache, plan.copies)

    def _finished_transfers(self, *, wait: bool) -> tuple[int, ...]:
        finished = tuple(transfer for transfer, copy in self._pending if copy.done())
        if wait and self._pending and not finished:
            transfer, copy = self._pending[0]
            copy.wait()
            finished = (transfer,)
        if finished:
            self._pending = [(transfer, copy) for transfer, copy in self._pending if transfer not in finished]
        return finished

    # Tokens

    def _without_failed(self, arrays: StepArrays, outcome: _Outcome) -> StepArrays | None:
        failed = np.isin(arrays.rows, list(self._failed))
        outcome.failures.update({row: self._failed[row] for row in arrays.rows[failed].tolist()})
        alive = np.flatnonzero(~failed).astype(np.int32)
        return arrays.select(alive) if alive.size else None

    def _compute(self, arrays: StepArrays, outcome: _Outcome) -> None:
        """Forward, then sample. If the forward fails, each sequence alone, so that those fail which are the cause."""
        try:
            batch = self.upload(arrays)
            logits, prompt_logprobs = self._forward(arrays, batch)
        except (DeviceError, MemoryError):
            raise
        except Exception as caught:
            cause = caught
        else:
            outcome.prompt_logprobs.update(prompt_logprobs)
            if logits is not None:
                self._sample(arrays, batch, logits, outcome)
            return
        if len(arrays.rows) == 1:
            error = RequestFailedError(f"The forward pass failed for this request: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            outcome.failures[int(arrays.rows[0])] = error
        else:
            for part in arrays.split():
                self._compute(part, outcome)

    def _forward(
        self, arrays: StepArrays, batch: Batch[Array]
    ) -> tuple[Array | None, dict[int, tuple[tuple[TokenLogprob, ...], ...]]]:
        """Logits of the tokens that sample, if any do, and log-probabilities of prompt tokens by row."""
        if not arrays.prompt_logprobs:
            output = self._ops.replay(self._model_logits if arrays.sampling.size else self._model_hidden, batch)
            return (output if arrays.sampling.size else None), {}
        hidden = self._model_hidden(batch)
        logits = self._model.logits(hidden, batch) if arrays.sampling.size else None
        prompt_logprobs = {
            int(arrays.rows[sequence]): self._prompt_logprobs(arrays, sequence, hidden, batch)
            for sequence in arrays.prompt_logprobs
        }
        return logits, prompt_logprobs

    def _model_hidden(self, batch: Batch[Array]) -> Array:
        return self._model.forward(batch, self._cache)

    def _model_logits(self, batch: Batch[Array]) -> Array:
        return self._model.logits(self._model_hidden(batch), batch)

    def _prompt_logprobs(
        self, arrays: StepArrays, sequence: int, hidden: Array, batch: Batch[Array]
    ) -> tuple[tuple[TokenLogprob, ...], ...]:
        admission = self._rows.admission(int(arrays.rows[sequence]))
        num_top = admission.params.prompt_logprobs or 0
        start, end = arrays.cu_seqlens[sequence : sequence + 2].tolist()
        first = int(arrays.positions[start]) + 1
        targets = np.array(admission.token_ids[first : min(first + end - start, admission.prompt_length)], np.int32)
        most = max(1, PROMPT_LOGPROBS_ELEMENTS // self._vocab_size)
        entries: list[tuple[TokenLogprob, ...]] = []
        for begin in range(0, len(targets), most):
            chosen = targets[begin : begin + most]
            indices = np.arange(start + begin, start + begin + len(chosen), dtype=np.int32)
            sampled = dataclasses.replace(batch, sampled=self._ops.upload(indices))
            logits = self._ops.download(self._model.logits(hidden, sampled))
            entries += _entries(chosen, logits, num_top)
        return tuple(entries)

    def _sample(self, arrays: StepArrays, batch: Batch[Array], raw_logits: Array, outcome: _Outcome) -> None:
        ops = self._ops
        rows, positions = arrays.sampling_rows, arrays.next_positions
        selection = self._sampling.select(rows, arrays.sampling_version)
        penalties, bias = self._sampling.adjustments(selection, positions)
        logits = raw_logits
        if penalties is not None or bias is not None:
            logits = ops.adjust_logits(raw_logits, penalties, bias)
        with_callback = selection.with_callback
        if not with_callback.size:
            self._choose(selection, positions, batch.next_positions, logits, raw_logits, outcome)
            return

        without = np.delete(np.arange(len(rows)), with_callback)
        if without.size:
            some = positions[without]
            indices, next_positions = ops.upload_together([without.astype(np.int32), some.astype(np.uint32)])
            taken, raw_taken = ops.take(logits, indices), ops.take(raw_logits, indices)
            self._choose(self._sampling.select(rows[without]), some, next_positions, taken, raw_taken, outcome)
        on_host = ops.download(ops.take(logits, ops.upload(with_callback.astype(np.int32))))
        adjusted: dict[int, NDArray[np.float32]] = {}
        for index, row_logits in zip(with_callback.tolist(), on_host, strict=True):
            row = int(rows[index])
            try:
                adjusted[index] = self._sampling.call_back(row, row_logits)
            except RequestFailedError as error:
                outcome.failures[row] = error
        if adjusted:
            called = np.array(list(adjusted))
            some = positions[called]
            indices, next_positions, returned = ops.upload_together(
                [called.astype(np.int32), some.astype(np.uint32), np.stack(list(adjusted.values()))]
            )
            raw_taken = ops.take(raw_logits, indices)
            self._choose(self._sampling.select(rows[called]), some, next_positions, returned, raw_taken, outcome)

    def _choose(
        self,
        selection: Selection[Array],
        positions: Int32,
        next_positions: Array,
        logits: Array,
        raw_logits: Array,
        outcome: _Outcome,
    ) -> None:
        """Sample a token for each of the selected rows; `positions` [N] are `next_positions` on the host."""
        rows = selection.rows
        sampled = self._ops.sample(logits, raw_logits, self._sampling.batch(selection, next_positions))
        token_ids = sampled.token_ids
        failed = token_ids < 0
        if sampled.logprobs is not None:
            asked = self._sampling.num_logprobs(rows)
            failed |= (asked >= 0) & np.isnan(sampled.logprobs)
            for index in np.flatnonzero((asked >= 0) & ~failed).tolist():
                outcome.logprobs[int(rows[index])] = (_logprobs_of(sampled, index, int(asked[index])),)
        if failed.any():
            for index in np.flatnonzero(failed).tolist():
                outcome.failures[int(rows[index])] = RequestFailedError(
                    f"No token can be chosen at position {positions[index]}: the logits hold NaN, or nothing finite. "
                    "Check logit_bias and the logits callback; without those, the model's weights or KV are at fault."
                )
            rows, token_ids = rows[~failed], token_ids[~failed]
        self._append(rows, token_ids, outcome)

    def _append(self, rows: Int32, token_ids: Int32, outcome: _Outcome) -> None:
        """The next token of each row is known."""
        outcome.token_ids[rows] = token_ids
        self._rows.append(rows, token_ids)
        self._sampling.append(rows, token_ids)


def _logprobs_of(sampled: Sampled, index: int, num_top: int) -> Logprobs:
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    ids, values = sampled.top_ids[index, :num_top].tolist(), sampled.top_logprobs[index, :num_top].tolist()
    return Logprobs(float(sampled.logprobs[index]), tuple(map(TokenLogprob, ids, values)))


def _entries(token_ids: Int32, logits: NDArray[np.float32], num_top: int) -> list[tuple[TokenLogprob, ...]]:
    """For each of the tokens [N] under its logits [N, vocab_size]: itself, then the most likely ones."""
    own, top_ids, top = logprobs(logits, token_ids, num_top)
    if np.isnan(own).any():
        raise ValueError("the logits of a prompt token hold NaN, or nothing finite")
    columns = zip(token_ids.tolist(), own.tolist(), top_ids.tolist(), top.tolist(), strict=True)
    return [
        (TokenLogprob(token_id, logprob), *map(TokenLogprob, ids, values)) for token_id, logprob, ids, values in columns
    ]
