"""Random operations on the KV manager against a model that knows what every block holds."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minipaged.kv.ledger import blocks_for
from minipaged.kv.manager import KVManager
from minipaged.kv.table import BlockTable

BLOCK = 2
Content = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class Holder:
    """A sequence: its tokens, of which the first `written` have KV."""

    tokens: array[int]
    namespace: str
    table: BlockTable
    written: int = 0
    transfer: int | None = None


class KVMachine(RuleBasedStateMachine):
    """Holders come, write, publish, fork, copy, go to the host and back, and leave, in any order."""

    holders: list[Holder]

    @initialize(num_blocks=st.integers(1, 12), swap_blocks=st.integers(0, 6), caching=st.booleans())
    def start(self, num_blocks: int, swap_blocks: int, caching: bool) -> None:
        self.kv = KVManager(num_blocks=num_blocks, swap_blocks=swap_blocks, block_size=BLOCK, prefix_caching=caching)
        self.holders = []
        self.device: dict[int, Content] = {}
        self.host: dict[int, Content] = {}
        self.copying: dict[int, list[tuple[int, int]]] = {}

    def pick(self, rng: random.Random, *, on_device: bool) -> Holder | None:
        candidates = [h for h in self.holders if (h.transfer is None and not h.table.host_blocks) == on_device]
        return rng.choice(candidates) if candidates else None

    def content(self, holder: Holder, column: int, written: int) -> Content:
        return holder.namespace, tuple(holder.tokens[: min(written, (column + 1) * BLOCK)])

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from(["", "a"]), reuse=st.booleans()
    )
    def open(self, tokens: list[int], salt: str, reuse: bool) -> None:
        holder = Holder(array("i", tokens), salt, BlockTable())
        available = self.kv.pool.num_available
        cached = self.kv.open_table(holder.table, holder.tokens, salt, reuse=reuse, headroom=0)
        if cached is None:
            assert self.kv.pool.num_available == available
            assert blocks_for(len(tokens), BLOCK) > 0
            return
        assert cached < len(tokens)
        assert cached % BLOCK == 0
        assert reuse or cached == 0
        for column in range(cached // BLOCK):
            assert self.device[holder.table.blocks[column]] == self.content(holder, column, cached)
        assert len(holder.table.blocks) == blocks_for(len(tokens), BLOCK)
        holder.written = cached
        self.holders.append(holder)

    @rule(rng=st.randoms(use_true_random=False), publish=st.booleans())
    def write(self, rng: random.Random, publish: bool) -> None:
        holder = self.pick(rng, on_device=True)
        if holder is None:
            return
        if holder.written == len(holder.tokens):
            if len(holder.tokens) % BLOCK == 0:
                if not self.kv.can_allocate(1):
                    return
                holder.table.blocks.append(self.kv.allocate())
            holder.tokens.append(rng.randrange(2))
        column = holder.written // BLOCK
        if not self.kv.is_writable(holder.table.blocks[column]):
            if not self.kv.can_allocate(1):
                return
            source, destination = self.kv.make_writable(holder.table, column)
            if source in self.device:
                self.device[destination] = self.device[source]
            self.kv.release_block(source)
        block = holder.table.blocks[column]
        holder.written += 1
        self.device[block] = self.content(holder, column, holder.written)
        if publish:
            self.kv.insert(holder.table, holder.tokens, holder.written, holder.namespace)

    @rule(rng=st.randoms(use_true_random=False))
    def fork(self, rng: random.Random) -> None:
        parent = self.pick(rng, on_device=True)
        if parent is None or parent.written < len(parent.tokens):
            return
        child = Holder(array("i", parent.tokens), parent.namespace, self.kv.fork(parent.table, len(parent.tokens)))
        child.written = parent.written
        self.holders.append(child)

    @rule(rng=st.randoms(use_true_random=False))
    def swap_out(self, rng: random.Random) -> None:
        holder = self.pick(rng, on_device=True)
        if holder is None or holder.written == 0 or not self.kv.can_swap_out(holder.written):
            return
        holder.transfer, pairs = self.kv.swap_out(holder.table, holder.written)
        self.copying[holder.transfer] = list(pairs)

    @precondition(lambda self: self.copying)
    @rule(rng=st.randoms(use_true_random=False))
    def finish_copy(self, rng: random.Random) -> None:
        """The copy reads its source only now: nobody may have reused it."""
        transfer = rng.choice(sorted(self.copying))
        for source, destination in self.copying.pop(transfer):
            self.host[destination] = self.device[source]
        self.kv.finish_transfer(transfer)
        for holder in self.holders:
            if holder.transfer == transfer:
                holder.transfer = None

    @rule(rng=st.randoms(use_true_random=False))
    def swap_in(self, rng: random.Random) -> None:
        holder = self.pick(rng, on_device=False)
        if holder is None or holder.transfer is not None:
            return
        swapped = self.kv.swap_in(holder.table, holder.tokens, holder.written, holder.namespace, headroom=0)
        if swapped is None:
            return
        transfer, pairs = swapped
        for source, destination in pairs:
            self.device[destination] = self.host[source]
        self.kv.finish_transfer(transfer)
        for column in range(blocks_for(holder.written, BLOCK)):
            assert self.device[holder.table.blocks[column]] == self.content(holder, column, holder.written)

    @rule(rng=st.randoms(use_true_random=False))
    def leave(self, rng: random.Random) -> None:
        if self.holders:
            holder = self.holders.pop(rng.randrange(len(self.holders)))
            self.kv.release(holder.table)

    @rule()
    def reset(self) -> None:
        self.kv.reset_prefix_cache()
        assert len(self.kv.prefix) == 0
        assert self.kv.pool.num_cached == 0

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check(holder.table for holder in self.holders)
        device, host = self.kv.pool.counts(), self.kv.host.pool.counts()
        for counts in (device, host):
            assert counts.free + counts.cached + counts.in_use == counts.total
        for holder in self.holders:
            if not holder.table.host_blocks and holder.transfer is None:
                for column in range(blocks_for(holder.written, BLOCK)):
                    found = self.device[holder.table.blocks[column]]
                    expected = self.content(holder, column, holder.written)
                    assert found == expected, f"column {column} holds {found}, not {expected}"
        if not self.holders and not self.copying:
            assert device.in_use == host.in_use == 0


KVMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestKVManager = KVMachine.TestCase


def test_released_blocks_are_evicted_from_the_end_of_the_sequence() -> None:
    """A parent outlives its children: of a beginning that is half evicted, the first half is still found."""
    kv = KVManager(num_blocks=4, swap_blocks=0, block_size=BLOCK, prefix_caching=True)
    table, tokens = BlockTable(), array("i", range(4 * BLOCK))
    assert kv.open_table(table, tokens, "", reuse=True, headroom=0) == 0
    kv.insert(table, tokens, len(tokens), "")
    kv.release(table)
    for num_cached in (3, 2, 1, 0):
        other = BlockTable()
        kv.open_table(other, array("i", [99] * (BLOCK * (4 - num_cached))), "", reuse=False, headroom=0)
        assert kv.num_cached(array("i", [*tokens, 0]), "") == num_cached * BLOCK
        kv.release(other)


def manager(*, num_blocks: int = 4, swap_blocks: int = 0) -> KVManager:
    return KVManager(num_blocks=num_blocks, swap_blocks=swap_blocks, block_size=BLOCK, prefix_caching=True)


def test_a_table_opens_only_if_the_headroom_stays_available() -> None:
    kv, tokens = manager(), array("i", [1, 2, 3, 4])
    assert kv.open_table(BlockTable(), tokens, "", reuse=True, headroom=3) is None
    assert kv.pool.num_available == 4
    assert kv.open_table(BlockTable(), tokens, "", reuse=True, headroom=2) == 0
    assert kv.pool.num_available == 2


def test_a_sequence_comes_back_from_the_host_only_if_the_headroom_stays_available() -> None:
    kv, tokens, table = manager(swap_blocks=2), array("i", [1, 2, 3, 4]), BlockTable()
    kv.open_table(table, tokens, "", reuse=True, headroom=0)
    transfer, _ = kv.swap_out(table, 4)
    kv.finish_transfer(transfer)
    assert kv.swap_in(table, tokens, 4, "", headroom=3) is None
    assert kv.swap_in(table, tokens, 4, "", headroom=2) is not None
    assert kv.pool.num_available == 2


def test_fresh_names_each_block_as_it_is_allocated() -> None:
    kv, table = manager(), BlockTable()
    kv.open_table(table, array("i", [1, 2, 3]), "", reuse=True, headroom=0)
    assert kv.fresh == table.blocks
    kv.fresh.clear()
    assert kv.fresh == [kv.allocate()]


def test_a_table_knows_the_nodes_of_the_blocks_that_the_prefix_cache_gave_it() -> None:
    kv, first, second = manager(), BlockTable(), BlockTable()
    tokens = array("i", [1, 2, 3, 4, 5])
    kv.open_table(first, tokens, "", reuse=True, headroom=0)
    kv.insert(first, tokens, 4, "")
    assert kv.open_table(second, tokens, "", reuse=True, headroom=0) == 4
    assert second.nodes == first.nodes
    assert second.blocks[:2] == first.blocks[:2]
    assert kv.num_cached(tokens, "") == 4


def test_a_fork_knows_the_nodes_of_its_own_blocks_alone() -> None:
    kv, table, tokens = manager(), BlockTable(), array("i", [1, 2, 3, 4, 5])
    kv.open_table(table, tokens, "", reuse=True, headroom=0)
    kv.insert(table, tokens, 4, "")
    child = kv.fork(table, 2)
    assert (child.blocks, child.nodes) == (table.blocks[:1], table.nodes[:1])


def published(kv: KVManager) -> BlockTable:
    """A table of three full blocks, all in the prefix cache."""
    table, tokens = BlockTable(), array("i", [1, 2, 3, 4, 5, 6])
    kv.open_table(table, tokens, "", reuse=True, headroom=0)
    kv.insert(table, tokens, 6, "")
    return table


def test_what_a_sequence_leaves_behind_is_evicted_from_its_end() -> None:
    kv = manager()
    table = published(kv)
    blocks = table.blocks
    kv.release(table)
    assert [kv.pool.evict() for _ in blocks] == blocks[::-1]


def test_what_was_copied_to_the_host_is_evicted_from_its_end() -> None:
    kv = manager(swap_blocks=3)
    table = published(kv)
    blocks = table.blocks
    transfer, _ = kv.swap_out(table, 6)
    kv.finish_transfer(transfer)
    assert [kv.pool.evict() for _ in blocks] == blocks[::-1]
