"""Scheduler: continuous batching under a token budget.

It takes in requests, has each step planned (see `planner`), and commits what came of it.

`plan` may be called again before the previous plan's result is committed. Then the tokens of the step in flight are not
known yet, only how many there may be, and that is all a plan needs: block tables and positions. A sequence that turns
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
from minipaged.output import FinishReason
from minipaged.scheduling.in_flight import StepInFlight, StepsInFlight
from minipaged.scheduling.planner import Planner
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.scheduling.request import Request, Sequence, Status
from minipaged.scheduling.running import RunningBatch
from minipaged.scheduling.waiting import WaitingQueue
from minipaged.stats import EngineStats
from minipaged.step import Chunk, Logprobs, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step changed."""

    advanced: list[tuple[Sequence, int, SequenceOf[Logprobs]]]
    """Sequences that got tokens, how many, and the log-probabilities of the step's tokens."""
    failed: list[tuple[Sequence, Exception]]
    """Sequences that failed alone; they are finished, and their request should be aborted."""


class Scheduler:
    """Owns requests, sequences and the KV bookkeeping. Pure Python, used from one thread, never blocks."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        swap_blocks: int,
        block_bytes: int,
        max_batched_tokens: int,
        tokens_per_decode: int = 1,
    ) -> None:
        """`tokens_per_decode`: the most tokens that the runner may return for a row that decodes."""
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
            config,
            self.kv,
            self._waiting,
            self._batch,
            self._in_flight,
            self._policy,
            max_batched_tokens,
            tokens_per_decode,
        )
        self._tokens_per_decode = tokens_per_decode
        self._num_steps = 0
        self._num_tokens = 0

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
        request.pending_forks = request.sequences[1:]
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
        builder = self._planner.plan(now)
        if not (builder.has_tokens or builder.swap_out or builder.swap_in):
            if self._in_flight:
                return None
            if builder.preempted:
                return self.plan(now)  # the only sequence made way for itself; now it can come back
            if not self.kv.host.num_pending:
                return None
            # Nothing to compute but a copy is under way: an empty plan lets the runner wait for it.
        plan = self._in_flight.start(builder, tuple(self.kv.fresh) if self._config.debug else ())
        if self._config.debug:
            self.check()
        return plan

    def commit(self, result: StepResult) -> Committed:
        """Take in the result of the oldest plan in flight."""
        step = self._in_flight.finish(result)
        if self._config.debug:
            self._check_result(step.plan, result)
        self._num_steps += 1
        for transfer_id in result.finished_transfers:
            self.kv.finish_transfer(transfer_id)
        committed = self._commit_sequences(step, result)
        self._policy.observe(step.plan, result)
        if self._config.debug:
            self.check()
        return committed

    def _commit_sequences(self, step: StepInFlight, result: StepResult) -> Committed:
        """The hot loop: once per running sequence and step."""
        block_size, most_tokens = self._config.block_size, self._tokens_per_decode
        running, finished = Status.RUNNING, Status.FINISHED
        advanced: list[tuple[Sequence, int, SequenceOf[Logprobs]]] = []
        failed: list[tuple[Sequence, Exception]] = []
        chunks: list[Chunk | None] = [None] * len(step.plan.decode_rows)
        chunks += step.plan.chunks
        generated = 0
        for sequence, chunk, outcome in zip(step.sequences, chunks, result.sequences, strict=True):
            status = sequence.status
            if status is finished:
                continue
            _, token_ids, logprobs, prompt_logprobs, failure = outcome
            request, known, reason, num_tokens = sequence.request, sequence.token_ids, None, 0
            try:
                for token_id in token_ids:
                    known.append(token_id)
                    num_tokens += 1
                    if (
                        token_id in request.stop_token_ids
                        or len(known) >= request.max_length
                        or request.recipient is not None
                    ):
                        reason = self._reason_to_finish(sequence, token_id)
                        if reason is not None:
                            break
            except Exception as error:  # what becomes of one request's text concerns no other
                failure = error
            if failure is not None:
                self.finish(sequence, "abort")
                failed.append((sequence, failure))
                continue
            num_computed = num_tokens
            if num_tokens:
                generated += num_tokens
                advanced.append((sequence, num_tokens, logprobs))
            if chunk is not None:
                num_computed = chunk.num_tokens
                if prompt_logprobs:
                    # After a preemption some positions are computed again; those have been committed.
                    reported = request.prompt_logprobs
                    reported += prompt_logprobs[max(0, len(reported) - chunk.start) :]
            elif num_tokens != most_tokens:
                self._take_back(sequence, most_tokens - num_tokens)
            if status is running:
                # A decode writes the KV of the latest token known before, and of all that it brings but the last.
                sequence.num_computed = computed = sequence.num_computed + num_computed
                if computed % block_size < num_computed:
                    self.kv.insert(sequence.table, known, computed, request.namespace)
            if reason is not None:
                self.finish(sequence, reason)
        self._num_tokens += generated
        return Committed(advanced, failed)

    @staticmethod
    def _reason_to_finish(sequence: Sequence, token_id: int) -> FinishReason | None:
        """Whether a sequence ends with the token that was added last; its text goes on if it does not end by the id."""
        request = sequence.request
        if token_id in request.stop_token_ids:
            sequence.stop_reason = token_id
            return "stop"
        if request.recipient is not None:
            sequence.stop_reason = request.recipient.add_text(sequence.index, token_id)
            if sequence.stop_reason is not None:
                return "stop"
        return "length" if len(sequence.token_ids) >= request.max_length else None

    def _take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """A decode brought fewer tokens than it was planned to bring at most."""
        if sequence.status is Status.RUNNING or sequence.table.host_blocks:
            sequence.num_scheduled -= num_tokens
        if sequence in self._batch.in_last_step and sequence.num_scheduled < sequence.request.max_length - 1:
            self._batch.start_decoding(sequence)
            sequence.check_at = sequence.num_scheduled

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

    def stats(self) -> EngineStats:
        """Counts since the start, and the queues as they are now."""
        return EngineStats(
            waiting=self.num_waiting,
            running=len(self._batch),
            blocks=self.kv.pool.counts(),
            host_blocks=self.kv.host.pool.counts(),
            prefix_cache_queries=self._planner.prefix_cache_queries,
            prefix_cache_hits=self._planner.prefix_cache_hits,
            preemptions_by_swap=self._planner.preemptions_by_swap,
            preemptions_by_recompute=self._planner.preemptions_by_recompute,
            steps=self._num_steps,
            generated_tokens=self._num_tokens,
        )

    @staticmethod
    def _check_result(plan: StepPlan, result: StepResult) -> None:
        """Assert that the results are those of the plan's rows, in its order (debug mode)."""
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        assert [each.row for each in result.sequences] == rows, "the result has other rows than the plan"

    def check(self) -> None:
        """Assert the invariants of the design (debug mode)."""
        live = [*self._batch.sequences, *self._waiting]
        self.kv.check(sequence.table for sequence in live)
        self._batch.check()
        block_size = self._config.block_size
        for sequence in self._batch.sequences:
            table = sequence.table
            written = min(sequence.num_scheduled, sequence.request.max_length - 1)
            assert sequence.num_computed <= written <= len(table.blocks) * block_size
            assert len(table.nodes) * block_size <= sequence.num_computed, "a block was inserted before its commit"
