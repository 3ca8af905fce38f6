"""Planner: what the next step does.

Running sequences come first: each gets the block that it is about to write into, at the expense of the worst-ranked one
if need be. Then waiting sequences are admitted, every sequence whose prompt is computed decodes one token, and what is
left of `max_batched_tokens` goes to prefill chunks, best rank first.
"""

from __future__ import annotations

from array import array

from minipaged.config import EngineConfig
from minipaged.kv.manager import KVManager
from minipaged.scheduling.in_flight import StepsInFlight
from minipaged.scheduling.plan_builder import PlanDraft
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.scheduling.request import Sequence, Status
from minipaged.scheduling.running import RunningBatch
from minipaged.scheduling.waiting import WaitingQueue
from minipaged.step import Admission, Chunk, TableUpdate, Transfer


class Planner:
    """Moves sequences between the waiting queue and the running batch, and gives them blocks and tokens to compute."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        waiting: WaitingQueue,
        batch: RunningBatch,
        in_flight: StepsInFlight,
        policy: PreemptionPolicy,
        max_batched_tokens: int,
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._batch = batch
        self._in_flight = in_flight
        self._policy = policy
        self._max_batched_tokens = max_batched_tokens
        self.num_swaps = 0
        """Preemptions that moved KV to the host."""
        self.num_recomputes = 0
        """Preemptions that dropped KV."""
        self.prompt_tokens = 0
        """Prompt tokens of requests admitted so far."""
        self.cached_tokens = 0
        """Those of them that came from the prefix cache."""

    def draft(self, now: float) -> PlanDraft:
        """The next step. `now` is the time that newly scheduled requests are stamped with."""
        draft = PlanDraft()
        self._secure(draft)
        self._admit(draft, now)
        self._schedule_decodes(draft)
        self._schedule_chunks(draft)
        if self._config.debug:
            self._check_writes(draft)
        for sequence in draft.complete:
            self._start_decoding(sequence, draft)
        for source, _ in draft.copies:
            self._kv.release_block(source)
        return draft

    def _secure(self, draft: PlanDraft) -> None:
        """Make sure that every running sequence can write its next token, preempting the worst-ranked if need be."""
        needy = [s for s in self._batch.decoding if s.num_scheduled >= s.horizon]
        needy += [s for s in self._batch.prefilling if s.num_scheduled >= s.horizon]
        needy.sort(key=lambda sequence: sequence.rank)
        for sequence in needy:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for a better-ranked one
            if sequence.num_scheduled >= sequence.request.max_length - 1:
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
        return self._kv.is_writable(blocks[column], gone)

    def _make_room(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Whether a block can be had for a running sequence, by preemption if need be, of itself if it ranks worst."""
        while not self._kv.can_allocate(1):
            if self._kv.host.num_device_blocks_pending:
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
            blocks.append(self._kv.allocate())
        else:
            draft.copies.append(self._kv.make_writable(sequence.table, column))
        draft.table_updates.append(TableUpdate(sequence.row, column, blocks[column]))
        draft.extended.add(sequence)
        self._set_horizon(sequence)

    def _set_horizon(self, sequence: Sequence) -> None:
        sequence.horizon = min(len(sequence.table.blocks) * self._config.block_size, sequence.request.max_length - 1)

    def _victim(self) -> Sequence:
        """Whom to preempt: one that only awaits its last token, which costs nothing, else the worst rank."""
        return max(self._batch.ending or self._batch.sequences, key=lambda sequence: sequence.rank)

    def _preempt(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Take a sequence's row and blocks away, keeping its KV on the host if that is cheaper, and queue it again."""
        table, num_tokens = sequence.table, sequence.num_scheduled
        can_swap = num_tokens > 0 and sequence not in self._batch.ending and self._kv.can_swap_out(num_tokens)
        if can_swap and self._policy.prefers_swap(len(table.blocks), num_tokens):
            transfer_id, pairs = self._kv.swap_out(table, num_tokens)
            draft.swap_out.append(Transfer(transfer_id, pairs))
            sequence.swap_transfer = transfer_id
            self.num_swaps += 1
        else:
            self._kv.release(table)
            sequence.num_scheduled = 0
            self.num_recomputes += 1
        self._batch.leave(sequence)
        sequence.status = Status.WAITING
        sequence.ready_after = self._in_flight.last_planned
        draft.preempted.add(sequence)
        self._waiting.push(sequence)

    def _admit(self, draft: PlanDraft, now: float) -> None:
        """Admit waiting sequences, best rank first, while budget, rows and blocks last."""
        while (sequence := self._waiting.first()) is not None:
            if not self._has_budget() or not self._is_ready(sequence, draft) or self._is_prefix_coming(sequence):
                return
            if not self._try_admit(sequence, draft, now):
                candidates = (s for s in self._batch.sequences if s not in draft.extended)
                worst = max(candidates, key=lambda s: s.rank, default=None)
                if worst is None or worst.request.priority <= sequence.request.priority:
                    return
                if self._kv.host.num_device_blocks_pending:
                    return
                self._preempt(worst, draft)

    def _has_budget(self) -> bool:
        """Whether running sequences leave a token of the next step to others."""
        budget = self._max_batched_tokens - len(self._batch.decoding)
        for sequence in self._batch.prefilling:
            budget -= len(sequence.token_ids) - sequence.num_scheduled
            if budget <= 0:
                return False
        return budget > 0

    def _is_ready(self, sequence: Sequence, draft: PlanDraft) -> bool:
        """Whether a preempted sequence can come back: its tokens are known and its KV has arrived on the host."""
        if sequence in draft.preempted or sequence.ready_after > self._in_flight.last_committed:
            return False
        return sequence.swap_transfer is None or not self._kv.host.is_pending(sequence.swap_transfer)

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
        cached = self._kv.num_cached(tokens, namespace)
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
        if self._batch.num_free_rows < 1 + len(sequence.unforked):
            return False
        # A little headroom keeps sequences from being admitted only to be preempted at the next block boundary.
        headroom = self._kv.pool.num_blocks // 100 if self._batch.sequences else 0
        if sequence.table.host_blocks:
            swapped = self._kv.swap_in(
                sequence.table, sequence.token_ids, sequence.num_scheduled, request.namespace, headroom=headroom
            )
            if swapped is None:
                return False
            draft.swap_in.append(Transfer(*swapped))
            sequence.swap_transfer = None
        else:
            cached = self._kv.open_table(
                sequence.table,
                sequence.token_ids,
                request.namespace,
                reuse=self._may_reuse(sequence),
                headroom=headroom,
            )
            if cached is None:
                return False
            sequence.num_scheduled = cached
        self._waiting.pop()
        if request.scheduled_at is None:
            request.scheduled_at, request.cached_tokens = now, sequence.num_scheduled
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += request.cached_tokens
        sequence.num_computed = sequence.num_scheduled
        self._batch.keep_rows(sequence)
        self._enter_batch(sequence, draft)
        return True

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

    def _schedule_chunks(self, draft: PlanDraft) -> None:
        """Spend what is left of the budget on the known tokens that have no KV yet."""
        budget = self._max_batched_tokens - len(draft.decode_rows)
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
        for sibling in sequence.unforked:
            self._fork(sequence, sibling, draft)
        sequence.request.is_forked = True

    def _fork(self, parent: Sequence, child: Sequence, draft: PlanDraft) -> None:
        """Start another sample on the parent's blocks; it computes the last prompt token again for its own logits."""
        num_tokens = len(parent.token_ids)
        child.table = self._kv.fork(parent.table, num_tokens)
        child.num_scheduled = child.num_computed = num_tokens - 1
        self._enter_batch(child, draft)
        child.horizon = child.num_scheduled
        parent.horizon = min(parent.horizon, parent.num_scheduled)

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
                assert self._kv.is_writable(block, sources.count(block)), f"block {block} is shared or published"
                assert block not in written, f"two sequences write block {block}"
                written.add(block)
