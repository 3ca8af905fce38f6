"""Scheduler: continuous batching under a token budget.

It takes in requests, has each step planned (see `planner`), and commits what came of it.

`plan` may be called again before the previous plan's result is committed. Then the tokens of the step in flight are not
known yet, only how many there will be, and that is all a plan needs: block tables and positions. A sequence that turns
out to have stopped costs one discarded token. Blocks given back meanwhile may be planned for others at once, because
the runner executes plans in order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from minipaged.config import EngineConfig
from minipaged.errors import PromptTooLongError
from minipaged.kv.manager import KVManager
from minipaged.output import FinishReason, TokenLogprob
from minipaged.scheduling.in_flight import StepInFlight, StepsInFlight
from minipaged.scheduling.planner import Planner
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.scheduling.request import Request, Sequence, Status
from minipaged.scheduling.running import RunningBatch
from minipaged.scheduling.waiting import WaitingQueue
from minipaged.stats import BlockCounts
from minipaged.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step changed."""

    advanced: list[tuple[Sequence, int]]
    """Sequences that got a token, and the index of the sampling row it came from."""
    failed: list[tuple[Sequence, Exception]]
    """Sequences that failed alone; they are finished, and their request should be aborted."""
    prompt_logprobs: list[tuple[Request, tuple[tuple[TokenLogprob, ...], ...]]]
    """Further entries for these requests, in order of position."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the start, and the queues as they are now."""

    waiting: int
    running: int
    preemptions_by_swap: int
    preemptions_by_recompute: int
    prompt_tokens: int
    """Prompt tokens of requests admitted so far."""
    cached_tokens: int
    """Those of them that came from the prefix cache."""
    blocks: BlockCounts
    host_blocks: BlockCounts


class Scheduler:
    """Owns requests, sequences and the KV bookkeeping. Pure Python, used from one thread, never blocks."""

    def __init__(
        self, config: EngineConfig, *, num_blocks: int, swap_blocks: int, block_bytes: int, max_batched_tokens: int
    ) -> None:
        self._config = config
        self._policy = PreemptionPolicy(config, block_bytes)
        self.kv = KVManager(
            num_blocks=num_blocks,
            swap_blocks=swap_blocks,
            block_size=config.block_size,
            prefix_caching=config.prefix_caching,
        )
        self._waiting = WaitingQueue()
        self._batch = RunningBatch(config.max_running)
        self._in_flight = StepsInFlight()
        self._planner = Planner(
            config, self.kv, self._waiting, self._batch, self._in_flight, self._policy, max_batched_tokens
        )

    # Requests

    def submit(self, request: Request) -> None:
        """Queue a request of at most `max_running` samples, creating its sequences.

        How many may wait is for the engine to say. Raises `PromptTooLongError` if the request can never fit.
        """
        assert request.params.n <= self._config.max_running, f"{request.params.n} samples can never run at once"
        length, capacity = len(request.prompt), self.kv.pool.num_blocks * self._config.block_size
        if length >= request.max_length:
            raise PromptTooLongError(
                f"The prompt of request {request.id!r} has {length} tokens, which leaves no room for an answer within "
                f"max_model_len ({request.max_length}); shorten it, or, if the model's context is longer, raise "
                "max_model_len or kv_cache_memory."
            )
        if request.max_length > capacity:
            raise PromptTooLongError(
                f"Request {request.id!r} may grow to {request.max_length} tokens but the whole block pool holds "
                f"{capacity}; lower max_tokens, or raise num_blocks or kv_cache_memory."
            )
        request.sequences = [Sequence(request, index, array("i", request.prompt)) for index in range(request.params.n)]
        self._waiting.push(request.sequences[0])

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, wherever it is, and give back all it holds. Does nothing if it has ended already."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._batch.leave(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self.kv.release(sequence.table)

    def abort(self, request: Request) -> None:
        """End all sequences of a request that have not ended."""
        for sequence in request.sequences:
            self.finish(sequence, "abort")

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings."""
        self.kv.reset_prefix_cache()

    # A step

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be done before a step in flight is committed, or at all.

        `now` is the time, in seconds on the engine's clock, that newly scheduled requests are stamped with.
        """
        self.kv.fresh.clear()
        draft = self._planner.draft(now)
        if not (draft.has_tokens or draft.swap_out or draft.swap_in):
            if self._in_flight:
                return None
            if draft.preempted:
                return self.plan(now)  # the only sequence made way for itself; now it can come back
            if not self.kv.host.num_pending:
                return None
            # Nothing to compute but a copy is under way: an empty plan lets the runner wait for it.
        plan = self._in_flight.start(draft, tuple(self.kv.fresh) if self._config.debug else ())
        if self._config.debug:
            self.check()
        return plan

    def commit(self, result: StepResult) -> Committed:
        """Take in the result of the oldest plan in flight."""
        step = self._in_flight.finish(result)
        for transfer_id in result.finished_transfers:
            self.kv.finish_transfer(transfer_id)
        committed = Committed([], [], [])
        if result.failures:
            self._fail(step, result, committed)
        self._commit_decodes(step.decoding, result.token_ids, committed.advanced)
        self._commit_chunks(step, result, committed)
        self._policy.observe(step.plan, result)
        if self._config.debug:
            self.check()
        return committed

    # Committing

    def _commit_decodes(
        self, decoding: tuple[Sequence, ...], token_ids: SequenceOf[int], advanced: list[tuple[Sequence, int]]
    ) -> None:
        """The hot loop: once per running sequence and step."""
        block_size, running, finished = self._config.block_size, Status.RUNNING, Status.FINISHED
        for index, sequence in enumerate(decoding):
            status = sequence.status
            if status is finished:
                continue
            request, token_id, tokens = sequence.request, token_ids[index], sequence.token_ids
            tokens.append(token_id)
            if status is running:
                sequence.num_computed = computed = sequence.num_computed + 1
                if computed % block_size == 0:
                    self.kv.insert(sequence.table, tokens, computed, request.namespace)
            advanced.append((sequence, index))
            if token_id in request.stop_token_ids:
                self.finish(sequence, "stop")
            elif len(tokens) >= request.max_length:
                self.finish(sequence, "length")

    def _commit_chunks(self, step: StepInFlight, result: StepResult, committed: Committed) -> None:
        index = len(step.decoding)
        for sequence, chunk in zip(step.chunked, step.plan.chunks, strict=True):
            if chunk.prompt_logprobs and sequence.status is not Status.FINISHED:
                request = sequence.request
                # After a preemption some positions are computed again; those have been reported.
                entries = result.prompt_logprobs[chunk.row][max(0, request.num_prompt_logprobs - chunk.start) :]
                request.num_prompt_logprobs += len(entries)
                committed.prompt_logprobs.append((request, entries))
            if sequence.status is Status.RUNNING:
                sequence.num_computed = chunk.start + chunk.num_tokens
                self.kv.insert(sequence.table, sequence.token_ids, sequence.num_computed, sequence.request.namespace)
            if chunk.samples:
                if sequence.status is not Status.FINISHED:
                    self._append(sequence, result.token_ids[index])
                    committed.advanced.append((sequence, index))
                index += 1

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        if token_id in sequence.request.stop_token_ids:
            self.finish(sequence, "stop")
        elif len(sequence.token_ids) >= sequence.request.max_length:
            self.finish(sequence, "length")

    def _fail(self, step: StepInFlight, result: StepResult, committed: Committed) -> None:
        sequences = dict(zip(step.plan.decode_rows, step.decoding, strict=True))
        sequences |= dict(zip((chunk.row for chunk in step.plan.chunks), step.chunked, strict=True))
        for row, error in result.failures.items():
            if sequences[row].status is not Status.FINISHED:
                self.finish(sequences[row], "abort")
                committed.failed.append((sequences[row], error))

    # Reporting

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be scheduled for the first time."""
        return self._waiting.num_new

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or a step or a copy is under way."""
        anything = self._batch.sequences or self._in_flight or self.kv.host.num_pending
        return bool(anything) or self._waiting.first() is not None

    def stats(self) -> SchedulerStats:
        """Counts, now."""
        return SchedulerStats(
            waiting=self.num_waiting,
            running=self.num_running,
            preemptions_by_swap=self._planner.num_swaps,
            preemptions_by_recompute=self._planner.num_recomputes,
            prompt_tokens=self._planner.prompt_tokens,
            cached_tokens=self._planner.cached_tokens,
            blocks=self.kv.pool.counts(),
            host_blocks=self.kv.host.pool.counts(),
        )

    def check(self) -> None:
        """Assert the invariants of the design (debug mode)."""
        live = [*self._batch.sequences, *self._waiting]
        self.kv.check(sequence.table for sequence in live)
        self._batch.check()
        block_size = self._config.block_size
        for sequence in self._batch.sequences:
            table = sequence.table
            assert sequence.num_computed <= sequence.num_scheduled <= len(table.blocks) * block_size
            assert len(table.nodes) * block_size <= sequence.num_computed, "a block was published before its commit"
