"""The articles' figures."""

from __future__ import annotations

import pytest

from minipaged.kv import ledger


def test_66_gb_hold_about_8400_blocks_of_llama_7b() -> None:
    assert ledger.blocks_in_budget(66 * 10**9, 8 * 2**20) == 7867  # the article rounds 8 MiB to 8 MB: 8250


def test_50_tokens_take_four_blocks_of_16() -> None:
    assert ledger.blocks_for(50, 16) == 4
    assert [ledger.blocks_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_moving_half_a_gigabyte_over_pcie_takes_about_16_ms_each_way() -> None:
    both_ways = ledger.swap_seconds(256, 2 * 2**20, 32e9)
    assert both_ways / 2 == pytest.approx(0.0168, rel=0.01)
    assert ledger.recompute_seconds(4096, 8192.0) == 0.5
