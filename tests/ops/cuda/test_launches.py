"""Launches: enough threads and shared memory for every head_dim and product, and no more than the kernels ask for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minipaged.ops.cuda import launches
from minipaged.ops.cuda.launches import (
    GATED,
    LINEAR,
    LOGITS,
    AttentionTile,
    Launch,
    Tile,
    chunk_tile,
    decode_tile,
    tile_for,
)
from minipaged.ops.cuda.ops import HEAD_DIMS
from tests.batches import TokenSpan, make_batch
from tests.ops.cuda.attention_model import SPLIT, Model, Span
from tests.ops.cuda.emulated import EmulatorFault
from tests.ops.cuda.fake_gpu import Gpu
from tests.ops.cuda.machine import KV_SPLIT, Machine, use_fake_gpu
from tests.ops.cuda.test_linear import Case
from tests.tiny import write_tiny_model

BLOCK_SIZE = 16


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_steps_of_every_head_dim_in_check_mode(head_dim: int, tmp_path: Path) -> None:
    """Two prompts, a chunk, and a decode with two splits: every launch of a step, as the engine does it."""
    write_tiny_model(
        tmp_path, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1, head_dim=head_dim, dtype="float16"
    )
    tables = np.random.default_rng(0).permutation(16).astype(np.int32).reshape(2, 8)
    token_ids = [*range(5, 5 + KV_SPLIT + 5)]
    steps = [
        [TokenSpan(0, 0, token_ids[:40]), TokenSpan(1, 0, token_ids[:7])],
        [TokenSpan(0, 40, token_ids[40 : KV_SPLIT + 2])],
        [TokenSpan(1, 7, token_ids[7:8]), TokenSpan(0, KV_SPLIT + 2, token_ids[KV_SPLIT + 2 : KV_SPLIT + 3])],
    ]
    with use_fake_gpu(Gpu(checked=True)):
        made = Machine(tmp_path, max_sequences=2, max_model_len=128, num_blocks=16, block_size=BLOCK_SIZE)
        for spans in steps:
            sampled = (np.cumsum([len(span.token_ids) for span in spans]) - 1).tolist()
            batch = make_batch(made.ops, spans, tables, BLOCK_SIZE, sampled)
            logits = made.ops.download(made.ops.replay(made.logits, batch))
            expected = made.reference_logits(make_batch(made.reference, spans, tables, BLOCK_SIZE, sampled))
            np.testing.assert_allclose(logits, expected, rtol=0, atol=0.05)
        made.ops.close()
        del made, batch


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", ["attention_decode", "attention"])
def test_attention_needs_all_its_shared_memory(kernel: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 bytes less it reaches beyond them; with all of them `test_attention` finds no fault."""
    asked = (decode_tile if kernel == "attention_decode" else chunk_tile)(head_dim).shared_bytes
    model = Model("__half", 1, 3, head_dim, 16, (SPLIT + 40,), window=None, seed=1)
    start = SPLIT + 39 if kernel == "attention_decode" else SPLIT - 10
    monkeypatch.setattr(AttentionTile, "shared_bytes", property(lambda _: asked - 16))
    with pytest.raises(EmulatorFault, match="shared memory out of bounds"):
        model.attend([Span(0, start, SPLIT + 40)], kernel, checked=True)


@pytest.mark.parametrize("tile", [*LINEAR, *LOGITS, *GATED], ids=lambda tile: tile.kernel)
def test_products_need_all_their_shared_memory(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tile.shared_bytes
    case = Case(tile.kernel, tile.rows, tile.columns, tile.depth * (tile.stages + 1), "__half", False, False, seed=1)
    monkeypatch.setattr(Tile, "shared_bytes", property(lambda _: asked - 16))
    with pytest.raises(EmulatorFault, match="shared memory out of bounds"):
        case.run(checked=True)


def test_shared_memory_of_attention_is_what_its_kernels_say() -> None:
    asked = {dim: (decode_tile(dim).shared_bytes, chunk_tile(dim).shared_bytes) for dim in (128, 256)}
    assert asked == {128: (65_024, 86_016), 256: (75_776, 83_968)}


@pytest.mark.parametrize(
    ("launch", "grid", "threads"),
    [
        (launches.embed(7), (7,), 128),
        (launches.rms_norm(7, 8), (7,), 32),
        (launches.rms_norm(7, 256), (7,), 32),
        (launches.rms_norm(7, 264), (7,), 64),
        (launches.rms_norm(7, 128, element_bytes=4), (7,), 32),
        (launches.rms_norm(7, 4096), (7,), 512),
        (launches.rms_norm(7, 8192), (7,), 1024),
        (launches.rms_norm(7, 8200), (7,), 1024),
        (launches.rope_and_cache(7, 8), (7, 2), 128),
        (launches.rope_and_cache(7, 9), (7, 3), 128),
        (launches.take(7, 1024), (7, 1), 256),
        (launches.take(7, 1025), (7, 2), 256),
        (launches.kv_blocks(7, 1024), (7,), 256),
        (launches.kv_blocks(7, 1025), (14,), 256),
        (launches.update_tables(256), (1,), 256),
        (launches.update_tables(257), (2,), 256),
        (launches.penalise(512), (1,), 512),
        (launches.penalise(513), (2,), 512),
        (launches.add_bias(7), (7,), 32),
        (launches.choose(7), (7,), 512),
        (launches.attention_combine(7, 3, 96), (7, 3), 24),
        (LINEAR[0].launch(16, 32), (1,), 128),
        (LINEAR[0].launch(17, 33), (4,), 128),
        (decode_tile(128).launch(7, 7, 2, 4, 5), (8, 2, 5), 32),  # 4 tokens of a group to a tile, and one more each
        (decode_tile(64).launch(7, 7, 2, 17, 5), (14, 4, 5), 32),
        (chunk_tile(128).launch(100, 2, 2, 4, 1), (8, 2, 1), 128),
        (chunk_tile(256).launch(100, 2, 2, 4, 1), (14, 2, 1), 64),
    ],
)
def test_shapes(launch: Launch, grid: tuple[int, ...], threads: int) -> None:
    """At and behind the sizes at which they change."""
    assert (launch.grid, launch.threads) == (grid, threads)


def test_products_take_the_largest_tile_that_gives_every_multiprocessor_work() -> None:
    few, some, many = LINEAR
    columns = 4 * many.columns
    chosen = {rows: tile_for(rows, columns, LINEAR, multiprocessors=8) for rows in (1, 16, 17, 64, 65, 128, 129)}
    assert chosen == {1: few, 16: few, 17: some, 64: some, 65: some, 128: some, 129: many}
    assert tile_for(65, columns, LINEAR, multiprocessors=4) is many
    assert tile_for(65, columns, LINEAR, multiprocessors=5) is some
    assert tile_for(64, columns, LINEAR, multiprocessors=1) is some
