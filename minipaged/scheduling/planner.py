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
from minipaged.scheduling.plan_builder import PlanBuilder
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.scheduling.request import Sequence, Status
from minipaged.scheduling.running import RunningBatch
from minipaged.scheduling.waiting import WaitingQueue
from minipaged.step import Admission, Chunk, Fork, TableUpdate, Transfer


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
        tokens_per_decode: int,
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._batch = batch
        self._in_flight = in_flight
        self._policy = policy
        self._max_batched_tokens = max_batched_tokens
        self._tokens_per_decode = tokens_per_decode
        self.preemptions_by_swap = 0
        self.preemptions_by_recompute = 0
        self.prefix_cache_queries = 0
        """Prompt tokens of requests admitted so far."""
        self.prefix_cache_hits = 0
        """Prompt tokens of requests admitted so far that came from the prefix cache."""

    def plan(self, now: float) -> PlanBuilder:
        """The next step, still to be finished. `now` is the time that newly scheduled requests are stamped with."""
        builder = PlanBuilder()
        self._provide_blocks(builder)
        self._admit(builder, now)
        self._schedule_decodes(builder)
        self._schedule_chunks(builder)
        if self._config.debug:
            self._check_writes(builder)
        for sequence in builder.complete:
            self._start_decoding(sequence, builder)
        for source, _ in builder.copies:
            self._kv.release_block(source)
        return builder

    def _provide_blocks(self, builder: PlanBuilder) -> None:
        """Make sure that every decoding sequence can write its next tokens, preempting the worst-ranked if need be.

        A sequence that still computes known tokens has had blocks of its own for all of them since its admission.
        """
        needy = [s for s in self._batch.decoding if s.num_scheduled >= s.check_at]
        needy.sort(key=lambda sequence: sequence.rank)
        for sequence in needy:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for a better-ranked one
            if sequence.num_scheduled >= sequence.request.max_length - 1:
                self._batch.stop_decoding(sequence)
            else:
                self._provide_blocks_for(sequence, builder)

    def _provide_blocks_for(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Append blocks, and copy shared ones, for the positions that a sequence may write in this step."""
        block_size = self._config.block_size
        end = min(sequence.num_scheduled + self._tokens_per_decode, sequence.request.max_length - 1)
        for column in range(sequence.num_scheduled // block_size, (end - 1) // block_size + 1):
            blocks = sequence.table.blocks
            if column < len(blocks) and self._is_writable(blocks[column], builder):
                continue
            if not self._make_room(sequence, builder):
                return
            if column == len(blocks):
                blocks.append(self._kv.allocate())
            else:
                builder.copies.append(self._kv.make_writable(sequence.table, column))
            builder.table_updates.append(TableUpdate(sequence.row, column, blocks[column]))
            builder.extended.add(sequence)
        self._set_check(sequence)

    def _is_writable(self, block: int, builder: PlanBuilder) -> bool:
        """Whether only one sequence has the block, and the prefix cache does not name it."""
        # A source of this plan's copies is still owned on behalf of each table that has left it.
        num_left = sum(1 for source, _ in builder.copies if source == block)
        return self._kv.is_writable(block, ref_count=1 + num_left)

    def _make_room(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Whether a block can be had for a running sequence, by preemption if need be, of itself if it ranks worst."""
        while not self._kv.can_allocate(1):
            if self._kv.host.num_device_blocks_pending:
                builder.stalled.add(sequence)
                return False
            victim = self._victim()
            self._preempt(victim, builder)
            if victim is sequence:
                return False
        return True

    def _set_check(self, sequence: Sequence) -> None:
        """Look at the sequence again when a decode step may write past its blocks, or has nothing to write."""
        last = sequence.request.max_length - 1
        capacity = len(sequence.table.blocks) * self._config.block_size
        sequence.check_at = last if capacity >= last else capacity - self._tokens_per_decode + 1

    def _victim(self) -> Sequence:
        """Whom to preempt: one that only awaits its last token, which costs nothing, else the worst rank."""
        return max(self._batch.in_last_step or self._batch.sequences, key=lambda sequence: sequence.rank)

    def _preempt(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Take a sequence's row and blocks away, keeping its KV on the host if that is cheaper, and queue it again."""
        table, num_tokens = sequence.table, sequence.num_scheduled
        # Swapping reads before this plan copies anything; with its last step in flight, a sequence needs no KV again.
        has_kv = num_tokens > 0 and sequence not in self._batch.in_last_step and sequence not in builder.extended
        can_swap = has_kv and self._kv.can_swap_out(num_tokens)
        if can_swap and self._policy.prefers_swap(len(table.blocks), num_tokens):
            transfer_id, pairs = self._kv.swap_out(table, num_tokens)
            builder.swap_out.append(Transfer(transfer_id, pairs))
            sequence.swap_transfer = transfer_id
            self.preemptions_by_swap += 1
        else:
            self._kv.release(table)
            sequence.num_scheduled = 0
            self.preemptions_by_recompute += 1
        self._batch.leave(sequence)
        sequence.status = Status.WAITING
        sequence.ready_after = self._in_flight.last_planned
        builder.preempted.add(sequence)
        self._waiting.push(sequence)

    def _admit(self, builder: PlanBuilder, now: float) -> None:
        """Admit waiting sequences, best rank first, while budget, rows and blocks last."""
        while (sequence := self._waiting.first()) is not None:
            if not self._has_budget() or not self._is_ready(sequence, builder) or self._is_prefix_coming(sequence):
                return
            if not self._try_admit(sequence, builder, now):
                candidates = (s for s in self._batch.sequences if s not in builder.extended)
                worst = max(candidates, key=lambda s: s.rank, default=None)
                if worst is None or worst.request.priority <= sequence.request.priority:
                    return
                if self._kv.host.num_device_blocks_pending:
                    return
                self._preempt(worst, builder)

    def _has_budget(self) -> bool:
        """Whether running sequences leave a token of the next step to others."""
        budget = self._max_batched_tokens - len(self._batch.decoding)
        for sequence in self._batch.prefilling:
            budget -= len(sequence.token_ids) - sequence.num_scheduled
            if budget <= 0:
                return False
        return budget > 0

    def _is_ready(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Whether a preempted sequence can come back: its tokens are known and its KV has arrived on the host."""
        if sequence in builder.preempted or sequence.ready_after > self._in_flight.last_committed:
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

    def _try_admit(self, sequence: Sequence, builder: PlanBuilder, now: float) -> bool:
        request = sequence.request
        if self._batch.num_free_rows < 1 + len(sequence.pending_forks):
            return False
        # A little headroom keeps sequences from being admitted only to be preempted at the next block boundary.
        headroom = self._kv.pool.num_blocks // 100 if self._batch.sequences else 0
        if sequence.table.host_blocks:
            swapped = self._kv.swap_in(
                sequence.table, sequence.token_ids, sequence.num_scheduled, request.namespace, headroom=headroom
            )
            if swapped is None:
                return False
            builder.swap_in.append(Transfer(*swapped))
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
            self.prefix_cache_queries += len(request.prompt)
            self.prefix_cache_hits += request.cached_tokens
        sequence.num_computed = sequence.num_scheduled
        self._batch.keep_rows(sequence)
        self._enter_batch(sequence, builder)
        return True

    def _enter_batch(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Start computing the known tokens of a sequence that has a table and a row."""
        sequence.status = Status.RUNNING
        self._batch.enter(sequence)
        self._set_check(sequence)
        request = sequence.request
        builder.admissions.append(
            Admission(
                row=sequence.row,
                token_ids=array("i", sequence.token_ids),
                prompt_length=len(request.prompt),
                num_computed=sequence.num_scheduled,
                blocks=tuple(sequence.table.blocks),
                params=request.params,
                seed=request.seed,
                sample_index=sequence.index,
                stop_token_ids=request.stop_token_ids,
            )
        )

    def _schedule_decodes(self, builder: PlanBuilder) -> None:
        """One decode for every sequence whose prompt is computed; it may bring several tokens."""
        builder.decodes, num_tokens = self._batch.decodes(builder.stalled), self._tokens_per_decode
        for sequence in builder.decodes.sequences:
            sequence.num_scheduled += num_tokens

    def _schedule_chunks(self, builder: PlanBuilder) -> None:
        """Spend what is left of the budget on the known tokens that have no KV yet."""
        budget = self._max_batched_tokens - len(builder.decodes.rows)
        for sequence in sorted(self._batch.prefilling, key=lambda s: s.rank):
            if budget == 0:
                return
            if sequence in builder.stalled:
                continue
            start, known = sequence.num_scheduled, len(sequence.token_ids)
            num_tokens = min(known - start, budget)
            budget -= num_tokens
            sequence.num_scheduled = start + num_tokens
            samples = sequence.num_scheduled == known
            builder.chunks.append(
                Chunk(sequence.row, start, num_tokens, samples, self._wants_prompt_logprobs(sequence))
            )
            builder.chunked.append(sequence)
            if samples:
                builder.complete.append(sequence)

    def _wants_prompt_logprobs(self, sequence: Sequence) -> bool:
        request = sequence.request
        missing = len(request.prompt) - 1 - len(request.prompt_logprobs)
        return request.params.prompt_logprobs is not None and sequence.index == 0 and missing > 0

    def _start_decoding(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """All known tokens are computed: decode from the next plan on, and start the other samples."""
        self._batch.start_decoding(sequence)
        for sibling in sequence.pending_forks:
            self._fork(sequence, sibling, builder)
        if sequence.index == 0:
            sequence.request.pending_forks = []

    def _fork(self, parent: Sequence, child: Sequence, builder: PlanBuilder) -> None:
        """Start another sample on the parent's blocks; it computes the last prompt token again for its own logits."""
        assert parent not in builder.extended, "the child would miss the updates of its parent's table"
        num_tokens = len(parent.token_ids)
        child.table = self._kv.fork(parent.table, num_tokens)
        child.num_scheduled = child.num_computed = child.check_at = num_tokens - 1
        child.status = Status.RUNNING
        self._batch.sequences[child] = None
        self._batch.start_decoding(child)
        builder.forks.append(Fork(parent.row, child.row, sample_index=child.index))
        parent.check_at = min(parent.check_at, parent.num_scheduled)

    def _check_writes(self, builder: PlanBuilder) -> None:
        """Assert invariant 2 for a plan being made: it writes only blocks that have one owner and no name."""
        writes = [
            (s, s.num_scheduled - self._tokens_per_decode, min(s.num_scheduled, s.request.max_length - 1))
            for s in builder.decodes.sequences
        ]
        for sequence, chunk in zip(builder.chunked, builder.chunks, strict=True):
            writes.append((sequence, chunk.start, chunk.start + chunk.num_tokens))
        block_size, written = self._config.block_size, set[int]()
        for sequence, start, stop in writes:
            assert stop > start, "a chunk without tokens"
            for block in sequence.table.blocks[start // block_size : (stop - 1) // block_size + 1]:
                assert self._is_writable(block, builder), f"block {block} is shared, or the prefix cache names it"
                assert block not in written, f"two sequences write block {block}"
                written.add(block)
