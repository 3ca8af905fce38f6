"""Scheduler: continuous batching under a token budget.

Each step, every running sequence that has its prompt computed decodes one token; what is left of `max_batched_tokens`
goes to prefill chunks, first of the sequences already begun, then of newly admitted ones, best rank first. When blocks
run out the worst-ranked sequence is preempted, so that the best-ranked one always gets on.

`plan` may be called again before the previous plan's result is committed. Then the tokens of the step in flight are not
known yet, only how many there will be, and that is all a plan needs: block tables and positions. A sequence that turns
out to have stopped costs one discarded token. Blocks given back meanwhile may be planned for others at once, because
the runner executes plans in order.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from minipaged.config import EngineConfig
from minipaged.errors import EngineBusyError, InvalidRequestError, PromptTooLongError
from minipaged.kv.manager import KVManager, KVStats
from minipaged.output import FinishReason, TokenLogprob
from minipaged.plan_draft import PlanDraft
from minipaged.preemption import PreemptionPolicy
from minipaged.request import Request, Sequence, Status
from minipaged.running import RunningBatch
from minipaged.step import Admission, Chunk, StepPlan, StepResult, TableUpdate, Transfer


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
    kv: KVStats


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan whose result is awaited, and the sequences behind its rows."""

    plan: StepPlan
    decoding: tuple[Sequence, ...]
    chunked: tuple[Sequence, ...]


class Scheduler:
    """Owns requests, sequences and the KV bookkeeping. Pure Python, used from one thread, never blocks."""

    def __init__(self, config: EngineConfig, *, num_blocks: int, swap_blocks: int, block_bytes: int) -> None:
        self._config = config
        self._policy = PreemptionPolicy(config, block_bytes)
        self.kv = KVManager(
            num_blocks=num_blocks,
            swap_blocks=swap_blocks,
            block_size=config.block_size,
            prefix_caching=config.prefix_caching,
        )
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []
        self._num_new = 0
        self._batch = RunningBatch(config.max_running)
        self._in_flight: deque[_InFlight] = deque()
        self._last_planned = -1
        self._last_committed = -1
        self._swaps = 0
        self._recomputes = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0

    # Requests

    def submit(self, request: Request) -> None:
        """Queue a request, creating its sequences.

        Raises `PromptTooLongError` if it can never fit and `EngineBusyError` if the waiting queue is full.
        """
        length, capacity = len(request.prompt), self.kv.pool.num_blocks * self._config.block_size
        if length >= request.max_length:
            raise PromptTooLongError(
                f"The prompt of request {request.id!r} has {length} tokens, which leaves no room for an answer within "
                f"{request.max_length} tokens; shorten it, or raise max_model_len."
            )
        if request.max_length > capacity:
            raise PromptTooLongError(
                f"Request {request.id!r} may grow to {request.max_length} tokens but the whole block pool holds "
                f"{capacity}; lower max_tokens, or raise num_blocks or kv_cache_memory."
            )
        if request.params.n > self._config.max_running:
            raise InvalidRequestError(
                f"Request {request.id!r} asks for n = {request.params.n} samples but at most "
                f"{self._config.max_running} sequences run at once; lower n, or raise max_running."
            )
        if self._num_new >= self._config.max_waiting:
            raise EngineBusyError(
                f"{self._num_new} requests are waiting, which is the limit (max_waiting); retry later, or raise it."
            )
        request.sequences = [
            Sequence(request, index, array("i", request.prompt), request.max_length)
            for index in range(request.params.n)
        ]
        self._num_new += 1
        self._push(request.sequences[0])

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, wherever it is, and give back all it holds. Does nothing if it has ended already."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self._leave_batch(sequence)
        if sequence.index == 0 and sequence.request.scheduled_at is None:
            self._num_new -= 1
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
        draft = PlanDraft()
        self.kv.fresh.clear()
        self._secure(draft)
        self._admit(draft, now)
        self._schedule_decodes(draft)
        self._schedule_chunks(draft, self._config.max_batched_tokens - len(draft.decode_rows))
        if self._config.debug:
            self._check_writes(draft)
        for sequence in draft.complete:
            self._start_decoding(sequence, draft)
        for source, _ in draft.copies:
            self.kv.release_block(source)
        if not (draft.has_tokens or draft.swap_out or draft.swap_in):
            if self._in_flight:
                return None
            if draft.preempted:
                return self.plan(now)  # the only sequence made way for itself; now it can come back
            if not self.kv.host.num_pending:
                return None
            # Nothing to compute but a copy is under way: an empty plan lets the runner wait for it.
        self._last_planned += 1
        plan = draft.build(self._last_planned, tuple(self.kv.fresh) if self._config.debug else ())
        self._in_flight.append(_InFlight(plan, draft.decoding, tuple(draft.chunked)))
        if self._config.debug:
            self.check()
        return plan

    def commit(self, result: StepResult) -> Committed:
        """Take in the result of the oldest plan in flight."""
        step = self._in_flight.popleft()
        assert step.plan.id == result.plan_id, "results must be committed in plan order"
        self._last_committed = result.plan_id
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

    # Planning

    def _secure(self, draft: PlanDraft) -> None:
        """Make sure that every running sequence can write its next token, preempting the worst-ranked if need be."""
        needy = [s for s in self._batch.decoding if s.num_scheduled >= s.horizon]
        needy += [s for s in self._batch.prefilling if s.num_scheduled >= s.horizon]
        needy.sort(key=lambda sequence: sequence.rank)
        for sequence in needy:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for a better-ranked one
            if sequence.num_scheduled >= sequence.max_length - 1:
                self._batch.stop_decoding(sequence)
            elif self._may_write(sequence, draft):
                self._set_horizon(sequence)
            elif self._make_room(sequence, draft):
                self._extend(sequence, draft)

    def _may_write(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Whether a sequence can write its next token into the blocks it has."""
        blocks, column = sequence.table.blocks, sequence.num_scheduled // self._config.block_size
        if column == len(blocks):
            return False
        # Sources of this plan's copies are still owned on behalf of tables that have left them.
        gone = sum(1 for source, _ in draft.copies if source == blocks[column])
        return self.kv.is_writable(blocks[column], gone)

    def _make_room(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Whether a block can be had for a running sequence, by preemption if need be, of itself if it ranks worst."""
        while not self.kv.can_allocate(1):
            if self.kv.host.num_device_blocks_pending:
                draft.stalled.add(sequence)
                return False
            victim = self._victim()
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        return True

    def _extend(self, sequence: Sequence, draft: PlanDraft) -> None:
        """One more block for the sequence, or its own copy of the shared one that it is about to write into."""
        blocks, column = sequence.table.blocks, sequence.num_scheduled // self._config.block_size
        if column == len(blocks):
            blocks.append(self.kv.allocate())
        else:
            draft.copies.append(self.kv.make_writable(sequence.table, column))
        draft.table_updates.append(TableUpdate(sequence.row, column, blocks[column]))
        draft.extended.add(sequence)
        self._set_horizon(sequence)

    def _set_horizon(self, sequence: Sequence) -> None:
        sequence.horizon = min(len(sequence.table.blocks) * self._config.block_size, sequence.max_length - 1)

    def _victim(self) -> Sequence:
        """Whom to preempt: one that only awaits its last token, which costs nothing, else the worst rank."""
        return max(self._batch.ending or self._batch.sequences, key=lambda sequence: sequence.rank)

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Take a sequence's row and blocks away, keeping its KV on the host if that is cheaper, and queue it again."""
        table, num_tokens = sequence.table, sequence.num_scheduled
        can_swap = num_tokens > 0 and sequence not in self._batch.ending and self.kv.can_swap_out(num_tokens)
        if can_swap and self._policy.prefers_swap(len(table.blocks), num_tokens):
            transfer_id, pairs = self.kv.swap_out(table, num_tokens)
            draft.swap_out.append(Transfer(transfer_id, pairs))
            sequence.swap_transfer = transfer_id
            self._swaps += 1
        else:
            self.kv.release(table)
            sequence.num_scheduled = 0
            self._recomputes += 1
        self._leave_batch(sequence)
        sequence.status = Status.WAITING
        sequence.ready_after = self._last_planned
        draft.preempted.add(sequence)
        self._push(sequence)

    def _admit(self, draft: PlanDraft, now: float) -> None:
        """Admit waiting sequences, best rank first, while budget, rows and blocks last."""
        while self._waiting:
            sequence = self._waiting[0][1]
            if sequence.status is Status.FINISHED:
                heapq.heappop(self._waiting)
                continue
            if not self._has_budget() or not self._is_ready(sequence, draft) or self._is_prefix_coming(sequence):
                return
            if not self._try_admit(sequence, draft, now):
                candidates = (s for s in self._batch.sequences if s not in draft.extended)
                worst = max(candidates, key=lambda s: s.rank, default=None)
                if worst is None or worst.request.priority <= sequence.request.priority:
                    return
                if self.kv.host.num_device_blocks_pending:
                    return
                self._preempt(worst, draft)

    def _has_budget(self) -> bool:
        """Whether running sequences leave a token of the next step to others."""
        budget = self._config.max_batched_tokens - len(self._batch.decoding)
        for sequence in self._batch.prefilling:
            budget -= len(sequence.token_ids) - sequence.num_scheduled
            if budget <= 0:
                return False
        return budget > 0

    def _is_ready(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Whether a preempted sequence can come back: its tokens are known and its KV has arrived on the host."""
        if sequence in draft.preempted or sequence.ready_after > self._last_committed:
            return False
        return sequence.swap_transfer is None or not self.kv.host.is_pending(sequence.swap_transfer)

    def _is_prefix_coming(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing the very block that this one would have to compute first.

        Then it is cheaper to wait for a step or two: of many requests that begin alike and arrive together, only one
        computes the beginning.
        """
        if not self._may_reuse(sequence) or sequence.table.host_blocks:
            return False
        computing = [s for step in self._in_flight for s in step.chunked if s.status is Status.RUNNING]
        computing += [s for s in self._batch.prefilling if s not in computing]
        if not computing:
            return False
        tokens, namespace, size = sequence.token_ids, sequence.request.namespace, self._config.block_size
        cached = self.kv.num_cached(tokens, namespace)
        beginning = tokens[: cached + size]
        return len(beginning) < len(tokens) and any(
            s.request.namespace == namespace
            and s.rank < sequence.rank
            and len(s.table.nodes) * size <= cached
            and s.token_ids[: cached + size] == beginning
            for s in computing
        )

    def _may_reuse(self, sequence: Sequence) -> bool:
        """Log-probabilities of the prompt need every prompt token's logits, so its KV has to be computed."""
        return self._config.prefix_caching and sequence.request.params.prompt_logprobs is None

    def _try_admit(self, sequence: Sequence, draft: PlanDraft, now: float) -> bool:
        request = sequence.request
        siblings = self._unforked(sequence)
        if self._batch.num_free_rows < 1 + len(siblings):
            return False
        # A little headroom keeps sequences from being admitted only to be preempted at the next block boundary.
        headroom = self.kv.pool.num_blocks // 100 if self._batch.sequences else 0
        if sequence.table.host_blocks:
            swapped = self.kv.swap_in(
                sequence.table, sequence.token_ids, sequence.num_scheduled, request.namespace, headroom=headroom
            )
            if swapped is None:
                return False
            draft.swap_in.append(Transfer(*swapped))
            sequence.swap_transfer = None
        else:
            cached = self.kv.open_table(
                sequence.table,
                sequence.token_ids,
                request.namespace,
                reuse=self._may_reuse(sequence),
                headroom=headroom,
            )
            if cached is None:
                return False
            sequence.num_scheduled = cached
            if request.scheduled_at is None:
                request.scheduled_at, request.cached_tokens = now, cached
                self._num_new -= 1
                self._prompt_tokens += len(request.prompt)
                self._cached_tokens += cached
        heapq.heappop(self._waiting)
        sequence.num_computed = sequence.num_scheduled
        for member in (sequence, *siblings):
            self._batch.keep_row(member)
        self._enter_batch(sequence, draft)
        return True

    def _unforked(self, sequence: Sequence) -> list[Sequence]:
        """The samples that will fork from this sequence when its prompt is computed."""
        request = sequence.request
        if sequence.index != 0 or request.is_forked:
            return []
        return [sibling for sibling in request.sequences[1:] if sibling.status is not Status.FINISHED]

    def _enter_batch(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Start computing the known tokens of a sequence that has a table and a row."""
        sequence.status = Status.RUNNING
        self._batch.enter(sequence)
        self._set_horizon(sequence)
        request = sequence.request
        draft.admissions.append(
            Admission(
                row=sequence.row,
                token_ids=array("i", sequence.token_ids),
                prompt_length=len(request.prompt),
                num_computed=sequence.num_scheduled,
                blocks=tuple(sequence.table.blocks),
                params=request.params,
                seed=request.seed,
                sample_index=sequence.index,
            )
        )

    def _schedule_decodes(self, draft: PlanDraft) -> None:
        """One token for every decoding sequence."""
        draft.decoding, draft.decode_rows = self._batch.decodes(draft.stalled)
        for sequence in draft.decoding:
            sequence.num_scheduled += 1

    def _schedule_chunks(self, draft: PlanDraft, budget: int) -> None:
        """Spend the budget on the known tokens that have no KV yet."""
        for sequence in sorted(self._batch.prefilling, key=lambda s: s.rank):
            if budget == 0:
                return
            if sequence in draft.stalled:
                continue
            start, known = sequence.num_scheduled, len(sequence.token_ids)
            num_tokens = min(known - start, budget)
            budget -= num_tokens
            sequence.num_scheduled = start + num_tokens
            samples = sequence.num_scheduled == known
            draft.chunks.append(Chunk(sequence.row, start, num_tokens, samples, self._wants_prompt_logprobs(sequence)))
            draft.chunked.append(sequence)
            if samples:
                draft.complete.append(sequence)

    def _wants_prompt_logprobs(self, sequence: Sequence) -> bool:
        request = sequence.request
        missing = len(request.prompt) - 1 - request.num_prompt_logprobs
        return request.params.prompt_logprobs is not None and sequence.index == 0 and missing > 0

    def _start_decoding(self, sequence: Sequence, draft: PlanDraft) -> None:
        """All known tokens are computed: decode from the next plan on, and start the other samples."""
        self._batch.start_decoding(sequence)
        for sibling in self._unforked(sequence):
            self._fork(sequence, sibling, draft)
        sequence.request.is_forked = True

    def _fork(self, parent: Sequence, child: Sequence, draft: PlanDraft) -> None:
        """Start another sample on the parent's blocks; it computes the last prompt token again for its own logits."""
        num_tokens = len(parent.token_ids)
        child.table = self.kv.fork(parent.table, num_tokens)
        child.num_scheduled = child.num_computed = num_tokens - 1
        self._enter_batch(child, draft)
        child.horizon = child.num_scheduled
        parent.horizon = min(parent.horizon, parent.num_scheduled)

    # Leaving

    def _leave_batch(self, sequence: Sequence) -> None:
        self._batch.leave(sequence)
        for member in (sequence, *self._unforked(sequence)):
            self._batch.give_up_row(member)

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.rank, sequence))

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
            token_id, tokens = token_ids[index], sequence.token_ids
            tokens.append(token_id)
            if status is running:
                sequence.num_computed = computed = sequence.num_computed + 1
                if computed % block_size == 0:
                    self.kv.publish(sequence.table, tokens, computed, sequence.request.namespace)
            advanced.append((sequence, index))
            if token_id in sequence.request.stop_token_ids:
                self.finish(sequence, "stop")
            elif len(tokens) >= sequence.max_length:
                self.finish(sequence, "length")

    def _commit_chunks(self, step: _InFlight, result: StepResult, committed: Committed) -> None:
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
                self.kv.publish(sequence.table, sequence.token_ids, sequence.num_computed, sequence.request.namespace)
            if chunk.samples:
                if sequence.status is not Status.FINISHED:
                    self._append(sequence, result.token_ids[index])
                    committed.advanced.append((sequence, index))
                index += 1

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        if token_id in sequence.request.stop_token_ids:
            self.finish(sequence, "stop")
        elif len(sequence.token_ids) >= sequence.max_length:
            self.finish(sequence, "length")

    def _fail(self, step: _InFlight, result: StepResult, committed: Committed) -> None:
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
        return self._num_new

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or a step or a copy is under way."""
        waiting = any(sequence.status is not Status.FINISHED for _, sequence in self._waiting)
        return bool(self._batch.sequences or self._in_flight or self.kv.host.num_pending or waiting)

    def stats(self) -> SchedulerStats:
        """Counts, now."""
        return SchedulerStats(
            waiting=self._num_new,
            running=len(self._batch),
            preemptions_by_swap=self._swaps,
            preemptions_by_recompute=self._recomputes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            kv=self.kv.stats(),
        )

    def check(self) -> None:
        """Assert the invariants of the design (debug mode)."""
        live = [*self._batch.sequences, *(s for _, s in self._waiting if s.status is Status.WAITING)]
        self.kv.check(sequence.table for sequence in live)
        self._batch.check()
        block_size = self._config.block_size
        for sequence in self._batch.sequences:
            table = sequence.table
            assert sequence.num_computed <= sequence.num_scheduled <= len(table.blocks) * block_size
            assert len(table.nodes) * block_size <= sequence.num_computed, "a block was published before its commit"

    def _check_writes(self, draft: PlanDraft) -> None:
        """Assert invariant 2 for a plan being made: it writes only blocks that have one owner and no name."""
        writes = [(s, s.num_scheduled - 1, s.num_scheduled) for s in draft.decoding]
        for sequence, chunk in zip(draft.chunked, draft.chunks, strict=True):
            writes.append((sequence, chunk.start, chunk.start + chunk.num_tokens))
        sources = [source for source, _ in draft.copies]
        block_size, written = self._config.block_size, set[int]()
        for sequence, start, stop in writes:
            assert stop > start, "a chunk without tokens"
            for block in sequence.table.blocks[start // block_size : (stop - 1) // block_size + 1]:
                assert self.kv.is_writable(block, sources.count(block)), f"block {block} is shared or published"
                assert block not in written, f"two sequences write block {block}"
                written.add(block)
