"""BlockPool: which blocks are free, cached or in use, and how many references each has."""

from __future__ import annotations

from collections import OrderedDict

from minipaged.stats import BlockCounts


class BlockPool:
    """Blocks 0..num_blocks-1 with reference counts. Every operation is O(1).

    A block is *in use* while something refers to it. When nothing does any more, it is *cached* if its content is worth
    keeping (least recently used first out), else *free*.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count = [0] * num_blocks
        """How many tables and copies refer to each block; to be read only."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks whose content nobody wants."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nothing refers to, whose content is kept until the space is needed."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks that something refers to."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def counts(self) -> BlockCounts:
        """Blocks by state, now."""
        return BlockCounts(self.num_blocks, self.num_free, self.num_cached, self.num_in_use)

    def allocate(self) -> int:
        """A free block, now with one reference. `IndexError` if none is free (see `evict`)."""
        block = self._free.pop()
        self.ref_count[block] = 1
        return block

    def evict(self) -> int:
        """Turn the least recently used cached block into a free one. `KeyError` if none is cached."""
        block, _ = self._cached.popitem(last=False)
        self._free.append(block)
        return block

    def share(self, block: int) -> None:
        """One reference more to a block that is in use or cached."""
        if self.ref_count[block] == 0:
            del self._cached[block]
        self.ref_count[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One reference less. After the last one the block is cached if `keep`, else free."""
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            if keep:
                self._cached[block] = None
            else:
                self._free.append(block)

    def discard(self, block: int) -> None:
        """A block's content is no longer worth keeping: if it is cached, it becomes free."""
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self) -> None:
        """Assert invariant 1: free + cached + in use = total, each block in exactly one of them."""
        idle = [*self._free, *self._cached]
        assert len(idle) == len(set(idle)), "a block is idle twice"
        assert all(self.ref_count[block] == 0 for block in idle), "an idle block has references"
        in_use = sum(1 for count in self.ref_count if count > 0)
        assert len(idle) + in_use == self.num_blocks, "a block is neither idle nor in use"
        assert all(count >= 0 for count in self.ref_count), "a block was released too often"
