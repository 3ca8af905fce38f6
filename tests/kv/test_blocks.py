"""The pool's order of reuse, and its own checks."""

from __future__ import annotations

import pytest

from minipaged.kv.blocks import BlockPool


def test_least_recently_released_content_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block, keep=True)
    pool.share(blocks[1])
    pool.release(blocks[1], keep=True)
    assert [pool.evict() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_blocks_without_content_are_used_before_cached_ones() -> None:
    pool = BlockPool(2)
    kept, dropped = pool.allocate(), pool.allocate()
    pool.release(kept, keep=True)
    pool.release(dropped, keep=False)
    assert pool.allocate() == dropped
    assert (pool.num_free, pool.num_cached, pool.num_in_use) == (0, 1, 1)


def test_nothing_can_be_allocated_from_an_empty_pool() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(IndexError):
        pool.allocate()
    with pytest.raises(KeyError):
        pool.evict()


def test_check_finds_a_block_released_too_often() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block, keep=False)
    pool.release(block, keep=False)
    with pytest.raises(AssertionError):
        pool.check()
