"""PrefixCache: full blocks found again by the tokens they hold and all tokens before them.

Exact, not probabilistic: a block is keyed by (parent node, its own token bytes, namespace), compared by equality, and a
node id is never used twice. By induction a match holds exactly the same tokens from position 0 on; no hash collision
can return another prompt's KV.
"""

from __future__ import annotations

from array import array

Key = tuple[int, bytes, str]
ROOT = 0


class PrefixCache:
    """Names the content of device blocks. It owns no blocks; whoever reuses a block first calls `forget`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_blocks
        self._nodes = [ROOT] * num_blocks
        self._last_node = ROOT

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return self._keys[block] is not None

    def match(self, token_ids: array[int], limit: int, namespace: str) -> tuple[list[int], list[int]]:
        """The blocks that hold the beginning of `token_ids[:limit]`, whole blocks only, and their nodes."""
        entries, size, node = self._entries, self._block_size, ROOT
        blocks: list[int] = []
        nodes: list[int] = []
        for end in range(size, limit + 1, size):
            block = entries.get((node, token_ids[end - size : end].tobytes(), namespace))
            if block is None:
                break
            blocks.append(block)
            node = self._nodes[block]
            nodes.append(node)
        return blocks, nodes

    def insert(self, block: int, parent: int, tokens: bytes, namespace: str) -> int:
        """Make a written and committed full block findable; returns its node.

        If another block is known for the same tokens, that one stays and its node is returned; this one stays private.
        """
        key = (parent, tokens, namespace)
        known = self._entries.get(key)
        if known is not None:
            return self._nodes[known]
        if self._keys[block] is not None:
            # Another sequence has inserted this very block, below an equal parent that was evicted since.
            return self._nodes[block]
        self._last_node += 1
        self._entries[key] = block
        self._keys[block] = key
        self._nodes[block] = self._last_node
        return self._last_node

    def evict(self, block: int) -> None:
        """The block is about to hold something else."""
        key = self._keys[block]
        if key is not None:
            del self._entries[key]
            self._keys[block] = None

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were known."""
        blocks = list(self._entries.values())
        for block in blocks:
            self.evict(block)
        return blocks

    def check(self) -> None:
        """Assert that entries and blocks name each other."""
        for key, block in self._entries.items():
            assert self._keys[block] == key, f"block {block} does not know its entry"
        known = sum(1 for key in self._keys if key is not None)
        assert known == len(self._entries), "a block has a key that is not in the cache"
