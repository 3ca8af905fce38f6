"""A model whose logits depend on every token before them, read through block tables: KV that strays shows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from minipaged.kv.layout import KVLayout, Plane
from minipaged.ops.base import Batch, KVPool
from minipaged.ops.reference.numpy_ops import plane_elements
from minipaged.ops.reference.ops import ReferenceOps

Array = NDArray[np.generic]

VOCAB = 23
RAISES = 20
"""A sequence that holds this token makes the forward raise."""
IS_NAN = 21
"""After this token all logits are NaN."""


def history_logits(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """[VOCAB], given all tokens so far."""
    value = sum((position + 1) * token for position, token in enumerate(token_ids)) % 997
    scale = np.nan if token_ids[-1] == IS_NAN else 3
    return (scale * np.sin(np.arange(1, VOCAB + 1) * value)).astype(np.float32)


def greedy(token_ids: Sequence[int], count: int, *, allowed: range = range(RAISES)) -> list[int]:
    """The tokens that follow."""
    known = list(token_ids)
    for _ in range(count):
        known.append(int(history_logits(known)[allowed].argmax()))
    return known[len(token_ids) :]


class HistoryModel:
    """Stores each token as its own KV. Hidden states are the tokens so far; they are read from the cache."""

    def __init__(self) -> None:
        self.num_forwards = 0
        self.num_tokens: list[int] = []
        self.before_forward: Callable[[], None] = lambda: None

    def forward(self, batch: Batch[Array], cache: KVPool[Array]) -> Array:
        """[T, max_model_len + 1]: the token ids from position 0 and how many they are."""
        self.num_forwards += 1
        self.num_tokens.append(len(batch.token_ids))
        self.before_forward()
        block_size, [plane] = cache.layout.block_size, cache.layout.planes
        kv = plane_elements(cache, 0, plane)[:, 0, :, 0]
        block, offset = np.divmod(batch.slots.astype(np.int64), block_size)
        kv[block, offset] = batch.token_ids.astype(np.float32)
        width = batch.block_tables.shape[1] * block_size
        hidden = np.zeros((len(batch.token_ids), width + 1), np.float32)
        starts = batch.cu_seqlens.tolist()
        for row, start, end in zip(batch.rows.tolist(), starts, starts[1:], strict=False):
            history = kv[batch.block_tables[row].astype(np.int64)].reshape(-1)
            for token in range(start, end):
                length = int(batch.kv_extents[token].item())
                hidden[token, :length] = history[:length].astype(np.float32)
                hidden[token, -1] = length
        if (hidden[:, :-1] == RAISES).any():
            raise ValueError("an unlucky token")
        return hidden

    def logits(self, hidden: Array, batch: Batch[Array]) -> Array:
        """[N, VOCAB]"""
        rows = []
        for index in batch.sampled.tolist():
            *history, length = hidden[index].astype(np.float64).tolist()
            tokens = history[: int(length)]
            rows.append(history_logits([int(token) for token in tokens]) if np.isfinite(tokens).all() else _nan())
        return np.array(rows, np.float32).reshape(-1, VOCAB)


def history_cache(ops: ReferenceOps, *, num_blocks: int, block_size: int) -> tuple[KVPool[Array], NDArray[np.uint8]]:
    """Device pool, and host pool of the same size: a single plane with one number for each token."""
    plane = Plane(num_heads=1, width=1, element_type="float32", scale_bytes=0, offset=0, head_stride=4 * block_size)
    layout = KVLayout(num_layers=1, block_size=block_size, planes=(plane,))
    return ops.allocate_cache(layout, num_blocks), ops.allocate_host_cache(layout, num_blocks)


def _nan() -> NDArray[np.float32]:
    return np.full(VOCAB, np.nan, np.float32)
