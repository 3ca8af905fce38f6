"""A runner without a model: its KV are symbols, so that every read is checked to be what the sequence alone would have.

The "KV" of position p is the hash of the tokens 0..p; the next token is a function of the hash of all tokens. A wrong
block, a missed copy, a stale slot or a wrong position shows at once.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minipaged.output import TokenLogprob
from minipaged.step import Fork, SequenceResult, StepPlan, StepResult, Transfer

POISON = "poison"
Slot = int | str | None


def prefix_hash(token_ids: Sequence[int]) -> int:
    """The symbolic KV of the last of these tokens."""
    return hash(tuple(token_ids))


def next_token(token_ids: Sequence[int], sample_index: int, vocab_size: int) -> int:
    """What a sequence with these tokens samples next."""
    return hash((sample_index, tuple(token_ids))) % vocab_size


def prompt_entry(token_ids: Sequence[int], position: int) -> tuple[TokenLogprob, ...]:
    """What stands for the log-probability of the token at a position: it depends on all tokens up to there."""
    return (TokenLogprob(token_ids[position], float(prefix_hash(token_ids[: position + 1]))),)


def alone(
    prompt: Sequence[int], sample_index: int, vocab_size: int, stop: frozenset[int], max_length: int
) -> list[int]:
    """All tokens of a sequence that runs by itself."""
    tokens = list(prompt)
    while len(tokens) < max_length:
        tokens.append(next_token(tokens, sample_index, vocab_size))
        if tokens[-1] in stop:
            break
    return tokens


@dataclass
class Row:
    """What the runner remembers of a running sequence."""

    tokens: array[int]
    table: list[int]
    sample_index: int


class SimulatedRunner:
    """Executes plans over symbolic KV.

    `delay` is how many steps a copy to or from the host takes to be reported, `num_tokens` how many tokens a decode
    brings; it brings fewer where the row has no block for their KV.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        swap_blocks: int,
        block_size: int,
        vocab_size: int,
        delay: Callable[[], int] = lambda: 0,
        num_tokens: Callable[[], int] = lambda: 1,
    ) -> None:
        self.block_size, self.vocab_size, self.delay, self.num_tokens = block_size, vocab_size, delay, num_tokens
        self.device: list[list[Slot]] = [[POISON] * block_size for _ in range(num_blocks)]
        self.host: list[list[Slot]] = [[POISON] * block_size for _ in range(swap_blocks)]
        self.rows: dict[int, Row] = {}
        self.copying: deque[tuple[Transfer, int, bool]] = deque()
        self.prefilled = 0

    def execute(self, plan: StepPlan) -> StepResult:
        finished = self._transfers(plan)
        for source, destination in plan.copies:
            self.device[destination] = list(self.device[source])
        for admission in plan.admissions:
            tokens = array("i", admission.token_ids)
            self.rows[admission.row] = Row(tokens, list(admission.blocks), admission.sample_index)
        self._fork(plan.forks)
        for row in plan.drops:
            del self.rows[row]
        for row, column, block in plan.table_updates:
            table = self.rows[row].table
            if column == len(table):
                table.append(block)
            else:
                table[column] = block
        supplied = dict(plan.supplied)
        results = [SequenceResult(row, self._decode(row, supplied.get(row))) for row in plan.decode_rows]
        for chunk in plan.chunks:
            assert chunk.num_tokens > 0
            self.prefilled += chunk.num_tokens
            tokens = self.rows[chunk.row].tokens
            end = chunk.start + chunk.num_tokens
            self._write(chunk.row, chunk.start, chunk.num_tokens)
            positions = range(chunk.start + 1, min(end + 1, len(tokens)))
            entries = tuple(prompt_entry(tokens, position) for position in positions) if chunk.prompt_logprobs else ()
            chosen: tuple[int, ...] = ()
            if chunk.samples:
                assert end == len(tokens)
                chosen = (self._sample(chunk.row, supplied.get(chunk.row)),)
            results.append(SequenceResult(chunk.row, chosen, prompt_logprobs=entries))
        return StepResult(plan.id, results, finished_transfers=finished)

    def _fork(self, forks: Sequence[Fork]) -> None:
        parents = [self.rows[fork.parent] for fork in forks]
        for fork, parent in zip(forks, parents, strict=True):
            tokens = parent.tokens[:]
            if fork.token is not None:
                tokens[-1] = fork.token
            self.rows[fork.child] = Row(tokens, list(parent.table), fork.sample_index)

    def _decode(self, row: int, supplied: int | None) -> tuple[int, ...]:
        state = self.rows[row]
        capacity = len(state.table) * self.block_size - len(state.tokens) + 1
        tokens = []
        for _ in range(max(1, min(self.num_tokens(), capacity))):
            self._write(row, len(state.tokens) - 1, 1)
            tokens.append(self._sample(row, supplied))
        return tuple(tokens)

    def _transfers(self, plan: StepPlan) -> tuple[int, ...]:
        for block in plan.poison:
            self.device[block] = [POISON] * self.block_size
        for transfer in plan.swap_out:
            self.copying.append((transfer, self.delay(), True))
        for transfer in plan.swap_in:
            for source, destination in transfer.pairs:
                self.device[destination] = list(self.host[source])
            self.copying.append((transfer, self.delay(), False))
        if not plan.num_tokens and self.copying:  # nothing else to do: wait for the first
            transfer, _, outward = self.copying[0]
            self.copying[0] = (transfer, 0, outward)
        finished, remaining = [], deque[tuple[Transfer, int, bool]]()
        for transfer, steps, outward in self.copying:
            if steps > 0:
                remaining.append((transfer, steps - 1, outward))
                continue
            if outward:  # the copy happens as late as possible, so that a block reused too early shows
                for source, destination in transfer.pairs:
                    self.host[destination] = list(self.device[source])
            finished.append(transfer.id)
        self.copying = remaining
        return tuple(finished)

    def _write(self, row: int, start: int, num_tokens: int) -> None:
        state = self.rows[row]
        for position in range(start, start + num_tokens):
            block = self.device[state.table[position // self.block_size]]
            block[position % self.block_size] = prefix_hash(state.tokens[: position + 1])

    def _sample(self, row: int, supplied: int | None) -> int:
        state = self.rows[row]
        for position in range(len(state.tokens)):
            found = self.device[state.table[position // self.block_size]][position % self.block_size]
            assert found == prefix_hash(state.tokens[: position + 1]), (
                f"row {row} reads another KV at {position}: {found}"
            )
        token = next_token(state.tokens, state.sample_index, self.vocab_size) if supplied is None else supplied
        state.tokens.append(token)
        return token
