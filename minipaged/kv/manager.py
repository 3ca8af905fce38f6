"""KVManager: block tables on top of the pool, the prefix cache and the host tier.

It decides which block holds what; the copies themselves are returned to the caller, who puts them into the step plan.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from minipaged.kv.blocks import BlockPool
from minipaged.kv.host import HostTier, PendingTransfer
from minipaged.kv.ledger import blocks_for
from minipaged.kv.prefix import ROOT, PrefixCache
from minipaged.kv.table import BlockTable


class KVManager:
    """The KV blocks of one engine. Pure bookkeeping; no array is touched here."""

    def __init__(self, *, num_blocks: int, swap_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.prefix = PrefixCache(num_blocks, block_size)
        self.host = HostTier(swap_blocks)
        self._prefix_caching = prefix_caching
        self.fresh: list[int] = []
        """Blocks allocated since the caller last emptied this list; their old content is meaningless."""

    # Allocation

    def can_allocate(self, count: int) -> bool:
        """Whether `count` blocks are free or cached."""
        return self.pool.num_available >= count

    def allocate(self) -> int:
        """A block with one reference; the least recently used cached content makes way if need be."""
        if self.pool.num_free == 0:
            self.prefix.evict(self.pool.evict())
        block = self.pool.allocate()
        self.fresh.append(block)
        return block

    def open_table(
        self, table: BlockTable, token_ids: array[int], namespace: str, *, reuse: bool, headroom: int
    ) -> int | None:
        """Give an empty table blocks for all of `token_ids`, the beginning from the prefix cache if `reuse`.

        Returns how many leading tokens have their KV already: never all of them, since the last token's logits are
        wanted. None, and nothing happens, if fewer than `headroom` blocks would stay available.
        """
        matched, nodes = self._match(token_ids, len(token_ids) - 1, namespace) if reuse else ([], [])
        missing = blocks_for(len(token_ids), self.block_size) - len(matched)
        if not self._can_take(matched, missing + headroom):
            return None
        self._take(table, matched, nodes, missing)
        return len(matched) * self.block_size

    def num_cached(self, token_ids: array[int], namespace: str) -> int:
        """How many leading tokens `open_table` would find in the prefix cache."""
        return len(self._match(token_ids, len(token_ids) - 1, namespace)[0]) * self.block_size

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A table that shares the blocks of the first `num_tokens` tokens."""
        blocks = table.blocks[: blocks_for(num_tokens, self.block_size)]
        for block in blocks:
            self.pool.share(block)
        return BlockTable(blocks, table.nodes[: len(blocks)])

    def is_writable(self, block: int, *, ref_count: int = 1) -> bool:
        """Whether a block has no more than this ref_count, and the prefix cache does not name it."""
        return self.pool.ref_count[block] == ref_count and block not in self.prefix

    def make_writable(self, table: BlockTable, column: int) -> tuple[int, int]:
        """Copy-on-write: put a fresh block in place of a shared one; returns the (source, destination) to copy.

        The caller now owns the source in the table's stead, and releases it once no allocation can be planned to happen
        before the copy.
        """
        source, destination = table.blocks[column], self.allocate()
        table.blocks[column] = destination
        del table.nodes[column:]
        return source, destination

    def release_block(self, block: int) -> None:
        """One reference less; what the prefix cache names stays cached."""
        self.pool.release(block, keep=block in self.prefix)

    def release(self, table: BlockTable) -> None:
        """Give back all blocks on both tiers, tail first, so that no cached parent is evicted before its child."""
        for block in reversed(table.blocks):
            self.release_block(block)
        self.host.release(table.host_blocks)
        table.blocks, table.nodes, table.host_blocks = [], [], []

    # Prefix cache

    def insert(self, table: BlockTable, token_ids: array[int], num_computed: int, namespace: str) -> None:
        """Make the full blocks among the first `num_computed` tokens, written and committed, findable."""
        if not self._prefix_caching:
            return
        size, nodes = self.block_size, table.nodes
        for column in range(len(nodes), num_computed // size):
            tokens = token_ids[column * size : (column + 1) * size].tobytes()
            parent = nodes[-1] if nodes else ROOT
            nodes.append(self.prefix.insert(table.blocks[column], parent, tokens, namespace))

    def reset_prefix_cache(self) -> None:
        """Forget all content; blocks in use stay in use."""
        for block in self.prefix.clear():
            self.pool.discard(block)

    # Host tier

    def can_swap_out(self, num_tokens: int) -> bool:
        """Whether the host tier has room for the blocks of the first `num_tokens` tokens."""
        return self.host.pool.num_available >= blocks_for(num_tokens, self.block_size)

    def swap_out(self, table: BlockTable, num_tokens: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Move the blocks of the first `num_tokens` tokens to the host; returns transfer id and (device, host) pairs.

        The device blocks are released when the transfer finishes, those past `num_tokens` at once.
        """
        count = blocks_for(num_tokens, self.block_size)
        moved, unused = table.blocks[:count], table.blocks[count:]
        for block in reversed(unused):
            self.release_block(block)
        host_blocks = [self.host.pool.allocate() for _ in moved]
        for block in host_blocks:
            self.host.pool.share(block)
        table.blocks, table.nodes, table.host_blocks = [], [], host_blocks
        transfer_id = self.host.start(PendingTransfer(tuple(moved), tuple(host_blocks)))
        return transfer_id, tuple(zip(moved, host_blocks, strict=True))

    def swap_in(
        self, table: BlockTable, token_ids: array[int], num_tokens: int, namespace: str, *, headroom: int
    ) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """Bring the first `num_tokens` tokens back and give the table blocks for all of `token_ids`.

        Returns transfer id and (host, device) pairs; blocks still in the prefix cache need no copy. None, and nothing
        happens, if fewer than `headroom` blocks would stay available.
        """
        matched, nodes = self._match(token_ids, num_tokens, namespace)
        missing = blocks_for(len(token_ids), self.block_size) - len(matched)
        if not self._can_take(matched, missing + headroom):
            return None
        self._take(table, matched, nodes, missing)
        host_blocks, table.host_blocks = table.host_blocks, []
        pairs = tuple(zip(host_blocks, table.blocks, strict=False))[len(matched) :]
        return self.host.start(PendingTransfer((), tuple(host_blocks))), pairs

    def finish_transfer(self, transfer_id: int) -> None:
        """A transfer has been reported complete."""
        for block in reversed(self.host.finish(transfer_id)):
            self.release_block(block)

    # Debugging

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Assert the invariants, given every live table."""
        self.pool.check()
        self.host.pool.check()
        self.prefix.check()
        device, host = Counter[int](), Counter[int]()
        for table in tables:
            device.update(table.blocks)
            host.update(table.host_blocks)
        for transfer in self.host.pending():
            device.update(transfer.device_blocks)
            host.update(transfer.host_blocks)
        for pool, expected in ((self.pool, device), (self.host.pool, host)):
            for block in range(pool.num_blocks):
                assert pool.ref_count[block] == expected[block], (
                    f"block {block} has ref_count {pool.ref_count[block]}, but {expected[block]} references are known"
                )

    # Details

    def _match(self, token_ids: array[int], limit: int, namespace: str) -> tuple[list[int], list[int]]:
        if not self._prefix_caching:
            return [], []
        return self.prefix.match(token_ids, limit, namespace)

    def _can_take(self, matched: list[int], missing: int) -> bool:
        ref_count = self.pool.ref_count
        revived = sum(1 for block in matched if ref_count[block] == 0)
        return self.pool.num_available - revived >= missing

    def _take(self, table: BlockTable, matched: list[int], nodes: list[int], missing: int) -> None:
        share = self.pool.share
        for block in matched:
            share(block)
        table.blocks = matched + [self.allocate() for _ in range(missing)]
        table.nodes = nodes
